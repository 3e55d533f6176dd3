from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anaphora.clock import ManualClock
from anaphora.errors import PromptError, TemplateError
from anaphora.prompt.conversation import Conversation, Message, TextPart
from anaphora.prompt.tokens import Prompt, Renderer, encode_text
from tests.prompt.families import Loaded

Dict = dict[str, Any]
SOAK = "ANAPHORA_SOAK" in os.environ

with_fixtures = settings(
    max_examples=2000 if SOAK else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def user(content: Any) -> Dict:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> Dict:
    return {"role": "assistant", "content": content, **fields}


def tool_call(name: str = "look_up", **arguments: Any) -> Dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def render(renderer: Renderer, *messages: Dict, tools: Any = None, **options: Any) -> Prompt:
    return renderer.render(Conversation.parse(messages, tools), **options)


CHAT = (
    {"role": "system", "content": "You answer the questions of a librarian.\n"},
    user("  What is the  opening line? \n\n"),
    assistant("Call me Ishmael. 123456"),
    user("And\tthe next? 👩‍👩‍👧‍👦 漢字\u0000 <think>thing</think>"),
)


# What the tokens are


def test_prompt_is_the_whole_text_tokenized_with_control_tokens(
    family: Loaded, renderer: Renderer
) -> None:
    prompt = render(renderer, *CHAT)
    expected = family.parse(prompt.text)
    bos = family.vocabulary.bos
    if family.vocabulary.add_bos and expected[0] != bos:
        expected = [bos, *expected]  # type: ignore[list-item]
    assert prompt.tokens.tolist() == expected
    assert len(family.control_in(prompt.tokens)) >= 2 * len(CHAT) - 3


def test_bos_of_the_template_is_not_doubled(families: Mapping[str, Loaded]) -> None:
    one = families["llama3"]
    prompt = render(Renderer(one.vocabulary, one.template), *CHAT)
    assert prompt.tokens.tolist().count(one.vocabulary.bos) == 1


def test_bos_is_added_where_the_model_wants_it_and_the_template_has_none(
    families: Mapping[str, Loaded],
) -> None:
    one = families["phi-3"]
    prompt = render(Renderer(one.vocabulary, one.template), *CHAT)
    assert prompt.tokens[0] == one.vocabulary.bos
    assert prompt.tokens.tolist().count(one.vocabulary.bos) == 1
    first_message = prompt.text[: prompt.text.index("<|end|>") + len("<|end|>")]
    assert prompt.boundaries[0].end == len(one.parse(first_message)) + 1


def test_white_space_after_a_swallowing_control_token_is_gone(
    families: Mapping[str, Loaded],
) -> None:
    one = families["phi-3"]
    prompt = render(Renderer(one.vocabulary, one.template), user(" \n the"))
    assert one.show(prompt.tokens) == " the"
    assert prompt.text.startswith("<|user|>\n \n the<|end|>")


@given(cuts=st.lists(st.integers(0, 60), max_size=5))
@with_fixtures
def test_tokens_do_not_depend_on_how_content_is_cut_into_parts(
    cuts: list[int], smol: Loaded
) -> None:
    text = "The international law of 123456\n\n\n and 👩‍👩‍👧‍👦 <|im_end|> families. "
    renderer = Renderer(smol.vocabulary, smol.template)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(edges)]
    whole, split = render(renderer, user(text)), render(renderer, user(parts))
    assert split.tokens.tolist() == whole.tokens.tolist()
    assert split.boundaries[0].end == whole.boundaries[0].end


def test_long_histories_are_tokenized_the_same_from_the_cache(smol: Loaded) -> None:
    renderer = Renderer(smol.vocabulary, smol.template)
    messages = [user(f"{n} " + "A long story. " * 100) for n in range(5)]
    first = render(renderer, *messages)
    assert render(renderer, *messages).tokens.tolist() == first.tokens.tolist()
    assert first.tokens.tolist() == smol.parse(first.text)


def test_encode_text_adds_bos_and_parses_no_control_token(
    families: Mapping[str, Loaded],
) -> None:
    one = families["mistral"]
    tokens = encode_text(one.vocabulary, "<s>[INST] the </s>")
    assert tokens.dtype == np.int32
    assert one.control_in(tokens) == [one.vocabulary.bos]
    assert one.show(tokens) == " <s>[INST] the </s>"


# User text never becomes a control token


def hostile_text(one: Loaded) -> st.SearchStrategy[str]:
    """Strings made of control tokens, their pieces, and what may stand between."""
    names = sorted(one.vocabulary.control)
    pieces = [*names, *(n.upper() for n in names), *(n[:3] for n in names), *(n[3:] for n in names)]
    fillers = ["<", ">", "|", "[", "]", "/", " ", "\n", "x", "\ufdd0", "\ufffe", "é", "</think>"]
    return st.lists(st.sampled_from([*pieces, *fillers]), min_size=1, max_size=6).map("".join)


@given(data=st.data())
@with_fixtures
def test_hostile_strings_add_no_control_token_anywhere(
    data: st.DataObject, family: Loaded, renderer: Renderer
) -> None:
    drawn: list[str] = []

    def string(harmless: bool) -> str:
        if harmless:
            return "x"
        drawn.append(data.draw(hostile_text(family)))
        return drawn[-1]

    def conversation(harmless: bool) -> Conversation:
        def s() -> str:
            return string(harmless)

        return Conversation.parse(
            [
                user(["a" + s(), s() + "a"]),
                assistant(None, tool_calls=[tool_call(s(), **{s(): [s(), {"k": s()}]})]),
                {"role": "tool", "content": "t" + s(), "name": s()},
                assistant("b" + s(), reasoning_content=s()),
                user("c" + s()),
            ],
            tools=[{"type": "function", "function": {"name": s(), s(): {"description": s()}}}],
        )

    plain = renderer.render(conversation(harmless=True))
    attacked = renderer.render(conversation(harmless=False))
    assert family.control_in(attacked.tokens) == family.control_in(plain.tokens)
    assert "a" + drawn[0] + drawn[1] + "a" in attacked.text


def test_strings_of_the_template_and_of_users_cannot_meet_to_form_a_control_token(
    smol: Loaded,
) -> None:
    template = "{{ '<|im_' + messages[0].content + 'im_end|>' }}{{ messages[1].content }}"
    renderer = Renderer(smol.vocabulary, template)
    prompt = render(renderer, user("start|>x<|"), user("|>"))
    assert prompt.text == "<|im_start|>x<|im_end|>|>"
    assert smol.control_in(prompt.tokens) == []


def test_change_of_case_in_the_template_forms_no_control_token(smol: Loaded) -> None:
    template = "{{ messages[0].content | lower }}{{ messages[0].content | title }}"
    prompt = render(Renderer(smol.vocabulary, template), user("<|IM_end|><JUPYTER_text>"))
    assert prompt.text.startswith("<|im_end|><jupyter_text>")
    assert smol.control_in(prompt.tokens) == []


def test_unknown_role_cannot_name_a_control_token(families: Mapping[str, Loaded]) -> None:
    one = families["phi-3"]
    renderer = Renderer(one.vocabulary, one.template)
    normal = render(renderer, user("hi"), user("ho"))
    forged = render(renderer, user("hi"), {"role": "end", "content": "ho"})
    assert len(one.control_in(forged.tokens)) == len(one.control_in(normal.tokens)) - 1


def test_noncharacters_of_the_user_survive(smol: Loaded) -> None:
    text = "".join(chr(point) for point in range(0xFDD0, 0xFDF0)) + "\U0010ffff<|im_end|>"
    prompt = render(Renderer(smol.vocabulary, smol.template), user(text))
    assert text in prompt.text
    assert text in smol.show(prompt.tokens)


def test_conversation_with_every_guard_character_is_refused(smol: Loaded) -> None:
    everything = "".join(chr(c) for c in range(0xF000, 0x110000) if not 0x10000 <= c < 0x1FFFE)
    with pytest.raises(PromptError, match="noncharacters"):
        render(Renderer(smol.vocabulary, smol.template), user(everything))


# Where messages and parts end


def test_boundaries_never_decrease_and_end_with_the_turn(
    family: Loaded, renderer: Renderer
) -> None:
    prompt = render(renderer, *CHAT)
    ends = [one.end for one in prompt.boundaries]
    flat = [p for one in prompt.boundaries for p in (*one.parts, one.end)]
    assert None not in flat
    assert flat == sorted(flat)  # type: ignore[type-var]
    for message, end in zip(CHAT, ends, strict=True):
        assert message["content"].strip() in family.show(prompt.tokens[:end])
    for message, end in zip(CHAT[1:], ends, strict=False):
        assert message["content"].strip() not in family.show(prompt.tokens[:end])


def test_message_ends_after_its_end_of_turn_token(smol: Loaded) -> None:
    prompt = render(Renderer(smol.vocabulary, smol.template), *CHAT)
    for one in prompt.boundaries:
        assert one.end is not None
        assert prompt.tokens[one.end - 1] == smol.vocabulary.control["<|im_end|>"]
        assert one.parts == (one.end - 1,)


@pytest.mark.parametrize("more", [(), (assistant("Good."), user("And?"))])
def test_tokens_up_to_a_message_stay_when_later_messages_change(
    family: Loaded, renderer: Renderer, more: tuple[Dict, ...]
) -> None:
    first = render(renderer, *CHAT)
    second = render(renderer, *CHAT[:3], user("Something else"), *more)
    end = first.boundaries[2].end
    assert end is not None
    assert second.boundaries[2].end == end
    assert second.tokens[:end].tolist() == first.tokens[:end].tolist()


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ("x The inter", "national law", "x The"),
        ("x The inter", "", "x The inter"),
        ("a\n", "\n\nb", "a"),
        ("the 123", "456", "the 123"),
        ("family 👩", "\u200d👩\u200d👧", "family 👩"),
        ("ends in a space ", "word", "ends in a space"),
        ("ends in a space ", "", "ends in a space "),
        ("line", "\nline", "line"),
    ],
)
def test_part_ends_at_the_last_token_boundary_not_after_it(
    smol: Loaded, before: str, after: str, kept: str
) -> None:
    renderer = Renderer(smol.vocabulary, smol.template)
    system = {"role": "system", "content": [before, after] if after else [before]}
    prompt = render(renderer, system, user("Hi"))
    end = prompt.boundaries[0].parts[0]
    assert end is not None
    assert smol.show(prompt.tokens[:end]) == f"system\n{kept}"
    assert prompt.tokens.tolist() == smol.parse(prompt.text)
    assert end <= (prompt.boundaries[0].end or 0)


def test_leading_space_of_sentencepiece_does_not_shift_part_ends(
    families: Mapping[str, Loaded],
) -> None:
    one = families["gemma"]
    prompt = render(Renderer(one.vocabulary, one.template), user(["the thing", " and the end"]))
    end = prompt.boundaries[0].parts[0]
    assert one.show(prompt.tokens[:end]) == " user\nthe thing"


def test_message_that_cannot_be_marked_leaves_the_others_known(
    families: Mapping[str, Loaded],
) -> None:
    one = families["qwen3"]
    renderer = Renderer(one.vocabulary, one.template)
    messages = [user(f"Question {n}") for n in range(9)]
    messages[5] = user("<tool_response>\n42\n</tool_response>")
    messages[4] = assistant("Thinking", reasoning_content="deep")
    # A mark at the end of the last message makes the template take it for a question.
    messages = messages[:6]
    prompt = render(renderer, *messages)
    assert [b.parts[0] is None for b in prompt.boundaries] == [False] * 5 + [True]
    assert all(b.end is not None for b in prompt.boundaries)
    assert prompt.tokens[prompt.boundaries[5].end - 1] == one.vocabulary.eos  # type: ignore[operator]


def test_template_that_refuses_marked_content_still_renders(smol: Loaded) -> None:
    template = (
        "{% for m in messages %}{% if m.content is not in ['Hi', 'Ho'] %}"
        "{{ raise_exception('what?') }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    prompt = render(Renderer(smol.vocabulary, template), user("Hi"), user("Ho"))
    assert prompt.text == "Hi<|im_end|>Ho<|im_end|>"
    assert [b.parts for b in prompt.boundaries] == [(None,), (None,)]


def test_text_the_template_drops_has_no_end(smol: Loaded) -> None:
    template = "{% for m in messages[1:] %}{{ m.content }}<|im_end|>{% endfor %}"
    prompt = render(Renderer(smol.vocabulary, template), user("gone"), user("here"))
    assert prompt.boundaries[0].end is None
    assert prompt.boundaries[0].parts == (None,)
    assert prompt.boundaries[1].end == len(prompt.tokens)


def test_dropped_reasoning_leaves_the_head_of_the_prompt(families: Mapping[str, Loaded]) -> None:
    one = families["qwen3"]
    renderer = Renderer(one.vocabulary, one.template)
    first = render(renderer, *CHAT[:2])
    told = assistant("It is 42.", reasoning_content="Let me think.")
    with_thoughts = render(renderer, *CHAT[:2], told)
    second = render(renderer, *CHAT[:2], told, user("Sure?"))
    bare = render(renderer, *CHAT[:2], assistant("It is 42."), user("Sure?"))
    assert "Let me think." in with_thoughts.text
    assert second.tokens.tolist() == bare.tokens.tolist()
    assert second.tokens[: len(first.tokens)].tolist() == first.tokens.tolist()


# Odd input


@pytest.mark.parametrize("later", [(), (assistant("Done"), user("Next"))])
def test_missing_null_and_empty_content_are_the_same_prompt(
    family: Loaded, renderer: Renderer, later: tuple[Dict, ...]
) -> None:
    calls = [tool_call(city="Rome")]
    prompts = [
        render(renderer, user("Hi"), {**message, "tool_calls": calls}, *later)
        for message in (
            assistant(None),
            assistant(""),
            {"role": "assistant"},
            assistant([]),
            assistant([{"type": "text", "text": ""}], name=None),
        )
    ]
    assert len({tuple(prompt.tokens.tolist()) for prompt in prompts}) == 1
    assert "None" not in prompts[0].text
    assert "null" not in prompts[0].text
    assert prompts[0].boundaries[1].end is not None


def test_empty_list_of_tool_calls_is_none(families: Mapping[str, Loaded]) -> None:
    one = families["mistral"]
    renderer = Renderer(one.vocabulary, one.template)
    plain = render(renderer, user("Hi"), assistant("Ho"), user("Hi"))
    empty = render(renderer, user("Hi"), assistant("Ho", tool_calls=[]), user("Hi"))
    assert empty.tokens.tolist() == plain.tokens.tolist()


def test_tool_call_without_text_ends_with_its_turn(families: Mapping[str, Loaded]) -> None:
    for name in ("llama3", "mistral", "qwen3"):
        one = families[name]
        calling = assistant(None, tool_calls=[tool_call(city="Rome")])
        result = {"role": "tool", "content": "sunny"}
        prompt = render(Renderer(one.vocabulary, one.template), user("Hi"), calling, result)
        end = prompt.boundaries[1].end
        assert end is not None
        assert prompt.tokens[end - 1] == one.vocabulary.eos
        assert "Rome" in one.show(prompt.tokens[:end])
        assert "sunny" not in one.show(prompt.tokens[:end])


def test_late_system_message_keeps_its_place(smol: Loaded) -> None:
    renderer = Renderer(smol.vocabulary, smol.template)
    before = render(renderer, *CHAT[:3], add_generation_prompt=False)
    late = {"role": "system", "content": "One word only."}
    after = render(renderer, *CHAT[:3], late, user("Which season?"))
    assert after.tokens[: len(before.tokens)].tolist() == before.tokens.tolist()


def test_template_may_refuse_a_late_system_message(families: Mapping[str, Loaded]) -> None:
    one = families["gemma"]
    renderer = Renderer(one.vocabulary, one.template)
    with pytest.raises(TemplateError, match="System role not supported here"):
        render(renderer, user("Hi"), {"role": "system", "content": "late"})


def test_surrogate_pairs_and_raw_characters_are_the_same_prompt(
    family: Loaded, renderer: Renderer
) -> None:
    def conversation(emoji: str) -> Conversation:
        return Conversation.parse(
            [
                user(f"a {emoji}"),
                assistant("", tool_calls=[tool_call(emoji, **{emoji: [emoji]})]),
                {"role": "tool", "content": emoji},
            ],
            tools=[{"name": emoji, emoji: emoji}],
        )

    raw = renderer.render(conversation("\U0001f600"))
    pair = renderer.render(conversation("\ud83d\ude00"))
    lone = renderer.render(conversation("\ud83d"))
    assert pair.tokens.tolist() == raw.tokens.tolist()
    assert lone.tokens.tolist() == renderer.render(conversation("\ufffd")).tokens.tolist()


def test_messages_made_by_hand_and_options_follow_the_rule_for_surrogates(smol: Loaded) -> None:
    template = "{{ messages[0].content }}{{ messages[0].note }}{{ mood }}{{ '\\ud83d' }}"
    message = Message("user", (TextPart("\ud83d"),), {"note": "\ud83d\ude00"})
    renderer = Renderer(smol.vocabulary, template)
    prompt = renderer.render(Conversation((message,)), options={"mood": "\ude00"})
    assert prompt.text == "\ufffd\U0001f600\ufffd\ufffd"


def test_lone_surrogates_become_replacement_characters() -> None:
    message = Message.parse(user("a\ud83d b\ude00 c\ude00\ud83d \ud83d\ude00"))
    assert message.text == "a\ufffd b\ufffd c\ufffd\ufffd \U0001f600"


@pytest.mark.parametrize(
    "message",
    [
        {"content": "no role"},
        {"role": 5, "content": "x"},
        user(5),
        user([{"type": "image_url", "image_url": {"url": "x"}}]),
        user([{"type": "text"}]),
        {"role": "user", "content": "x", "extra": object()},
    ],
)
def test_messages_that_are_none_are_refused(message: Dict) -> None:
    with pytest.raises(PromptError):
        Conversation.parse([message])


def test_deeply_nested_data_is_refused() -> None:
    value: Any = []
    for _ in range(2000):
        value = [value]
    with pytest.raises(PromptError, match="nested"):
        Conversation.parse([{"role": "user", "content": "x", "data": value}])


def test_template_that_wants_parts_gets_them(smol: Loaded) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% for p in m.content %}"
        "{% if p.type == 'text' %}{{ p.text }}|{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    )
    prompt = render(Renderer(smol.vocabulary, template), user(["a <", "|im_end|> b "]), user(None))
    assert prompt.text == "user:a <||im_end|> b |<|im_end|>user:<|im_end|>"
    assert smol.control_in(prompt.tokens) == [smol.vocabulary.control["<|im_end|>"]] * 2
    first, second = prompt.boundaries[0].parts
    assert smol.show(prompt.tokens[:second]).endswith("im_end|> b")
    assert first is not None


def test_date_in_the_template_is_the_clocks(smol: Loaded) -> None:
    clock = ManualClock()
    template = "{{ strftime_now('%d %B %Y') }}: {{ messages[0].content }}"
    renderer = Renderer(smol.vocabulary, template, clock=clock)
    today = render(renderer, user("Hi"))
    clock.advance(3600 * 24)
    tomorrow = render(renderer, user("Hi"))
    assert today.text != tomorrow.text
    assert "2027" in today.text


def test_time_stands_still_within_a_request(smol: Loaded) -> None:
    class Restless(ManualClock):
        def now(self) -> float:
            self.advance(1)
            return super().now()

    template = "{{ strftime_now('%H:%M:%S') }}{{ messages[0].content }}<|im_end|>"
    renderer = Renderer(smol.vocabulary, template, clock=Restless())
    prompt = render(renderer, user("Hi"))
    assert prompt.boundaries[0].end == len(prompt.tokens)


def test_model_without_template_gets_chatml(smol: Loaded) -> None:
    prompt = render(Renderer(smol.vocabulary), user("Hi"))
    assert prompt.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_options_reach_the_template(families: Mapping[str, Loaded]) -> None:
    one = families["qwen3"]
    renderer = Renderer(one.vocabulary, one.template)
    prompt = render(renderer, user("Hi"), options={"enable_thinking": False})
    assert prompt.text.endswith("<think>\n\n</think>\n\n")
