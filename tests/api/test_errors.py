"""Odd and hostile requests: the provider's own error shape, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from anaphora.api.endpoint import Options
from anaphora.keys import KeyFile, Keys
from tests.api.conftest import Serve, Server

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


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


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"messages": "\xff"}',
        b'{"messages": NaN}',
        b"[" * 100_000,
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b'{"messages": {"role": "user"}}',
        b'{"messages": [[]]}',
        b'{"a":' * 200 + b"1" + b"}" * 200,
    ],
)
def test_a_body_that_is_no_request(server: Server, body: bytes) -> None:
    assert_openai(server.http().post(CHAT, content=body), 400)
    assert server.http().post(CHAT, json=HELLO).status_code == 200


def test_a_body_over_the_limit(serve: Serve) -> None:
    server = serve(options=Options(body_limit=1000))
    assert_openai(server.http().post(CHAT, content=b" " * 1001), 413)
    assert_openai(server.http().post(CHAT, content=iter([b" " * 600] * 2)), 413)
    error = assert_anthropic(server.http().post("/v1/messages", content=b" " * 1001), 413)
    assert error["type"] == "request_too_large"
    assert server.http().post(CHAT, json=HELLO).status_code == 200


def test_unknown_paths_and_methods(server: Server) -> None:
    http = server.http()
    assert_openai(http.get("/v1/nothing"), 404)
    assert_openai(http.get(CHAT), 405)
    assert_openai(http.post("/health"), 405)
    assert_anthropic(http.get("/v1/messages"), 405)
    error = assert_anthropic(http.post("/v1/messages/nothing"), 404)
    assert error["type"] == "not_found_error"


def test_keys_are_needed_where_there_are_any(serve: Serve, tmp_path: Any) -> None:
    path = tmp_path / "keys.json"
    key = KeyFile(path).add("somebody")
    server = serve(keys=Keys(path))
    http = server.http()
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": key[:-1]}):
        error = assert_openai(http.post(CHAT, json=HELLO, headers=headers), 401)
        assert error["code"] == "invalid_api_key"
        error = assert_anthropic(http.post("/v1/messages", json=HELLO, headers=headers), 401)
        assert error["type"] == "authentication_error"
        for path in ("/v1/models", "/metrics"):
            assert http.get(path, headers=headers).status_code == 401
    assert http.get("/health").status_code == 200
    for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
        assert http.post(CHAT, json=HELLO, headers=headers).status_code == 200
        assert http.get("/metrics", headers=headers).status_code == 200


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


EMOJI = "\U0001f600"


@pytest.mark.parametrize("field", ["user text", "system", "stop", "prompt_cache_key", "name"])
def test_half_an_emoji_counts_as_a_replacement_character(server: Server, field: str) -> None:
    def body(text: str) -> bytes:
        data: dict[str, Any] = {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
            ],
            "max_tokens": 1,
        }
        match field:
            case "user text":
                data["messages"][1]["content"] = "@"
            case "system":
                data["messages"][0]["content"] = [{"type": "text", "text": "@"}]
            case _:
                data[field] = "@"
        return json.dumps(data).replace("@", text).encode()

    def tokens(text: str) -> int:
        response = server.http().post(CHAT, content=body(text))
        assert response.status_code == 200
        return int(response.json()["usage"]["prompt_tokens"])

    assert tokens(r"\ud83d") == tokens("\ufffd")
    assert tokens(r"\ud83d\ude00") == tokens(EMOJI)
    tokens(r"\u0000")
    response = server.http().post(CHAT, content=body(r"\ud83d\ude00"))
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == tokens(EMOJI)


def test_an_error_about_half_an_emoji_is_told(server: Server) -> None:
    content = rb'{"messages": [{"role": "\ud83d"}], "\ud83d": 1}'
    assert_openai(server.http().post(CHAT, content=content), 400)


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
