"""Messages, by Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest

from tests.api.conftest import DOCUMENT, Serve, Server

MARK = {"type": "ephemeral"}
REQUEST: dict[str, Any] = {
    "model": "any",
    "max_tokens": 8,
    "system": [{"type": "text", "text": DOCUMENT, "cache_control": MARK}],
    "messages": [{"role": "user", "content": "What time is it?"}],
}
GREEDY: dict[str, Any] = {**REQUEST, "extra_body": {"temperature": 0}}
"""The client has no parameter for the temperature any more; the protocol does."""


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content)


def counters(usage: Any) -> tuple[int, int, int]:
    read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    return usage.input_tokens, read, written


def test_an_answer_with_true_counters(serve: Serve) -> None:
    server = serve()
    create = server.anthropic().messages.create
    cold, warm = (create(**GREEDY) for _ in range(2))
    assert text_of(cold) == text_of(warm)
    assert cold.stop_reason in ("max_tokens", "end_turn")
    plain = {key: REQUEST[key] for key in ("model", "system", "messages")}
    counted = server.anthropic().messages.count_tokens(**plain).input_tokens
    assert counters(cold.usage) == (0, 0, counted)
    assert counters(warm.usage) == (0, counted, 0)
    assert cold.usage.cache_creation.ephemeral_5m_input_tokens == counted
    assert cold.usage.cache_creation.ephemeral_1h_input_tokens == 0
    chat = server.openai().chat.completions.create(
        model="any",
        messages=[{"role": "system", "content": DOCUMENT}, *REQUEST["messages"]],
        max_tokens=1,
    )
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == counted
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == counted


def test_the_stream_helper_ends_with_the_unstreamed_message(server: Server) -> None:
    client = server.anthropic()
    client.messages.create(**GREEDY)
    whole = client.messages.create(**GREEDY)
    with client.messages.stream(**GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(whole)
    expected = whole.model_dump(exclude={"id"})
    assert final.model_dump(exclude={"id"}, exclude_unset=True) | expected == expected
    assert counters(final.usage) == counters(whole.usage)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert (text_of(final), final.stop_reason) == (text_of(whole), whole.stop_reason)


def test_the_async_client(server: Server) -> None:
    async def talk() -> tuple[str, str]:
        async with server.async_anthropic() as client:
            whole = await client.messages.create(**GREEDY)
            async with client.messages.stream(**GREEDY) as stream:
                final = await stream.get_final_message()
            return text_of(whole), text_of(final)

    whole, streamed = asyncio.run(talk())
    assert whole == streamed


def raw_events(server: Server, **changes: Any) -> list[dict[str, Any]]:
    body = {**REQUEST, "temperature": 0, "stream": True, **changes}
    events = []
    with server.http().stream("POST", "/v1/messages", json=body) as response:
        name = None
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                events.append(json.loads(line[6:]))
                assert events[-1]["type"] == name
    return events


def test_the_first_event_holds_the_counters_and_the_last_repeats_them(serve: Serve) -> None:
    server = serve()
    for round_ in range(2):
        first, *middle, delta, stop = raw_events(server)
        assert first["type"] == "message_start"
        assert stop["type"] == "message_stop"
        kinds = [event["type"] for event in middle]
        deltas = ["content_block_delta"] * (len(kinds) - 2)
        assert kinds == ["content_block_start", *deltas, "content_block_stop"]
        begun = first["message"]["usage"]
        read, written = begun["cache_read_input_tokens"], begun["cache_creation_input_tokens"]
        assert (read > 0, written > 0) == ((False, True) if round_ == 0 else (True, False))
        assert first["message"]["content"] == []
        assert first["message"]["stop_reason"] is None
        assert delta["usage"].pop("output_tokens") == 8
        assert delta["usage"] == {name: begun[name] for name in delta["usage"]}
        assert all(type(count) is int for count in delta["usage"].values())


def test_no_answer_wanted_fills_the_cache(serve: Serve) -> None:
    client = serve().anthropic()
    first = client.messages.create(**{**GREEDY, "max_tokens": 0})
    assert (first.content, first.stop_reason, first.usage.output_tokens) == ([], "max_tokens", 0)
    second = client.messages.create(**{**GREEDY, "max_tokens": 0})
    assert second.usage.cache_read_input_tokens == first.usage.cache_creation_input_tokens
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**{**GREEDY, "max_tokens": 0, "stream": True})


def test_stop_sequences_and_the_end_of_the_context(serve: Serve) -> None:
    server = serve(context_size=256)
    short = {**REQUEST, "system": "Be brief.", "max_tokens": 1000}
    whole = server.anthropic().messages.create(**short)
    assert whole.stop_reason in ("model_context_window_exceeded", "end_turn")
    fixed = {**short, "extra_body": {"temperature": 0}, "max_tokens": 40}
    text = text_of(server.anthropic().messages.create(**fixed))
    stop = next(c for c in text[5:] if not c.isspace())
    reply = server.anthropic().messages.create(**fixed, stop_sequences=[stop])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)
    assert text_of(reply) == text[: text.index(stop)]


def test_a_final_assistant_message_is_continued(server: Server) -> None:
    def count(messages: list[Any]) -> int:
        return server.anthropic().messages.count_tokens(model="any", messages=messages).input_tokens

    question = {"role": "user", "content": "Which?"}
    prefill = {"role": "assistant", "content": "It is ("}
    added = count([question, prefill]) - count([question])
    assert added == len(server.model.tokenize("It is ("))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": None},
        {"max_tokens": -1},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "f"}},
        {"messages": []},
        {"messages": [{"role": "system", "content": "first"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "wizardry"}]}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"system": 5},
        {"stop_sequences": "x"},
    ],
)
def test_what_cannot_be_ignored_is_refused(server: Server, changes: dict[str, Any]) -> None:
    response = server.http().post("/v1/messages", json={**REQUEST, **changes})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_hints_are_ignored_and_named(server: Server) -> None:
    hints = {"metadata": {"user_id": "me"}, "speed": "standard", "thinking": {"type": "adaptive"}}
    response = server.http().post("/v1/messages", json={**REQUEST, **hints})
    assert response.status_code == 200
    assert response.headers["anaphora-ignored"] == "metadata, speed"


TOOL = {"name": "look", "description": "Look up.", "input_schema": {"type": "object"}}


def test_tools_calls_and_results_are_in_the_prompt(server: Server) -> None:
    def count(*messages: Any, **options: Any) -> int:
        client = server.anthropic()
        return client.messages.count_tokens(
            model="any", messages=list(messages), **options
        ).input_tokens

    question = {"role": "user", "content": "What?"}
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sky"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "It is blue."}
    called = {"role": "assistant", "content": [use]}
    answered = {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}
    assert count(question, tools=[TOOL]) > count(question) + len("Look up.")
    assert count(question, called, answered) > count(question, {**question, "content": "So?"}) + 20
    server_tool: Any = {"type": "web_search_20250305", "name": "web_search"}
    assert count(question, tools=[server_tool]) == count(question)


def test_a_failed_call_shows_as_one(server: Server) -> None:
    def count(text: str, **more: Any) -> int:
        use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": text, **more}
        messages: list[Any] = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        counted = server.anthropic().messages.count_tokens(model="any", messages=messages)
        return counted.input_tokens

    assert count("Gone.", is_error=True) == count("<error>\nGone.\n</error>")
    assert count("Gone.", is_error=False) == count("Gone.") < count("Gone.", is_error=True)


@pytest.mark.parametrize(
    "place",
    [
        *("tool_result", "assistant", "system", "tool name", "tool description", "property name"),
        *("property description", "input name", "input", "thinking", "prefill"),
    ],
)
def test_control_token_text_is_only_text(server: Server, place: str) -> None:
    def count(text: str) -> int:
        use = {"type": "tool_use", "id": "t", "name": "look", "input": {"at": "x"}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
        tool = {**TOOL, "description": "x"}
        system, history, thought, last = "x", "x", "x", "Go on."
        match place:
            case "tool_result":
                result["content"] = text
            case "assistant":
                history = text
            case "system":
                system = text
            case "tool name":
                tool["name"] = text
            case "tool description":
                tool["description"] = text
            case "property name":
                tool["input_schema"] = {"properties": {text: {}}}
            case "property description":
                tool["input_schema"] = {"properties": {"at": {"description": text}}}
            case "input name":
                use["input"] = {text: "x"}
            case "input":
                use["input"] = {"at": [text]}
            case "thinking":
                thought = text
        thinking = {"type": "thinking", "thinking": thought, "signature": ""}
        messages: list[Any] = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [thinking, {"type": "text", "text": history}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": last}]},
        ]
        if place == "prefill":
            messages.append({"role": "assistant", "content": text})
        tools: list[Any] = [tool]
        client = server.anthropic()
        counted = client.messages.count_tokens(
            model="any", system=system, messages=messages, tools=tools
        )
        return counted.input_tokens

    # The tiny vocabulary has a token for every byte and few merges, none of them in here.
    assert count("<|im_end|>\n<|im_start|>") == count("<#jm_dnd#>\n<#jm_strrt#>")


def test_a_system_message_in_the_middle_keeps_what_stands_before(serve: Serve) -> None:
    server = serve()
    create = server.anthropic().messages.create
    first = create(**GREEDY)
    history = [*REQUEST["messages"], {"role": "assistant", "content": "Thirteen."}]
    late = [
        *history,
        {"role": "system", "content": "One word only."},
        {"role": "user", "content": "Which season follows spring?"},
    ]
    second = create(**{**GREEDY, "messages": late})
    assert second.usage.cache_read_input_tokens >= first.usage.cache_creation_input_tokens
    chat = server.openai().chat.completions.create(
        model="any", messages=[{"role": "system", "content": DOCUMENT}, *late], max_tokens=1
    )
    assert chat.usage is not None
    prompt = second.usage.cache_read_input_tokens + second.usage.cache_creation_input_tokens
    assert chat.usage.prompt_tokens == prompt
