from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from anaphora.errors import PromptError
from anaphora.prompt import adapt
from anaphora.prompt.calls import check
from anaphora.prompt.conversation import Conversation, Message
from anaphora.prompt.tokens import Renderer
from tests.answer.templates import TEMPLATES
from tests.prompt.families import Loaded

ASKED = {"role": "user", "content": "?"}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def called(*ids: str | None) -> dict[str, Any]:
    calls = [{"id": one, **tool("f"), "function": {"name": "f", "arguments": "{}"}} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(of: str | None, text: str = "r") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": of, "content": text}


@pytest.mark.parametrize(
    "messages",
    [
        [ASKED, called("a"), result("a"), ASKED],
        [ASKED, called("a", "b"), result("b"), result("a")],
        [ASKED, called("a", "b"), result("a"), ASKED, result("b"), ASKED],
        [ASKED, called("a"), result("a"), called("a"), result("a")],
        [ASKED, called(None, None), result(None), result(None)],
        [ASKED, called(None, "b"), result("b"), result("x")],
        [ASKED, called("a", "b"), result(None), result("b")],
        [ASKED, called("a")],
    ],
)
def test_calls_with_a_result_each_are_right(messages: list[Mapping[str, Any]]) -> None:
    check(Conversation.parse(messages, [tool("f"), tool("g")]))


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([ASKED, called("a"), ASKED], "the call 'a' has no result"),
        ([ASKED, called("a", "b"), result("a")], "the call 'b' has no result"),
        ([ASKED, called("a"), called("b"), result("b")], "the call 'a' has no result"),
        ([ASKED, result("a")], "result of the call 'a', and no call of that id"),
        ([ASKED, called("a"), result("b")], "result of the call 'b', and no call of that id"),
        ([ASKED, called("a"), result("a"), result("a")], "result of the call 'a'"),
        ([ASKED, called("a"), result("a"), ASKED, called("b"), result("a")], "of the call 'a'"),
        ([ASKED, called("a"), result("a"), result(None)], "result of the call None"),
        ([ASKED, called("a", "a"), result("a"), result("a")], "two calls have the id 'a'"),
    ],
)
def test_calls_and_results_that_do_not_match_are_refused(
    messages: list[Mapping[str, Any]], why: str
) -> None:
    with pytest.raises(PromptError, match=why):
        check(Conversation.parse(messages))


def test_tools_of_the_same_name_are_refused() -> None:
    with pytest.raises(PromptError, match="two tools are called 'f'"):
        check(Conversation.parse([ASKED], [tool("f"), tool("g"), tool("f")]))


def test_ids_are_made_as_the_template_takes_them(smol: Loaded) -> None:
    messages = [ASKED, called("toolu_1", "call00000"), result("call00000"), result("toolu_1")]
    conversation = Conversation.parse(messages, [tool("f")])
    short = adapt.render(Renderer(smol.vocabulary, TEMPLATES["mistral"]), conversation)
    assert "[TOOL_CALLS]" in short.text
    assert '"id": "call00000"' in short.text
    assert "toolu_1" not in short.text
    named = adapt.render(Renderer(smol.vocabulary, TEMPLATES["kimi"]), conversation)
    assert "<|tool_call_begin|>functions.f:0<" in named.text
    assert "<|tool_call_begin|>functions.f:1<" in named.text
    any_id = adapt.render(Renderer(smol.vocabulary, TEMPLATES["hermes"]), conversation)
    assert "<tool_call>" in any_id.text


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("template", ["hermes", "harmony"])
def test_reasoning_comes_under_the_name_the_template_looks_for(
    name: str, template: str, smol: Loaded
) -> None:
    renderer = Renderer(smol.vocabulary, TEMPLATES[template])
    message = {**called("a"), name: "Because."}
    conversation = Conversation.parse([ASKED, message, result("a")], [tool("f")])
    assert "Because." in adapt.render(renderer, conversation).text


def test_reasoning_that_is_refused_beside_text_is_left_out(smol: Loaded) -> None:
    refusal = (
        "{%- if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
    )
    source = TEMPLATES["harmony"].replace(
        "{%- if message.thinking %}", refusal + "{%- if message.thinking %}"
    )
    renderer = Renderer(smol.vocabulary, source)
    message = {**called("a"), "content": "I'll look.", "reasoning_content": "Because."}
    conversation = Conversation.parse([ASKED, message, result("a")], [tool("f")])
    text = adapt.render(renderer, conversation).text
    assert "I'll look." in text
    assert "to=functions.f" in text
    assert "Because." not in text


def test_what_follows_a_call_begins_with_its_result(smol: Loaded) -> None:
    renderer = Renderer(smol.vocabulary, TEMPLATES["hermes"])
    asked = Conversation.parse([ASKED], [tool("f")])
    answer = Message.parse({**called("a"), "reasoning_content": "Because."})
    ready = adapt.following(renderer, adapt.answered(asked, answer)).tolist()
    longer = Conversation.parse([ASKED, answer, result("a", "It is.")], [tool("f")])
    prompt = adapt.render(renderer, longer)
    assert prompt.tokens[: len(ready)].tolist() == ready
    assert "It is." in prompt.text
    assert len(prompt.tokens) - len(ready) < 30
