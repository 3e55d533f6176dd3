from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anaphora.answer.forms import THINK, Form
from anaphora.answer.pieces import Call, Piece, Reasoning, Text, logprobs, merged
from anaphora.answer.reader import Reader
from anaphora.answer.source import Markers, Source
from anaphora.answer.syntaxes import SYNTAXES
from anaphora.engine.protocol import TokenLogprob
from anaphora.prompt.conversation import Plain
from anaphora.prompt.template import ChatTemplate
from tests.answer.templates import HERMES, OPENED, TEMPLATES

TOOLS: Mapping[str, Plain] = {
    "look": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
            "parts": {"type": "array"},
            "more": {"type": "object"},
            "size": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        },
    },
    "get.time-2": None,
}
THINKING = THINK[0]
HIDDEN = frozenset(marker for syntax in SYNTAXES for marker in syntax.markers)


def form(name: str, think: bool = True) -> Form:
    syntax = next(one for one in SYNTAXES if one.name == name)
    return Form(THINKING if think and not syntax.channels else None, (syntax,))


def read(
    form: Form, pieces: Iterable[str], tools: Mapping[str, Plain] = TOOLS, **more: Any
) -> list[Piece]:
    reader = Reader(form, tools, **more)
    found = [piece for text in pieces for piece in reader.feed(text)]
    return merged([*found, *reader.finish()])


def texts(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Text))


CALL = Call("look", '{"city": "Ur"}')
WRITTEN = {
    "hermes": ('<tool_call>{"name": "look", "arguments": {"city": "Ur"}}</tool_call>', CALL),
    "qwen-coder": ("<function=look><parameter=city>Ur</parameter></function>", CALL),
    "nemotron": ('<TOOLCALL>[{"name": "look", "arguments": {"city": "Ur"}}]</TOOLCALL>', CALL),
    "json": ('{"name": "look", "parameters": {"city": "Ur"}}', CALL),
    "mistral": (
        '[TOOL_CALLS]look[CALL_ID]abcdef123[ARGS]{"city": "Ur"}',
        Call(*("look", '{"city": "Ur"}', "abcdef123")),
    ),
    "glm": (
        "<tool_call>look<arg_key>city</arg_key><arg_value>Ur</arg_value></tool_call>",
        CALL,
    ),
    "kimi": (
        '<|tool_call_begin|>functions.look:3<|tool_call_argument_begin|>{"city": "Ur"}',
        Call(*("look", '{"city": "Ur"}', "functions.look:3")),
    ),
    "deepseek": ('<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"city": "Ur"}<｜tool▁call▁end｜>', CALL),
    "dsml": (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="look">'
        '<｜DSML｜parameter name="city" string="true">Ur</｜DSML｜parameter>'
        "</｜DSML｜invoke></｜DSML｜tool_calls>",
        CALL,
    ),
    "gemma": ('<|tool_call>call:look{city:<|"|>Ur<|"|>}<tool_call|>', CALL),
    "function-gemma": ("<start_function_call>call:look{city:<escape>Ur<escape>}", CALL),
    "harmony": ('<|channel|>commentary to=functions.look<|message|>{"city": "Ur"}', CALL),
}
"""A call in each syntax, in the shortest form there is."""


@pytest.mark.parametrize("name", WRITTEN)
def test_the_shortest_form_of_a_call(name: str) -> None:
    text, call = WRITTEN[name]
    assert read(form(name), [text]) == [call]
    assert read(form(name), text) == [call]


def test_every_syntax_has_a_shortest_form_here() -> None:
    assert set(WRITTEN) == {syntax.name for syntax in SYNTAXES}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_of_no_tool_there_is_and_one_cut_off_are_text(name: str) -> None:
    text, _ = WRITTEN[name]
    answer = read(form(name), [f"{text} "], {"other": None}, hidden=HIDDEN)
    assert all(isinstance(piece, Text) for piece in answer)
    assert "Ur" in texts(answer)
    cut = read(form(name), [text[: text.index("Ur") + 1]], hidden=HIDDEN)
    assert texts(cut).endswith("U")
    assert all(isinstance(piece, Text) for piece in cut)


@pytest.mark.parametrize("name", WRITTEN)
def test_without_tools_calls_are_text(name: str) -> None:
    if name != "harmony":
        text, _ = WRITTEN[name]
        assert read(form(name), [f"  {text} "], {}) == [Text(f"  {text} ")]


def test_text_around_calls_keeps_every_character() -> None:
    call = WRITTEN["hermes"][0]
    answer = read(form("hermes"), [f"  a <b\n\n{call}\n{call}\n\n c {call}\n"])
    assert answer == [Text("  a <b"), CALL, CALL, Text("\n\n c"), CALL]
    assert read(form("hermes"), ["a \n"]) == [Text("a \n")]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>look</tool_call>",
        '<tool_call>{"name": "look"',
        '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        f'<tool_call>{{"name": "look", "arguments": {{"a": {"[" * 200}{"]" * 200}}}}}</tool_call>',
        f"<tool_call>{'[' * 50_000}{']' * 50_000}</tool_call>",
        '<tool_call>{"name": "look", "arguments": {"a": 1,}}</tool_call> \\',
    ],
)
def test_what_is_no_valid_call_is_text(text: str) -> None:
    assert read(form("hermes"), [f"{text} and {WRITTEN['hermes'][0]}"])[0] in (
        Text(f"{text} and"),
        Text(f"{text} and {WRITTEN['hermes'][0]}"),  # nobody knows where it ends
    )


def test_no_call_of_a_list_is_lost() -> None:
    known: Plain = {"name": "look", "arguments": {}}
    other = {**known, "name": "other"}
    for calls in [known, other], [other, known]:
        text = f"[TOOL_CALLS]{json.dumps(calls)}"
        assert read(form("mistral"), [text]) == [Text(text)]


def test_markers_inside_strings_are_strings() -> None:
    arguments = {"city": '</tool_call> \\" <tool_call>{'}
    text = json.dumps({"name": "look", "arguments": arguments})
    answer = read(form("hermes"), [f"<tool_call>{text}</tool_call>"])
    assert answer == [Call("look", json.dumps(arguments))]


def test_bare_values_are_what_their_schemas_say() -> None:
    values = {
        **{"city": "5", "days": "5", "exact": "True", "note": "null", "parts": '["a"]'},
        **{"more": '{"b": 1}', "size": "None", "unknown": "7"},
    }
    written = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    (call,) = read(form("qwen-coder"), [f"<tool_call><function=look>{written}</function>"])
    assert isinstance(call, Call)
    assert json.loads(call.arguments) == {
        **{"city": "5", "days": 5, "exact": True, "note": None, "parts": ["a"]},
        **{"more": {"b": 1}, "size": None, "unknown": 7},
    }


def test_reasoning_is_set_apart_where_an_answer_begins() -> None:
    text = "<think>\nWell,\n\n <think> so. \n</think>\n\n Yes <think>no</think>"
    expected = [Reasoning("Well,\n\n <think> so."), Text(" Yes <think>no</think>")]
    for pieces in [text], text:
        assert read(form("hermes"), pieces) == expected
        assert read(form("hermes"), pieces, {}) == expected
        assert read(form("hermes", think=False), pieces) == [Text(text)]
    opened = text.removeprefix("<think>\n")
    assert read(form("hermes"), opened, opened=True) == expected
    assert read(form("hermes"), text, opened=True) == expected
    assert read(form("hermes"), ["<think>\n\n</think>\n\nYes"]) == [Text("Yes")]
    assert read(form("hermes"), ["<think> Hm"]) == [Reasoning("Hm")]


def test_reasoning_comes_as_it_is_thought() -> None:
    reader = Reader(form("hermes"), TOOLS)
    assert reader.feed("<think>\nFirst") == [Reasoning("First")]
    assert reader.thinking
    assert reader.feed(" \n") == []
    assert reader.feed("then") == [Reasoning(" \nthen")]
    assert reader.feed("</think>") == []
    assert not reader.thinking


def test_markers_that_are_control_tokens_are_never_shown() -> None:
    marks = frozenset({"[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"})
    mistral = Form(THINK[1], form("mistral").syntaxes)
    text = "a[ARGS]b [THINK]c[ARGS][/THINK]\n[TOOL_CALLS]none[ARGS]{} [TOOL_CALLS][TOOL_CALLS]x"
    for pieces in [text], text:
        answer = read(mistral, pieces, hidden=marks)
        assert answer == [Text("ab"), Reasoning("c"), Text("none{} x")]


def test_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm. \n<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I'll look.<|end|><|start|>assistant to=functions.look<|channel|>commentary "
        'json<|message|>{"city": "Ur"}<|call|>'
    )
    for pieces in [text], text:
        answer = read(form("harmony"), pieces, hidden=HIDDEN)
        assert answer == [Reasoning("Hm."), Text("I'll look."), CALL]
    led = text[text.index(" to=") :]
    assert read(form("harmony"), led, hidden=HIDDEN) == [CALL]
    final = "<|channel|>final<|message|>\n Yes.\n"
    assert read(form("harmony"), final, {}, hidden=HIDDEN) == [Text("\n Yes.\n")]
    cut = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assis"
    assert read(form("harmony"), cut, {}, hidden=HIDDEN) == [Reasoning("Hm.")]
    assert read(form("harmony"), "Just text", {}, hidden=HIDDEN) == [Text("Just text")]


ALL_KINDS = {
    "hermes": (
        "<think>\nfirst I think\n</think>\n\nThen I say \n"
        f"{WRITTEN['hermes'][0]}\n{WRITTEN['hermes'][0]}\nand more. <tool_call>nothing",
        ["Then I say", "\nand more. <tool_call>nothing"],
    ),
    "harmony": (
        "<|channel|>analysis<|message|>first I think<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Then I say<|return|>",
        ["Then I say"],
    ),
    "json": ("  Then I say {", ["  Then I say {"]),
}


@given(data=st.data())
@pytest.mark.parametrize("name", ALL_KINDS)
def test_tokens_of_text_and_no_others_are_given_out(name: str, data: st.DataObject) -> None:
    raw, said = ALL_KINDS[name]
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=len(raw)))
    edges = sorted({0, len(raw), *cuts})
    tokens = [TokenLogprob(n, -1.0, (), begin) for n, begin in enumerate(edges[:-1])]
    reader = Reader(form(name), TOOLS, HIDDEN if name == "harmony" else frozenset())
    pieces: list[Piece] = []
    for token, (begin, end) in zip(tokens, pairwise(edges), strict=True):
        pieces += reader.feed(raw[begin:end], [token])
    pieces += reader.finish()
    assert [piece.text for piece in merged(pieces) if isinstance(piece, Text)] == said
    stretches = [(raw.rindex(text), raw.rindex(text) + len(text)) for text in said]
    assert [one.token for one in logprobs(pieces)] == [
        number
        for number, (begin, end) in enumerate(pairwise(edges))
        if any(begin < last and first < end for first, last in stretches)
    ]


def test_the_first_call_can_be_the_end() -> None:
    call = WRITTEN["hermes"][0]
    reader = Reader(form("hermes"), TOOLS, first_call_only=True)
    assert reader.feed(f"a{call}{call}b") == [Text("a"), CALL]
    assert reader.complete
    assert reader.feed(f"a{call}") == []
    assert reader.finish() == []


NAMES = st.sampled_from(sorted(TOOLS))
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\x85"), max_size=20)
SAFE = st.text(string.ascii_letters + string.digits + " .,;:!?'äß漢👋", max_size=20)
SCALARS = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(-1e9, 1e9)


def _arguments(words: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Plain]]:
    keys = st.text(string.ascii_lowercase + "_", min_size=1, max_size=6)
    values = st.recursive(
        SCALARS | words,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=5,
    )
    known = {
        "city": words,
        "days": st.integers(),
        "exact": st.booleans(),
        "parts": st.lists(values, max_size=3),
        "more": st.dictionaries(keys, values, max_size=3),
    }
    return st.fixed_dictionaries({}, optional=known)


@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
def test_names_and_arguments_survive_a_template(name: str, data: st.DataObject) -> None:
    template = ChatTemplate(TEMPLATES[name], bos="", eos="")
    # Forms without escapes can't hold their own markers.
    escaped = name in (
        "hermes",
        "nemotron",
        "json",
        "mistral",
        "kimi",
        "deepseek",
        "harmony",
        "mistral-args",
    )
    words = WORDS if escaped or name == "deepseek-fence" else SAFE
    calls = data.draw(
        st.lists(st.tuples(st.just("look"), _arguments(words)), min_size=1, max_size=3)
    )
    content = "" if name == "json" else data.draw(SAFE.map(str.strip))
    made = [
        {
            "id": f"functions.{called}:{number}" if name == "kimi" else f"id{number:07}",
            "type": "function",
            "function": {"name": called, "arguments": arguments},
        }
        for number, (called, arguments) in enumerate(calls)
    ]
    asked = {"role": "user", "content": "?"}
    message = {"role": "assistant", "content": content, "tool_calls": made}
    shown = template.render([asked, message], add_generation_prompt=False)
    written = shown.partition("assistant\n")[2].removesuffix("<|im_end|>\n")
    found = Form.of(template.source, template.example)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=8)))
    pieces = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    answer = read(found, pieces, hidden=HIDDEN if name == "harmony" else frozenset())
    assert texts(answer) == content
    assert [
        (piece.name, json.loads(piece.arguments)) for piece in answer if isinstance(piece, Call)
    ] == calls


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_form_is_told_from_the_template(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], bos="", eos="")
    (syntax,) = Form.of(template.source, template.example).syntaxes
    assert name.startswith(syntax.name)


def test_reasoning_markers_are_told_from_the_template() -> None:
    assert Form.of(HERMES, None).think == THINKING
    assert Form.of(TEMPLATES["glm"], None).think is None
    prompt = ChatTemplate(OPENED, bos="", eos="").render([{"role": "user", "content": "?"}])
    reader = Form.of(OPENED, None).reader(prompt, {}, frozenset())
    assert reader.feed("Hm</think>Yes") == [Reasoning("Hm"), Text("Yes")]


def test_without_a_form_for_tools_the_generic_one_and_the_models_own_are_read() -> None:
    own = "{{ messages[0].content }}{# <｜tool▁call▁begin｜> #}"
    found = Form.of(own, None)
    for name in "hermes", "deepseek":
        assert read(found, WRITTEN[name][0]) == [CALL]


_MARKERS = st.sampled_from(
    [
        *sorted(HIDDEN),
        *("<think>", "</think>", '{"name": "look", "arguments": {}}', "{}", "look", '"', "\\"),
        *("functions.look:0", "```json", "call:", "\n", "<parameter=city>", "<function=look>"),
    ]
)
MESSES = st.lists(_MARKERS | st.text(max_size=4), max_size=20).map("".join)


@pytest.mark.parametrize("syntax", [syntax.name for syntax in SYNTAXES])
@given(text=MESSES, opened=st.booleans(), shown=st.booleans(), cuts=st.lists(st.integers(0, 99)))
@example(text='{"a": "\\', opened=False, shown=False, cuts=[])
def test_any_text_can_be_read_however_it_is_cut(
    syntax: str, text: str, opened: bool, shown: bool, cuts: list[int]
) -> None:
    hidden = frozenset() if shown else frozenset(form(syntax).syntaxes[0].markers)
    whole = read(form(syntax), [text], hidden=hidden, opened=opened)
    assert whole == read(form(syntax), text, hidden=hidden, opened=opened)
    places = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert whole == read(form(syntax), pieces, hidden=hidden, opened=opened)
    for piece in whole:
        assert not isinstance(piece, Call) or isinstance(json.loads(piece.arguments), dict)
        assert isinstance(piece, Call) or piece.text
    plain = shown and not opened and all(isinstance(piece, Text) for piece in whole)
    if plain and syntax != "harmony" and not text.lstrip().startswith("<think>"):
        assert texts(whole) == text


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"a":"',
        "<tool_call>",
        "<function=look><parameter=city>",
        "</parameter>",
        "\n",
        "<|channel|>",
        "<|tool_call>call:look{a:[",
        '<｜DSML｜function_calls><｜DSML｜invoke name="look">',
    ],
)
def test_no_text_is_looked_at_again_and_again(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    search, feed = Markers.search, Source.feed

    def counted_search(self: Markers, text: str, start: int) -> re.Match[str] | None:
        nonlocal seen
        found = search(self, text, start)
        seen += (found.end() if found else len(text)) - start
        return found

    def counted_feed(self: Source, text: str) -> None:
        nonlocal seen
        seen += len(self._text) - self._at + len(text)
        feed(self, text)

    monkeypatch.setattr(Markers, "search", counted_search)
    monkeypatch.setattr(Source, "feed", counted_feed)
    for name in [syntax.name for syntax in SYNTAXES]:
        for pieces in [text * 500], text * 500:
            seen = 0
            read(form(name), pieces)
            assert seen < 100 * len(text * 500)
