"""Rules for volatile text, through the API."""

from __future__ import annotations

from typing import Any

import pytest

from anaphora.api.endpoint import Options
from anaphora.prompt.volatile import Rule, VolatileRules
from tests.api.conftest import DOCUMENT, Serve, Server
from tests.api.talk import PATHS, PROTOCOLS, Protocol, ask, events, request, said, system, user

NAME = "x-anthropic-billing-header"
LINE = NAME + ": cc_version=9.9.9; cc_entrypoint=cli; cch={};"
OFF = VolatileRules(built_in=())
CLOCK = Rule("clock", r"Time \d\d:\d\d\. ?", "move")
Json = dict[str, Any]


def agent(server: Server, checksum: str, previous: str | None) -> Any:
    """The request of a coding agent, in the words of the official client."""
    mark = {"type": "ephemeral"}
    return server.anthropic().messages.with_raw_response.create(
        model="any",
        max_tokens=4,
        system=[
            {"type": "text", "text": LINE.format(checksum)},
            {"type": "text", "text": DOCUMENT * 3, "cache_control": mark},  # type: ignore[typeddict-item]
        ],
        messages=[{"role": "user", "content": "Hi"}],
        extra_body={"diagnostics": {"previous_message_id": previous}},
    )


@pytest.mark.parametrize("rules", [VolatileRules(), OFF], ids=["on", "off"])
def test_a_bookkeeping_line_that_changes_with_every_request(
    serve: Serve, rules: VolatileRules
) -> None:
    server = serve(options=Options(profile="anthropic", volatile=rules))
    raw = agent(server, "0d1e2", None)
    first = raw.parse()
    assert first.usage.cache_creation_input_tokens > 2000
    raw = agent(server, "f3a47", first.id)
    second = raw.parse()
    explained = server.http().get(f"/v1/cache/explain/{second.id}").json()
    if rules is OFF:
        assert "anaphora-volatile" not in raw.headers
        assert second.usage.cache_read_input_tokens == 0
        reason = second.model_dump()["diagnostics"]["cache_miss_reason"]
        assert reason["type"] == "system_changed"
        assert explained["difference"]["place"]["number"] == 1
        assert explained["difference"]["place"]["kind"] == "system"
        assert (explained["cause"], explained["rules"]) == ("hash", [])
    else:
        assert raw.headers["anaphora-volatile"] == NAME
        read = second.usage.cache_read_input_tokens
        assert read == first.usage.cache_creation_input_tokens
        assert explained["rules"] == [NAME]
    third = agent(server, "f3a47", first.id).parse()
    assert third.usage.cache_read_input_tokens == first.usage.cache_creation_input_tokens


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_rules_hold_in_every_protocol_streamed_or_not(serve: Serve, protocol: Protocol) -> None:
    server = serve(options=Options(volatile=VolatileRules([CLOCK])))
    plain = ask(server, protocol, [system(f"Be kind. {DOCUMENT}"), user("Hi")])
    turns = [system(f"Be kind. Time 12:34. {DOCUMENT}"), user("Hi")]
    response = server.http().post(PATHS[protocol], json=request(protocol, turns))
    assert response.headers["anaphora-volatile"] == "clock"
    answer = said(protocol, response.json())
    moved = len("\n\nTime 12:34.")
    assert plain.prompt < answer.prompt <= plain.prompt + moved
    assert answer.read > plain.prompt - 32, "all but the moved text and the template's end"
    body = {**request(protocol, turns), "stream": True}
    with server.http().stream("POST", PATHS[protocol], json=body) as stream:
        assert stream.headers["anaphora-volatile"] == "clock"
        stream.read()


def test_counted_tokens_are_those_after_the_rules(server: Server) -> None:
    head = {"system": [{"type": "text", "text": LINE.format("0d1e2")}, *_blocks("Be kind.")]}
    body = {**head, "messages": [user("Hi")]}
    response = server.http().post("/v1/messages/count_tokens", json=body)
    assert response.headers["anaphora-volatile"] == NAME
    answer = server.http().post(PATHS["messages"], json={**body, "max_tokens": 1})
    assert response.json()["input_tokens"] == said("messages", answer.json()).prompt
    longer = {**body, "system": [*_blocks(LINE.format("0d1e2") + "x"), *_blocks("Be kind.")]}
    count = server.http().post("/v1/messages/count_tokens", json=longer).json()
    assert count == response.json()


def test_without_volatile_text_nothing_is_said(server: Server) -> None:
    response = server.http().post(PATHS["chat"], json=request("chat", [user(LINE)]))
    assert "anaphora-volatile" not in response.headers
    raw = server.http().post("/v1/completions", json={"prompt": LINE, "max_tokens": 1})
    assert raw.status_code == 200
    assert "anaphora-volatile" not in raw.headers
    assert [*events(server, "chat", request("chat", [user(LINE)]))]


def _blocks(text: str) -> list[Json]:
    return [{"type": "text", "text": text}]
