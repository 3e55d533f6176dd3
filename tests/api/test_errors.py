"""Odd and hostile requests: the provider's own error shape, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from anaphora.api.edge import Body
from anaphora.api.endpoint import Options
from anaphora.api.serving import Serving
from anaphora.keys import KeyFile, Keys
from tests.api.conftest import Serve, Server, roster
from tests.api.test_odd_values import REQUESTS

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
USUAL = {path: usual for path, _, usual in REQUESTS}
KINDS = {path: kind for path, kind, _ in REQUESTS}


def assert_openai(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert response.headers["x-request-id"].startswith("req_")
    return error


def assert_anthropic(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    body = response.json()
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"type", "message"}
    return error


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Server]:
    """With a small context, since some of these requests want to fill it."""
    server = Server(Serving(roster([tiny_llama], context_size=256)), Options())
    server.start()
    yield server
    server.stop()


def assert_error(path: str, response: httpx.Response, status: int) -> str:
    """An error in the shape of ``path``'s protocol; returns its type."""
    check = assert_anthropic if path.startswith("/v1/messages") else assert_openai
    return str(check(response, status)["type"])


every_path = pytest.mark.parametrize("path", USUAL)


@every_path
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"text"',
        b"{} {}",
        b"{'model': 1}",
        b'{"model": "\xff"}',
        b'{"model": "\xed\xa0\xbd"}',
        b"\xff\xfe{\x00}\x00",
        b'{"model": "a\nb"}',
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"metadata":' * 200 + b"{}" + b"}" * 200,
        b'{"tools": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"\\ud83d": "\\ude00"}',
    ],
    ids=lambda body: body[:30].decode("latin-1"),
)
def test_a_body_that_is_no_request(server: Server, path: str, body: bytes) -> None:
    http = server.http()
    assert assert_error(path, http.post(path, content=body), 400) == "invalid_request_error"
    assert http.post(path, json=USUAL[path]).status_code == 200


def numbers(kind: type[Body]) -> set[str]:
    """The members of a body that are numbers."""
    found = set()
    for name, member in kind.model_json_schema()["properties"].items():
        kinds = {choice.get("type") for choice in member.get("anyOf", [member])}
        if kinds & {"integer", "number"}:
            assert "boolean" not in kinds
            found.add(name)
    return found


HUGE = "1" + "0" * 30
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
TAKEN = {
    "-1": {"seed", "frequency_penalty", "presence_penalty"},
    HUGE: {"seed", *LIMITS},
    "1e30": {"seed", *LIMITS},
}
"""Where these numbers are fine; a limit is cut down to the room there is."""


@pytest.mark.parametrize("number", ["1e400", "-1e400", "-1", HUGE, "1e30", "NaN", "true", "false"])
@every_path
def test_numbers_that_make_no_sense(server: Server, path: str, number: str) -> None:
    for name in numbers(KINDS[path]):
        body = json.dumps({**USUAL[path], name: "@"}).replace('"@"', number)
        response = server.http().post(path, content=body)
        if name in TAKEN.get(number, ()):
            assert response.status_code == 200, body
        else:
            assert assert_error(path, response, 400) == "invalid_request_error", body


@every_path
def test_a_whole_number_may_have_a_point(server: Server, path: str) -> None:
    one, zero = {"n", "best_of", "top_k", "seed", *LIMITS}, {"top_logprobs"}
    for names, number in ((one, 1.0), (zero, 0.0)):
        for name in names & numbers(KINDS[path]):
            response = server.http().post(path, json={**USUAL[path], name: number})
            assert response.status_code == 200, name


@every_path
def test_of_members_with_one_name_the_last_counts(server: Server, path: str) -> None:
    usual = json.dumps(USUAL[path])
    (first, *_) = USUAL[path]
    twice = {True: f'{{"{first}": 5, {usual[1:]}', False: f'{usual[:-1]}, "{first}": 5}}'}
    for fine, body in twice.items():
        response = server.http().post(path, content=body)
        if fine:
            assert response.status_code == 200
        else:
            assert_error(path, response, 400)


SAID = {"/v1/completions": "prompt", "/v1/responses": "input"}
"""The member with what is said, where it isn't ``messages``."""
NOTHING_SAID: list[Any] = [
    None,
    5,
    True,
    {},
    [],
    [[]],
    [None],
    [5.5],
    [{}],
    {"role": "user", "content": "x"},
]
NO_MESSAGES = [
    "",
    [{"role": "wizard", "content": "x"}],
    [{"role": "", "content": "x"}],
    [{"role": 5, "content": "x"}],
    [{"role": None, "content": "x"}],
    [{"role": "\ufffd", "content": "x"}],
    [{"content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": {}}],
    [{"role": "user", "content": [5]}],
    [{"role": "user", "content": [{}]}],
    [{"role": "user", "content": [{"type": "wizardry"}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": None}]}],
]


@every_path
def test_what_is_said_has_to_be_something(server: Server, path: str) -> None:
    name = SAID.get(path, "messages")
    wrong: list[Any] = [*NOTHING_SAID]
    if path != "/v1/completions":
        wrong += NO_MESSAGES
    if path == "/v1/responses":
        wrong.remove("")  # a text is a message here, and an empty one is a message too
    http = server.http()
    for value in wrong:
        response = http.post(path, json={**USUAL[path], name: value})
        assert assert_error(path, response, 400) == "invalid_request_error", value
    without = {key: value for key, value in USUAL[path].items() if key != name}
    assert_error(path, http.post(path, json=without), 400)
    assert http.post(path, json=USUAL[path]).status_code == 200


def test_a_body_over_the_limit(serve: Serve) -> None:
    http = serve(options=Options(body_limit=1000)).http()
    for path, usual in USUAL.items():
        for content in (b" " * 1001, iter([b" " * 600] * 2)):
            kind = assert_error(path, http.post(path, content=content), 413)
            assert kind in ("invalid_request_error", "request_too_large")
        assert http.post(path, json=usual).status_code == 200


def test_unknown_paths_and_methods(server: Server) -> None:
    http = server.http()
    for path in ("/", "/v1", "/v1/nothing", "/v1/chat/completions/", "/v1/%ff", "/v1/\U0001f600"):
        assert_openai(http.post(path), 404)
    for path in ("/v1/messages/nothing", "/v1/messages/count_tokens/", "/v1/messages/%ff"):
        error = assert_anthropic(http.post(path), 404)
        assert error["type"] == "not_found_error"
    assert_anthropic(http.get("/v1/nothing", headers={"anthropic-version": "2023-06-01"}), 404)
    for path, usual in USUAL.items():
        for method in ("GET", "PUT", "PATCH", "DELETE", "PROPFIND"):
            response = http.request(method, path)
            assert_error(path, response, 405)
            assert response.headers["allow"] == "POST"
        assert http.post(path, json=usual).status_code == 200
    assert_openai(http.post("/health"), 405)


def test_keys_are_needed_where_there_are_any(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = KeyFile(file).add("somebody")
    http = serve(keys=Keys(file)).http()
    wrong: list[dict[str, Any]] = [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": key[:-1]},
        {"authorization": b"Bearer \xff\xfe"},
        {"authorization": "Bearer"},
        {"x-api-key": ""},
        {"x-api-key": key + "x"},
        {"x-api-key": "x" * 5000},
    ]
    right = [{"authorization": f"Bearer {key}"}, {"x-api-key": key}]
    for path, usual in USUAL.items():
        for headers in wrong:
            for body in (usual, {}):
                response = http.post(path, json=body, headers=headers)
                assert assert_error(path, response, 401) == "authentication_error"
                assert response.headers["www-authenticate"] == "Bearer"
        for headers in right:
            assert http.post(path, json=usual, headers=headers).status_code == 200
    for path in ("/v1/models", "/metrics"):
        assert_openai(http.get(path, headers=wrong[1]), 401)
        assert http.get(path, headers=right[0]).status_code == 200
    error = assert_openai(http.post(CHAT, json=HELLO), 401)
    assert error["code"] == "invalid_api_key"
    assert http.get("/health").status_code == 200


def test_tenants_are_apart(serve: Serve, tmp_path: Any) -> None:
    path = tmp_path / "keys.json"
    ours, theirs = (KeyFile(path).add(name) for name in ("us", "them"))
    server = serve(keys=Keys(path))

    def cached(key: str) -> int:
        response = server.http().post(CHAT, json=HELLO, headers={"x-api-key": key})
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(ours) == 0
    assert cached(theirs) == 0
    assert cached(ours) > 0


def test_a_page_from_elsewhere_is_turned_away(serve: Serve) -> None:
    friend = "http://friend.example"
    http = serve(options=Options(origins=(friend,))).http()
    assert_openai(http.post(CHAT, json=HELLO, headers={"host": "evil.example:80"}), 403)
    assert_openai(http.post(CHAT, json=HELLO, headers={"origin": "http://evil.example"}), 403)
    assert_openai(http.post(CHAT, json=HELLO, headers={"origin": "null"}), 403)
    response = http.post(CHAT, json=HELLO, headers={"origin": friend})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == friend
    response = http.options(CHAT, headers={"origin": friend})
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == friend
    own = str(http.base_url).rstrip("/")
    response = http.post(CHAT, json=HELLO, headers={"origin": own})
    assert response.status_code == 200
    assert http.post(CHAT, json=HELLO, headers={"host": "localhost"}).status_code == 200


def test_another_model_is_served_or_refused_where_that_is_wanted(serve: Serve) -> None:
    server = serve(options=Options(strict_model=True, strict_max_tokens=True))
    http = server.http()
    name = server.model.path.stem
    assert http.post(CHAT, json={**HELLO, "model": name}).json()["model"] == name
    error = assert_openai(http.post(CHAT, json={**HELLO, "model": "gpt-5"}), 404)
    assert error["code"] == "model_not_found"
    error = assert_openai(http.post(CHAT, json={**HELLO, "max_tokens": 10**9}), 400)
    assert error["param"] == "max_tokens"


def test_too_many_waiting_requests_are_refused_with_a_time(serve: Serve) -> None:
    server = serve(max_waiting=0, parallel=1)
    http = server.http()
    assert http.post(CHAT, json=HELLO).status_code == 200
    long = {**HELLO, "max_tokens": 8000, "stream": True, "logit_bias": {"260": -100, "262": -100}}
    with http.stream("POST", CHAT, json=long) as running:
        lines = running.iter_lines()  # dropping it would end the request
        next(lines)
        response = server.http().post(CHAT, json=HELLO)
        assert assert_openai(response, 429)["code"] == "rate_limit_exceeded"
        assert int(response.headers["retry-after"]) >= 1
        response = server.http().post("/v1/messages", json=HELLO)
        assert assert_anthropic(response, 529)["type"] == "overloaded_error"
        assert int(response.headers["retry-after"]) >= 1


def test_a_dead_engine_is_told_and_shows_in_health(serve: Serve) -> None:
    server = serve()
    server.model.close()
    assert_openai(server.http().post(CHAT, json=HELLO), 500)
    assert server.http().get("/health").status_code == 503
