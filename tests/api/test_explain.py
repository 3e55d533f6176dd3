"""Why was this a miss? Asked of a running server, about real requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from anaphora.api.books import Books
from anaphora.api.endpoint import Options
from anaphora.api.serving import Serving
from anaphora.cli import app
from anaphora.clock import ManualClock
from anaphora.diagnose.memory import PromptMemory
from anaphora.model import Model
from anaphora.profiles import PROFILES, Anthropic, Local, OpenAI
from anaphora.roster import Choice, Roster
from anaphora.settings import Settings
from tests.api.conftest import DOCUMENT, Serve, Server, issued
from tests.api.talk import PATHS, PROTOCOLS, Protocol, events, request, system, user
from tests.tiny_models import CONTROL

Json = dict[str, Any]
TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- for c in m.tool_calls %}{{ c | tojson }}{% endfor %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def explained(server: Server, answer_id: str, **headers: str) -> Json:
    response = server.http().get(f"/v1/cache/explain/{answer_id}", headers=headers)
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found


def post(server: Server, protocol: Protocol, body: Json) -> httpx.Response:
    response = server.http().post(PATHS[protocol], json=body)
    assert response.status_code == 200, response.text
    return response


def at(clock: str, opening: str) -> list[Json]:
    return [system(f"{opening} Time {clock}. {DOCUMENT}"), user("Hi")]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_clock_in_the_system_prompt_is_named(server: Server, protocol: Protocol) -> None:
    first, second = (
        post(server, protocol, request(protocol, at(clock, f"By {protocol}.")))
        for clock in ("12:34:56", "12:35:07")
    )
    found = explained(server, second.json()["id"])
    assert found["cause"] == "timestamp"
    assert found["request_id"] == second.json()["id"]
    assert str(found["computed_tokens"]) == second.headers["anaphora-computed-tokens"]
    assert found["nearest"]["request_id"] == first.json()["id"]
    difference = found["difference"]
    assert difference["place"] == {"kind": "system", "number": 1, "part": 0, "name": ""}
    assert difference["earlier"]["marked"] == "12:34:56"
    assert difference["now"]["marked"] == "12:35:07"
    assert found["read_tokens"] <= difference["position"] < found["prompt_tokens"]


def test_every_id_a_client_sees_will_do(server: Server) -> None:
    raw = server.openai().chat.completions.with_raw_response.create(
        model="any", max_tokens=1, messages=[{"role": "user", "content": "Which id?"}]
    )
    chat = raw.parse()
    expected = explained(server, chat.id)
    assert explained(server, raw.headers["request-id"]) == expected
    message = server.anthropic().messages.create(
        model="any", max_tokens=1, messages=[{"role": "user", "content": "Which id?"}]
    )
    assert message._request_id is not None
    assert explained(server, message._request_id) == explained(server, message.id)
    stream = events(server, "responses", request("responses", [user("And streamed?")]))
    ids = [event["response"]["id"] for event in stream if "response" in event]
    assert explained(server, ids[0])["request_id"] == ids[-1]
    text = server.openai().completions.create(model="any", prompt="Raw, too", max_tokens=1)
    assert explained(server, text.id)["request_id"] == text.id


def test_a_changed_message_and_an_appended_one(server: Server) -> None:
    turns = [system(f"Appended. {DOCUMENT}"), user("One?"), {"role": "assistant", "content": "A"}]
    post(server, "chat", request("chat", turns[:2]))
    grown = post(server, "chat", request("chat", [*turns, user("Two?")])).json()
    assert explained(server, grown["id"])["cause"] in ("appended", "nothing_missed")
    other = [turns[0], user("Another question altogether"), *turns[2:], user("Two?")]
    changed = explained(server, post(server, "chat", request("chat", other)).json()["id"])
    assert changed["cause"] == "message_changed"
    assert changed["difference"]["place"] == {
        **{"kind": "message", "number": 1, "part": 0, "name": "user"}
    }


def tool(name: str) -> Json:
    parameters = {"type": "object", "properties": {"at": {"type": "string"}}}
    return {
        "type": "function",
        "function": {"name": name, "description": f"Do {name}.", "parameters": parameters},
    }


@pytest.mark.parametrize("template", [None, TOOLS], ids=["generic", "native"])
def test_tools_in_another_order_and_another_tool(
    serve: Serve, tmp_path: Path, template: str | None
) -> None:
    (tmp_path / "template.jinja").write_text(template or "")
    settings = {"chat_template": tmp_path / "template.jinja"} if template else {}
    server = serve(**settings)
    tools = [tool("search"), tool("fetch"), tool("write")]
    body = request("chat", [system(DOCUMENT), user("Hi")])
    post(server, "chat", {**body, "tools": tools})
    for changed, cause in (
        ([*tools[1:], tools[0]], "tools_reordered"),
        ([*tools, tool("delete")], "tools_changed"),
    ):
        reply = post(server, "chat", {**body, "tools": changed}).json()
        found = explained(server, reply["id"])
        assert found["cause"] == cause, found
    assert "delete is new" in found["sentence"]
    other = tool("write")
    other["function"]["description"] = "Do something else."
    reply = post(server, "chat", {**body, "tools": [*tools[:2], other, tool("delete")]}).json()
    found = explained(server, reply["id"])
    assert (found["cause"], "write" in found["sentence"]) == ("tool_changed", True)


MARK = {"cache_control": {"type": "ephemeral"}}


def marked(blocks: int = 0) -> Json:
    """A message with a breakpoint in it and, so many blocks later, another one at its end."""
    parts = [{"type": "text", "text": DOCUMENT, **MARK}]
    parts += [{"type": "text", "text": f" Block {number}."} for number in range(blocks)]
    parts[-1].update(MARK)
    return {"max_tokens": 1, "messages": [{"role": "user", "content": parts}]}


def test_another_cache_key_and_another_setting_are_named(serve: Serve) -> None:
    rules = {**PROFILES, "openai": OpenAI(minimum=200), "anthropic": Anthropic(minimum=200)}
    server = serve(options=Options(profile="openai", profiles=rules))
    body = request("chat", [user(DOCUMENT)])
    post(server, "chat", {**body, "prompt_cache_key": "a"})
    for change, cause, named in (
        ({"prompt_cache_key": "b"}, "other_cache_key", "cache key"),
        ({"prompt_cache_key": "b", "verbosity": "low"}, "other_setting", "verbosity"),
    ):
        found = explained(server, post(server, "chat", {**body, **change}).json()["id"])
        assert (found["cause"], named in found["sentence"]) == (cause, True), found
    server = serve(options=Options(profile="anthropic", profiles=rules))
    post(server, "messages", marked())
    changed = {**marked(), "thinking": {"type": "enabled", "budget_tokens": 1024}}
    found = explained(server, post(server, "messages", changed).json()["id"])
    assert (found["cause"], "thinking" in found["sentence"]) == ("other_setting", True)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def timed(tiny_llama: Path, clock: ManualClock) -> Iterator[Server]:
    """A server with Anthropic's rules, and promises that last a minute under the local ones."""
    settings = Settings(cache_dir=None, memory_budget=64 << 20, threads=1, engine="thread")
    models = Roster([Choice("tiny", tiny_llama)], lambda path: Model(path, settings, clock))
    profiles = {**PROFILES, "anthropic": Anthropic(minimum=200), "local": Local(lifetime=60)}
    server = Server(Serving(models.__enter__()), Options(profiles=profiles))
    server.start()
    yield server
    server.stop()


def test_what_has_expired_is_told(timed: Server, clock: ManualClock) -> None:
    for options, body in (
        (timed.options, request("chat", [user("Expired. " + DOCUMENT)])),
        (replace(timed.options, profile="anthropic"), marked()),
    ):
        timed.options = options
        server = Server(timed.serving, options)
        server.start()
        protocol: Protocol = "messages" if "anthropic" in options.profile else "chat"
        before = post(server, protocol, body).json()["id"]
        assert explained(server, before)["cause"] == "first_request"
        clock.advance(59)
        assert explained(server, post(server, protocol, body).json()["id"])["cause"] in (
            *("nothing_missed", "appended"),
        )
        clock.advance(301)
        found = explained(server, post(server, protocol, body).json()["id"])
        assert found["cause"] == "expired"
        assert "lifetime was over" in found["sentence"]
        assert found["read_tokens"] == 0


def test_what_was_evicted_is_told(serve: Serve) -> None:
    server = serve(cache_dir=None, memory_budget=1 << 20, context_size=2048, block_size=64)
    body = request("chat", [user(DOCUMENT)])
    post(server, "chat", body)
    for number in range(12):
        post(server, "chat", request("chat", [user(f"Other {number}. {DOCUMENT}")]))
    found = explained(server, post(server, "chat", body).json()["id"])
    assert found["cause"] == "evicted"
    assert "space had been needed" in found["sentence"]
    again = explained(server, post(server, "chat", body).json()["id"])
    assert again["cause"] == "nothing_missed", "it was computed and promised again"


def test_what_a_damaged_file_cost_is_told(serve: Serve, tmp_path: Path) -> None:
    settings: Json = {"cache_dir": tmp_path / "cache", "context_size": 2048}
    body = request("chat", [user(DOCUMENT)])
    server = serve(**settings)
    post(server, "chat", body)
    server.stop()
    for file in (tmp_path / "cache").rglob("*.base"):
        file.write_bytes(b"damaged")
    server = serve(**settings)
    post(server, "chat", request("chat", [user("Hi")]))
    found = explained(server, post(server, "chat", body).json()["id"])
    assert found["cause"] == "lost"


def test_what_lies_too_far_before_a_breakpoint_is_told(serve: Serve) -> None:
    rules = {**PROFILES, "anthropic": Anthropic(minimum=200)}
    server = serve(options=Options(profile="anthropic", profiles=rules))
    post(server, "messages", marked())
    body = marked(20)
    del body["messages"][0]["content"][0]["cache_control"]
    found = explained(server, post(server, "messages", body).json()["id"])
    assert found["cause"] == "out_of_reach"
    assert found["nearest"]["shared_tokens"] > 200
    body = marked(19)
    body["messages"][0]["content"][0]["text"] = "Else. " + DOCUMENT
    post(server, "messages", body)
    del body["messages"][0]["content"][0]["cache_control"]
    found = explained(server, post(server, "messages", body).json()["id"])
    assert found["cause"] == "nothing_missed"


def test_another_tenants_request_is_as_unknown_as_none(serve: Serve, tmp_path: Path) -> None:
    keys, (one, two) = issued(tmp_path, "one", "two")
    server = serve(keys=keys)
    body = request("chat", [system("The launch code is 4711. " + DOCUMENT), user("Hi")])
    ids = []
    for key in (one, two):
        reply = server.http().post(PATHS["chat"], json=body, headers={"x-api-key": key})
        ids.append((reply.json()["id"], reply.headers["request-id"]))
    assert explained(server, ids[1][0], **{"x-api-key": two})["cause"] == "first_request"
    assert explained(server, ids[0][0], **{"x-api-key": one})["cause"] == "first_request"
    unknown = ("chatcmpl-0", "req_0", "0", "req_", "%00")
    for wanted in (*ids[0], *unknown):
        headers = {"x-api-key": two}
        response = server.http().get(f"/v1/cache/explain/{wanted}", headers=headers)
        assert response.status_code == 404
        assert "remembered" in response.json()["error"]["message"]
    headers = {"x-api-key": two, "anthropic-version": "2023-06-01"}
    response = server.http().get(f"/v1/cache/explain/{ids[0][0]}", headers=headers)
    assert response.json()["error"]["type"] == "not_found_error"
    assert server.http().get(f"/v1/cache/explain/{ids[0][0]}").status_code == 401


def test_nothing_is_remembered_where_that_is_switched_off(serve: Serve) -> None:
    server = serve(books=Books(memory=PromptMemory(max_bytes=0)))
    reply = post(server, "chat", request("chat", [user("Hi")])).json()
    assert server.http().get(f"/v1/cache/explain/{reply['id']}").status_code == 404


def test_a_prompt_below_the_minimum_and_one_without_breakpoints(serve: Serve) -> None:
    server = serve(options=Options(profile="anthropic"))
    client = server.anthropic()

    def ask(text: str, mark: Any) -> str:
        block: Any = {"type": "text", "text": text, "cache_control": mark}
        return client.messages.create(
            model="any",
            max_tokens=1,
            system=[block],
            messages=[{"role": "user", "content": "Hi"}],
        ).id

    mark = {"type": "ephemeral"}
    for text, marked, cause in (
        ("Be brief.", mark, "below_minimum"),
        (DOCUMENT * 2, None, "no_breakpoint"),
        (f"Marked. {DOCUMENT * 2}", mark, None),
    ):
        ask(text, marked)
        found = explained(server, ask(text, marked))
        if cause is None:
            assert found["read_tokens"] > 1024
        else:
            assert (found["cause"], found["read_tokens"]) == (cause, 0)


def test_the_command_asks_the_server(server: Server) -> None:
    post(server, "chat", request("chat", at("01:02:03", "Asked.")))
    reply = post(server, "chat", request("chat", at("01:02:04", "Asked."))).json()
    shown = CliRunner().invoke(app, ["explain", reply["id"], "--url", server.url])
    assert shown.exit_code == 0, shown.output
    assert "A time stamp in system block 1 changed." in shown.output
    assert "[-01:02:03-]" in shown.output
    assert "Move it behind everything that stays the same" in " ".join(shown.output.split())
    assert not any(control in shown.output for control in CONTROL[:1])
    data = CliRunner().invoke(app, ["explain", reply["id"], "--url", server.url, "--json"])
    assert json.loads(data.output)["cause"] == "timestamp"
