"""Calls of tools and reasoning, said by a model that always says the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator

from anaphora.answer.syntaxes import SYNTAXES
from anaphora.responses import ResponseStore
from tests.answer.templates import OPENED, TEMPLATES
from tests.api.conftest import Serve, Server
from tests.api.talk import PATHS, PROTOCOLS, Protocol
from tests.conftest import TinyModel

Json = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
ARGUMENTS = {"city": "Zürich 👋\n", "days": 3}
CALL = (
    '<tool_call>\n{"name": "look", "arguments": {"city": "Zürich 👋\\n", "days": 3}}\n</tool_call>'
)
SAID = f"<think>\nLet me see.\n</think>\n\nI will look.\n{CALL}"


@dataclass(frozen=True)
class Said:
    """What an answer is made of, in whichever protocol it came."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[tuple[str, Json], ...] = ()
    ids: tuple[str, ...] = ()
    ended: str | None = None
    reasoning_tokens: int | None = None


MARKERS = tuple(sorted({m for syntax in SYNTAXES if not syntax.channels for m in syntax.markers}))
MISTRAL = ("[TOOL_CALLS]", "[ARGS]")
WHOLE = Said("Let me see.", "I will look.", (("look", ARGUMENTS),))
ENDED = {"chat": "tool_calls", "messages": "tool_use", "responses": "completed"}


def body(
    protocol: Protocol, turns: Sequence[Json] = (), names: Sequence[str] = ("look",), **more: Any
) -> Json:
    """A request for an answer to the conversation ``turns``, which are in the protocol's words."""
    begun = [{"role": "user", "content": "How is it?"}, *turns]
    common: Json = {"model": "x", **more}
    match protocol:
        case "chat":
            tools = [
                {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
                for name in names
            ]
            return {"messages": begun, "tools": tools, "max_tokens": 400, **common}
        case "messages":
            tools = [{"name": name, "input_schema": SCHEMA} for name in names]
            return {"messages": begun, "tools": tools, "max_tokens": 400, **common}
        case "responses":
            tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in names]
            return {"input": begun, "tools": tools, "max_output_tokens": 400, **common}


def ask(server: Server, protocol: Protocol, request: Json, *, stream: bool = False) -> Any:
    """The answer in the official client's own words."""
    match protocol:
        case "chat":
            chat: Any = server.openai().chat.completions
            if not stream:
                return chat.create(**request)
            options = {"stream_options": {"include_usage": True}}
            with chat.stream(**request, **options) as events:
                try:
                    return events.get_final_completion()
                except openai.LengthFinishReasonError as error:
                    return error.completion
        case "messages":
            messages: Any = server.anthropic().messages
            if not stream:
                return messages.create(**request)
            with messages.stream(**request) as message:
                return message.get_final_message()
        case "responses":
            responses: Any = server.openai().responses
            if not stream:
                return responses.create(**request)
            *_, last = responses.create(**request, stream=True)
            return last.response


def said(protocol: Protocol, answer: Any) -> Said:
    match protocol:
        case "chat":
            (choice,) = answer.choices
            calls = choice.message.tool_calls or []
            return Said(
                getattr(choice.message, "reasoning_content", None) or "",
                choice.message.content or "",
                tuple((c.function.name, json.loads(c.function.arguments)) for c in calls),
                tuple(c.id for c in calls),
                choice.finish_reason,
                answer.usage and answer.usage.completion_tokens_details.reasoning_tokens,
            )
        case "messages":
            blocks = answer.content
            calls = [block for block in blocks if block.type == "tool_use"]
            return Said(
                "".join(block.thinking for block in blocks if block.type == "thinking"),
                "".join(block.text for block in blocks if block.type == "text"),
                tuple((c.name, c.input) for c in calls),
                tuple(c.id for c in calls),
                answer.stop_reason,
            )
        case "responses":
            items = answer.output
            calls = [item for item in items if item.type == "function_call"]
            thoughts = [item for item in items if item.type == "reasoning"]
            return Said(
                "".join(part.text for item in thoughts for part in item.content),
                answer.output_text,
                tuple((c.name, json.loads(c.arguments)) for c in calls),
                tuple(c.call_id for c in calls),
                answer.status,
                answer.usage.output_tokens_details.reasoning_tokens,
            )


def sent_back(protocol: Protocol, answer: Any) -> list[Json]:
    """An answer as its client sends it back."""
    match protocol:
        case "chat":
            return [answer.choices[0].message.model_dump(exclude_none=True)]
        case "messages":
            blocks = [block.model_dump(exclude_none=True) for block in answer.content]
            return [{"role": "assistant", "content": blocks}]
        case "responses":
            return [item.model_dump(exclude_none=True) for item in answer.output]


def result(protocol: Protocol, call_id: str, text: str) -> Json:
    match protocol:
        case "chat":
            return {"role": "tool", "tool_call_id": call_id, "content": text}
        case "messages":
            block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
            return {"role": "user", "content": [block]}
        case "responses":
            return {"type": "function_call_output", "call_id": call_id, "output": text}


Saying = Callable[..., Server]


@pytest.fixture
def saying(serve: Serve, tiny_model: TinyModel) -> Saying:
    """``saying(script, template, control)``: a server whose model says that."""

    def saying(
        script: str,
        template: str = TEMPLATES["hermes"],
        control: tuple[str, ...] = (),
        **options: Any,
    ) -> Server:
        path = tiny_model("script", script=script, template=template, control=control)
        return serve(paths=[path], **options)

    return saying


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> Protocol:
    protocol: Protocol = request.param
    return protocol


def test_reasoning_text_and_calls_streamed_and_not(saying: Saying, protocol: Protocol) -> None:
    server = saying(SAID)
    answer, streamed = (
        said(protocol, ask(server, protocol, body(protocol), stream=stream))
        for stream in (False, True)
    )
    assert len(answer.ids) == len(streamed.ids) == 1
    assert replace(answer, ids=()) == replace(streamed, ids=())
    assert replace(answer, ids=(), ended=None, reasoning_tokens=None) == WHOLE
    assert answer.ended == ENDED[protocol]
    if answer.reasoning_tokens is not None:
        assert 3 <= answer.reasoning_tokens <= 15


def test_reasoning_that_begins_in_the_prompt(saying: Saying, protocol: Protocol) -> None:
    server = saying(SAID.removeprefix("<think>\n"), OPENED)
    for stream in False, True:
        answer = said(protocol, ask(server, protocol, body(protocol), stream=stream))
        assert replace(answer, ids=(), ended=None, reasoning_tokens=None) == WHOLE


def test_without_tools_or_where_none_may_be_called_calls_are_text(
    saying: Saying, protocol: Protocol
) -> None:
    server = saying(SAID)
    none = {"type": "none"} if protocol == "messages" else "none"
    for request in (
        {**body(protocol), "tools": []},
        {**body(protocol), "tool_choice": none},
        body(protocol, names=["other"]),
    ):
        answer = said(protocol, ask(server, protocol, request))
        assert not answer.calls
        assert answer.text == f"I will look.\n{CALL}"
        assert answer.reasoning == "Let me see."


def test_one_call_can_be_the_end(saying: Saying, protocol: Protocol) -> None:
    other = '<tool_call>{"name": "see", "arguments": {}}</tool_call>'
    server = saying(f"{CALL}\n{other} and so on, for a long time. Nobody reads this.")
    names = ("look", "see")
    one: Json = {"parallel_tool_calls": False}
    if protocol == "messages":
        one = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    for stream in False, True:
        many = said(protocol, ask(server, protocol, body(protocol, names=names), stream=stream))
        assert [name for name, _ in many.calls] == ["look", "see"]
        assert len(set(many.ids)) == 2
        request = body(protocol, names=names, **one)
        answer = said(protocol, ask(server, protocol, request, stream=stream))
        assert [name for name, _ in answer.calls] == ["look"]
        assert answer.text == ""
        assert answer.ended == ENDED[protocol]


def test_a_call_that_is_cut_off_is_text(saying: Saying, protocol: Protocol) -> None:
    server = saying(SAID)
    limit = "max_output_tokens" if protocol == "responses" else "max_tokens"
    for stream in False, True:
        request = {**body(protocol), limit: 25}
        answer = said(protocol, ask(server, protocol, request, stream=stream))
        assert not answer.calls
        assert answer.text.startswith('I will look.\n<tool_call>\n{"name"')
        assert answer.ended in ("length", "max_tokens", "incomplete")


def test_control_tokens_are_read_and_never_shown(saying: Saying, protocol: Protocol) -> None:
    server = saying('[TOOL_CALLS]look[ARGS]{"days": 3}', TEMPLATES["mistral-args"], MISTRAL)
    for stream in False, True:
        answer = said(protocol, ask(server, protocol, body(protocol), stream=stream))
        assert answer.calls == (("look", {"days": 3}),)
        assert (answer.text, answer.reasoning) == ("", "")
    other = said(protocol, ask(server, protocol, body(protocol, names=["other"])))
    assert other.text == 'look{"days": 3}'
    prompt = {"prompt": "How is it?\n", "max_tokens": 400, "temperature": 0}
    raw = server.http().post("/v1/completions", json=prompt).json()["choices"][0]["text"]
    assert raw == other.text


def test_messages_in_channels(saying: Saying, protocol: Protocol) -> None:
    control = ("<|channel|>", "<|constrain|>", "<|message|>")
    call = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"days": 3}'
    server = saying(call, TEMPLATES["harmony"], control)
    for stream in False, True:
        answer = said(protocol, ask(server, protocol, body(protocol), stream=stream))
        assert answer.calls == (("look", {"days": 3}),)
        assert (answer.text, answer.reasoning) == ("", "")
    other = said(protocol, ask(server, protocol, body(protocol, names=["other"])))
    assert other.text == 'commentary to=functions.look json{"days": 3}'


def test_the_next_turn_computes_the_result_alone(saying: Saying, protocol: Protocol) -> None:
    server = saying(SAID, memory_budget=64 << 20)
    for stream in False, True:
        turns = [{"role": "user", "content": f"Streamed: {stream}"}]
        answer = ask(server, protocol, body(protocol, turns), stream=stream)
        settle(server)
        (call_id,) = said(protocol, answer).ids
        text = "It is as it was. " * 4
        following = body(
            protocol, [*turns, *sent_back(protocol, answer), result(protocol, call_id, text)]
        )
        response = server.http().post(PATHS[protocol], json=following)
        assert response.status_code == 200, response.text
        # The result, what closes it and what opens the answer: the tokenizer has a byte each.
        assert int(response.headers["anaphora-computed-tokens"]) < len(text) + 40


def test_a_stored_response_goes_on_with_its_calls(saying: Saying, tmp_path: Path) -> None:
    server = saying(SAID, responses=ResponseStore(tmp_path / "responses.db"))
    for stream in False, True:
        first = ask(server, "responses", body("responses"), stream=stream)
        (call_id,) = said("responses", first).ids
        output = result("responses", call_id, "Dry.")
        chained = body("responses")
        chained |= {"input": [output], "previous_response_id": first.id}
        second = ask(server, "responses", chained)
        full = body("responses", [*sent_back("responses", first), output])
        assert second.usage.input_tokens == ask(server, "responses", full).usage.input_tokens
        with server.http() as http:
            url = f"/v1/responses/{first.id}"
            assert http.get(url).json()["output"] == [
                item.model_dump(exclude_none=True) for item in first.output
            ]
        unanswered = {**chained, "input": "And?"}
        refused = server.http().post("/v1/responses", json=unanswered)
        assert refused.status_code == 400
        assert f"the call '{call_id}' has no result" in refused.json()["error"]["message"]


def test_a_stored_stream_is_replayed_as_it_was(saying: Saying, tmp_path: Path) -> None:
    server = saying(SAID, responses=ResponseStore(tmp_path / "responses.db"))
    with server.http() as http:
        sent = http.post("/v1/responses", json=body("responses", stream=True)).text
        events = [json.loads(line[6:]) for line in sent.splitlines() if line.startswith("data: ")]
        again = http.get(f"/v1/responses/{events[-1]['response']['id']}?stream=true").text
    replayed = [json.loads(line[6:]) for line in again.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in replayed] == [event["type"] for event in events]
    assert replayed[-1] == events[-1]
    added = [e["item"]["type"] for e in events if e["type"] == "response.output_item.added"]
    assert added == ["reasoning", "message", "function_call"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


def test_the_input_of_a_custom_tool_is_free_text(saying: Saying) -> None:
    call = '<tool_call>{"name": "run", "arguments": {"input": "print(1)\\n"}}</tool_call>'
    server = saying(call)
    request = body("responses")
    request["tools"] = [{"type": "custom", "name": "run"}]
    for stream in False, True:
        answer = ask(server, "responses", request, stream=stream)
        (item,) = answer.output
        assert (item.type, item.name, item.input) == ("custom_tool_call", "run", "print(1)\n")
        output = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "1"}
        turns = [*sent_back("responses", answer), output]
        following = body("responses", turns)
        following["tools"] = request["tools"]
        assert ask(server, "responses", following).status == "completed"


def test_settings_of_thinking_reach_the_template(saying: Saying, protocol: Protocol) -> None:
    opening = "{{ 'E=' ~ reasoning_effort ~ ' T=' ~ enable_thinking ~ ' ' ~ thinking ~ '\\n' }}"
    template = TEMPLATES["hermes"].replace("<|im_start|>assistant\\n' }}{%", f"' }}}}{opening}{{%")
    server = saying(SAID, template)

    def told(**more: Any) -> int:
        request = body(protocol, **more)
        response = server.http().post(PATHS[protocol], json=request)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert "anaphora-ignored" not in response.headers
        usage = answer["usage"]
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        if protocol == "messages":
            return sum(int(usage[name]) for name in names)
        return int(usage["prompt_tokens" if protocol == "chat" else "input_tokens"])

    def length(effort: str, thinks: str) -> int:
        return len(f"E={effort} T={thinks} {thinks}")

    none = told() - length("", "")
    effort: Mapping[Protocol, Callable[[str], Json]] = {
        "chat": lambda value: {"reasoning_effort": value},
        "messages": lambda value: {"output_config": {"effort": value}},
        "responses": lambda value: {"reasoning": {"effort": value}},
    }
    assert told(**effort[protocol]("low")) == none + length("low", "True")
    if protocol == "messages":
        assert told(thinking={"type": "disabled"}) == none + length("", "False")
        enabled = {"type": "enabled"}
        assert told(thinking=enabled) == none + length("", "True")
    else:
        assert told(**effort[protocol]("none")) == none + length("none", "False")
    given = {"chat_template_kwargs": {"enable_thinking": "no", "thinking": "no"}}
    assert told(**given) == none + length("", "no")


def settle(server: Server) -> None:
    """Return when the next turns are prepared."""

    async def settled() -> None:
        if task := server.serving._settling:
            await task

    server.call(settled())


def test_calls_results_and_tools_that_do_not_match_are_refused(
    server: Server, protocol: Protocol
) -> None:
    def made(*ids: str) -> list[Json]:
        if protocol == "responses":
            return [
                {"type": "function_call", "call_id": one, "name": "look", "arguments": "{}"}
                for one in ids
            ]
        if protocol == "messages":
            uses = [{"type": "tool_use", "id": one, "name": "look", "input": {}} for one in ids]
            return [{"role": "assistant", "content": uses}]
        function = {"name": "look", "arguments": "{}"}
        calls = [{"id": one, "type": "function", "function": function} for one in ids]
        return [{"role": "assistant", "tool_calls": calls}]

    def status(turns: Sequence[Json], names: Sequence[str] = ("look",)) -> tuple[int, str]:
        request = body(protocol, turns, names)
        limit = "max_output_tokens" if protocol == "responses" else "max_tokens"
        response = server.http().post(PATHS[protocol], json={**request, limit: 1})
        return response.status_code, response.text

    def of(call_id: str) -> Json:
        return result(protocol, call_id, "Dry.")

    again = {"role": "user", "content": "And?"}
    assert status([*made("a", "b"), of("b"), of("a")])[0] == 200
    for turns, why in [
        ([*made("a"), again], "the call 'a' has no result"),
        ([*made("a", "b"), of("b")], "the call 'a' has no result"),
        ([of("a")], "a result of the call 'a'"),
        ([*made("a"), of("b")], "a result of the call 'b'"),
        ([*made("a"), of("a"), of("a")], "a result of the call 'a'"),
        ([*made("a", "a"), of("a")], "two calls have the id 'a'"),
    ]:
        code, text = status(turns)
        assert (code, why in text) == (400, True), (turns, text)
    code, text = status([], ["look", "look"])
    assert (code, "two tools are called 'look'" in text) == (400, True)


THINKING = ("hermes", "harmony")
"""Templates whose models may think first: those of random weights need not come to an end."""
BOUNDED = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def forced(protocol: Protocol, name: str | None = None) -> Any:
    """What says that a tool has to be called: this one, or any."""
    match protocol:
        case "chat":
            return {"type": "function", "function": {"name": name}} if name else "required"
        case "messages":
            return {"type": "tool", "name": name} if name else {"type": "any"}
        case "responses":
            return {"type": "function", "name": name} if name else "required"


def bounded(protocol: Protocol, choice: Any, names: Sequence[str] = ("look", "see")) -> Json:
    request = body(protocol, names=names, tool_choice=choice)
    for tool in request["tools"]:
        inner = tool.get("function", tool)
        inner["input_schema" if protocol == "messages" else "parameters"] = BOUNDED
    limit = "max_output_tokens" if protocol == "responses" else "max_tokens"
    return {**request, limit: 2000}


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name not in THINKING])
def test_a_call_can_be_forced(
    serve: Serve, tiny_model: TinyModel, protocol: Protocol, template: str
) -> None:
    """By a model of random weights, which would say anything else."""
    path = tiny_model("llama", template=TEMPLATES[template], control=MARKERS)
    server = serve(paths=[path])
    for name in None, "see":
        request = bounded(protocol, forced(protocol, name))
        request["extra_body"] = {"temperature": 0}
        answer, streamed = (
            said(protocol, ask(server, protocol, request, stream=stream))
            for stream in (False, True)
        )
        assert replace(answer, ids=()) == replace(streamed, ids=())
        assert answer.calls
        assert answer.text == ""
        assert answer.ended == ENDED[protocol]
        for called, arguments in answer.calls:
            assert called == (name or called)
            assert Draft202012Validator(BOUNDED).is_valid(arguments)
        assert len(answer.calls) == 1 or name is None


def test_forced_calls_come_behind_reasoning(saying: Saying, protocol: Protocol) -> None:
    server = saying(SAID.removeprefix("<think>\n"), OPENED)
    for stream in False, True:
        request = bounded(protocol, forced(protocol, "look"))
        request["extra_body"] = {"temperature": 0}
        answer = said(protocol, ask(server, protocol, request, stream=stream))
        assert (answer.reasoning, answer.text) == ("Let me see.", "")
        assert [name for name, _ in answer.calls] == ["look"]


def test_forced_calls_in_channels(saying: Saying, protocol: Protocol) -> None:
    control = ("<|channel|>", "<|constrain|>", "<|message|>")
    server = saying("<|channel|>commentary and so on", TEMPLATES["harmony"], control)
    for stream in False, True:
        request = bounded(protocol, forced(protocol, "look"))
        request["extra_body"] = {"temperature": 0}
        answer = said(protocol, ask(server, protocol, request, stream=stream))
        assert (answer.reasoning, answer.text) == ("", "")
        assert [name for name, _ in answer.calls] == ["look"]


def test_what_cannot_be_forced_is_refused(server: Server, protocol: Protocol) -> None:
    unheld = bounded(protocol, forced(protocol))
    for tool in unheld["tools"]:
        inner = tool.get("function", tool)
        inner["input_schema" if protocol == "messages" else "parameters"] = {"not": {}}
    for request, why in (
        (bounded(protocol, forced(protocol, "other")), "there is no tool 'other' in tools"),
        ({**body(protocol), "tools": [], "tool_choice": forced(protocol)}, "there are no tools"),
        (unheld, "a call of the tool look can't be forced"),
    ):
        refused = server.http().post(PATHS[protocol], json=request)
        assert refused.status_code == 400
        assert why in refused.json()["error"]["message"]
    unforced = {**unheld, "tool_choice": {"type": "auto"} if protocol == "messages" else "auto"}
    assert server.http().post(PATHS[protocol], json=unforced).status_code == 200


def test_a_call_of_some_tools_can_be_forced(server: Server) -> None:
    for protocol, inner, tool in (
        ("chat", True, {"type": "function", "function": {"name": "see"}}),
        ("responses", False, {"type": "function", "name": "see"}),
    ):
        allowed = {"mode": "required", "tools": [tool]}
        choice = {"allowed_tools": allowed} if inner else allowed
        request = bounded(protocol, {"type": "allowed_tools", **choice})  # type: ignore[arg-type]
        answer = said(protocol, ask(server, protocol, request))  # type: ignore[arg-type]
        assert {name for name, _ in answer.calls} == {"see"}


def test_thinking_that_is_enabled_forbids_to_force(server: Server) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    request = {**bounded("messages", forced("messages")), "thinking": thinking}
    refused = server.http().post("/v1/messages", json=request)
    assert refused.status_code == 400
    assert "Thinking may not be enabled" in refused.json()["error"]["message"]
