"""The ways in which models write calls of tools.

Each is a reader of one call, or of a section of calls, that begins with one of its openings. It
yields every call as soon as that is complete, ``None`` while it waits for text, and raises
:class:`~anaphora.answer.source.NoCall` where what comes is no call. Closing tags may be missing:
models leave them out where their answer ends.

The forms are those of the models' own chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial

from anaphora.answer.pieces import Call
from anaphora.answer.source import Markers, NoCall, Source, Wait
from anaphora.answer.values import arguments, from_json, parameter, typed
from anaphora.prompt.conversation import Plain

Tools = Mapping[str, Plain]
"""Schemas of the parameters of the tools that can be called, by name."""


@dataclass(frozen=True, slots=True)
class Thought:
    """What comes next is reasoning, up to one of these markers."""

    ends: tuple[str, ...]


Reading = Generator[Call | Thought | None, None, None]


@dataclass(frozen=True)
class Syntax:
    """A way to write calls."""

    name: str
    openings: tuple[str, ...]
    read: Callable[[Source, Tools], Reading]
    """Begins in front of an opening."""
    others: tuple[str, ...] = ()
    """What else belongs to it."""
    leads: tuple[str, ...] = ()
    """What a call begins with where it begins the answer without an opening."""
    channels: bool = False
    """All of an answer is written in it, also where there are no tools."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.openings, *self.others)


def _json_in_tags(opening: str, closing: str, source: Source, tools: Tools) -> Reading:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``"""
    yield from source.expect(opening)
    yield from source.space()
    text = yield from source.json()
    yield from source.space()
    yield from source.skip(closing)
    yield from _named(text, tools)


def _bare_json(source: Source, tools: Tools) -> Reading:
    """``{"name": ..., "parameters": {...}}``, several with ``;`` between them or in a list."""
    yield from source.skip("<|python_tag|>")
    while True:
        yield from source.space()
        text = yield from source.json()
        yield from _named(text, tools)
        yield from source.space()
        yield from source.skip(";", ",")
        yield from source.space()
        if (yield from source.peek("{")) is None:
            return


def _mistral(source: Source, tools: Tools) -> Reading:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}]`` or ``[TOOL_CALLS]NAME[ARGS]{...}``"""
    yield from source.expect("[TOOL_CALLS]")
    yield from source.space()
    if (yield from source.peek("[")):
        text = yield from source.json()
        yield from _named(text, tools)
        return
    name = yield from source.until(_MISTRAL_NAME)
    call_id = ""
    if (yield from source.skip("[CALL_ID]")):
        call_id = yield from source.until(_MISTRAL_ID)
    yield from source.skip("[ARGS]")
    yield from source.space()
    text = yield from source.json()
    yield Call(name.strip(), arguments(from_json(text)), call_id.strip())


_MISTRAL_NAME = Markers("[CALL_ID]", "[ARGS]", "{", "\n")
_MISTRAL_ID = Markers("[ARGS]", "{", "\n")


def _functions_in_tags(source: Source, tools: Tools) -> Reading:
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``"""
    if (yield from source.skip("<tool_call>", "<seed:tool_call>")):
        yield from source.space()
    yield from source.expect("<function=")
    name = yield from _in_line(source, ">")
    given: dict[str, Plain] = {}
    while True:
        yield from source.space()
        if (yield from source.expect("<parameter=", "</function>")) == "</function>":
            break
        key = yield from _in_line(source, ">")
        value = yield from _value(source, "</parameter>", ("<parameter=", "</function>"))
        given[key] = typed(_unwrapped(value), parameter(tools.get(name), key))
    yield from source.space()
    yield from source.skip("</tool_call>", "</seed:tool_call>")
    yield Call(name, arguments(given))


def _key_value_tags(source: Source, tools: Tools) -> Reading:
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``"""
    yield from source.expect("<tool_call>")
    yield from source.space()
    name = (yield from source.until(_GLM_NAME)).strip()
    given: dict[str, Plain] = {}
    while True:
        yield from source.space()
        if (yield from source.expect("<arg_key>", "</tool_call>")) == "</tool_call>":
            break
        key = yield from _in_line(source, "</arg_key>")
        yield from source.space()
        yield from source.expect("<arg_value>")
        value = yield from _value(source, "</arg_value>", ("<arg_key>", "</tool_call>"))
        given[key] = typed(value, parameter(tools.get(name), key))
    yield Call(name, arguments(given))


_GLM_NAME = Markers("<arg_key>", "</tool_call>", "\n")


def _kimi(source: Source, tools: Tools) -> Reading:
    """A section of ``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}``"""
    yield from source.skip("<|tool_calls_section_begin|>")
    while True:
        yield from source.space()
        if not (yield from source.skip("<|tool_call_begin|>")):
            break
        call_id = (yield from _in_line(source, "<|tool_call_argument_begin|>")).strip()
        yield from source.space()
        text = yield from source.json()
        yield from source.space()
        yield from source.skip("<|tool_call_end|>")
        name = re.sub(r"^functions\.|:\d+$", "", call_id)
        yield Call(name, arguments(from_json(text)), call_id)
    yield from source.skip("<|tool_calls_section_end|>")


def _deepseek(source: Source, tools: Tools) -> Reading:
    """A section of ``NAME<｜tool▁sep｜>{...}`` or ``function<｜tool▁sep｜>NAME`` and a fence."""
    yield from source.skip("<｜tool▁calls▁begin｜>")
    while True:
        yield from source.space()
        if not (yield from source.skip("<｜tool▁call▁begin｜>")):
            break
        name = (yield from _in_line(source, "<｜tool▁sep｜>")).strip()
        yield from source.space()
        if not (yield from source.peek("{")):
            name = (yield from source.until(_FENCE)).strip()
            yield from source.space()
            yield from source.skip("```json")
            yield from source.space()
        text = yield from source.json()
        yield from source.space()
        yield from source.skip("```")
        yield from source.space()
        yield from source.skip("<｜tool▁call▁end｜>")
        yield Call(name, arguments(from_json(text)))
    yield from source.skip("<｜tool▁calls▁end｜>")


_FENCE = Markers("```json", "{", "\n")


def _dsml(source: Source, tools: Tools) -> Reading:
    """``<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE</...>``"""
    yield from source.expect("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    while True:
        yield from source.space()
        if not (yield from source.skip('<｜DSML｜invoke name="')):
            break
        name = yield from _in_line(source, '">')
        given: dict[str, Plain] = {}
        while True:
            yield from source.space()
            found = yield from source.expect('<｜DSML｜parameter name="', "</｜DSML｜invoke>")
            if found == "</｜DSML｜invoke>":
                break
            key = yield from _in_line(source, '" string="')
            string = yield from source.expect('true">', 'false">')
            ends = ('<｜DSML｜parameter name="', "</｜DSML｜invoke>")
            value = yield from _value(source, "</｜DSML｜parameter>", ends)
            given[key] = value if string == 'true">' else from_json(value)
        yield Call(name, arguments(given))
    yield from source.skip("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")


def _gemma(opening: str, closing: str, quote: str, source: Source, tools: Tools) -> Reading:
    """``call:NAME{KEY:VALUE,...}``; strings stand between two quotes that they can't hold."""
    yield from source.expect(opening)
    yield from source.expect("call:")
    name = (yield from source.until(_GEMMA_NAME)).strip()
    given = yield from _gemma_value(source, quote, Markers(quote), 0)
    yield from source.space()
    yield from source.skip(closing)
    yield Call(name, arguments(given))


_GEMMA_NAME = Markers("{", "\n")
_GEMMA_KEY = Markers(":", "\n")
_GEMMA_END = Markers(",", "}", "]", "\n")
_DEEPEST = 100


def _gemma_value(source: Source, quote: str, end: Markers, depth: int) -> Wait[Plain]:
    yield from source.space()
    found = yield from source.skip("{", "[", quote)
    if depth > _DEEPEST:
        raise NoCall
    if found == quote:
        text = yield from source.until(end)
        yield from source.skip(quote)
        return text
    if found is None:
        bare = (yield from source.until(_GEMMA_END)).strip()
        return typed(bare, None)
    closing = "}" if found == "{" else "]"
    given: dict[str, Plain] = {}
    items: list[Plain] = []
    yield from source.space()
    while not (yield from source.skip(closing)):
        if given or items:
            yield from source.expect(",")
            yield from source.space()
        if found == "[":
            items.append((yield from _gemma_value(source, quote, end, depth + 1)))
        else:
            if (yield from source.skip(quote)):
                key = yield from source.until(end)
                yield from source.skip(quote)
                yield from source.space()
            else:
                key = (yield from source.until(_GEMMA_KEY)).strip()
            yield from source.expect(":")
            given[key] = yield from _gemma_value(source, quote, end, depth + 1)
        yield from source.space()
    return given if found == "{" else items


def _harmony(source: Source, tools: Tools) -> Reading:
    """``<|channel|>CHANNEL to=functions.NAME<|message|>...``: an answer is a series of these.

    What is in the analysis channel is reasoning, what is for a tool is a call. Of any other message
    the header is read, and its text is text.
    """
    header = ""
    try:
        if (yield from source.skip("<|start|>")) or (yield from source.peek(" to=")):
            header = yield from source.until(_CHANNEL)
        if (yield from source.skip("<|channel|>")):
            header += " " + (yield from source.until(_MESSAGE))
        yield from source.expect("<|message|>")
    except NoCall:
        if source.exhausted:  # cut off before there was a text
            return
        raise
    if called := re.search(r"\bto=(?:functions\.)?([^\s<]+)", header):
        text = (yield from source.json()) if (yield from source.peek("{")) else "null"
        yield from source.space()
        yield from source.skip("<|call|>", "<|end|>")
        yield Call(called[1], arguments(from_json(text)))
    elif "analysis" in header.split():
        yield Thought(("<|end|>", "<|return|>", "<|call|>", "<|start|>"))
        yield from source.skip("<|end|>")


_CHANNEL = Markers("<|channel|>", "<|message|>", "<|end|>")
_MESSAGE = Markers("<|message|>", "<|end|>", "<|start|>")


def _named(text: str, tools: Tools) -> list[Call]:
    """The call, or all calls of the list, that ``text`` describes in JSON.

    A list with a call of no tool there is is none: nobody could tell where that one was.
    """
    value = from_json(text)
    calls: list[Call] = []
    for item in value if isinstance(value, list) else [value]:
        match item:
            case {"name": str(name), "arguments": given} | {"name": str(name), "parameters": given}:
                call_id = item.get("id")
                given_id = call_id if isinstance(call_id, str) else ""
                calls.append(Call(name, arguments(given), given_id))
            case {"name": str(name), **others} if not others:
                calls.append(Call(name, "{}"))
            case _:
                raise NoCall
    if any(call.name not in tools for call in calls):
        raise NoCall
    return calls


def _in_line(source: Source, end: str) -> Wait[str]:
    """Read what stands before ``end``, and it too; both are on one line."""
    text = yield from source.until(Markers(end, "\n"))
    yield from source.expect(end)
    return text


def _value(source: Source, closing: str, behind: tuple[str, ...]) -> Wait[str]:
    """Read a value of any text up to the ``closing`` tag that one of ``behind`` follows."""
    end, parts = Markers(closing), []
    while True:
        parts.append((yield from source.until(end)))
        yield from source.expect(closing)
        space = yield from source.space()
        if (yield from source.peek(*behind)) or source.exhausted:
            return "".join(parts)
        parts += [closing, space]


def _unwrapped(value: str) -> str:
    """A value without the line ends that templates put around it."""
    return value.removeprefix("\n").removesuffix("\n")


GENERIC = Syntax(
    "hermes",
    ("<tool_call>",),
    partial(_json_in_tags, "<tool_call>", "</tool_call>"),
    ("</tool_call>",),
)
"""That of the tools' generic form, see :mod:`anaphora.prompt.adapt`."""
BARE_JSON = Syntax("json", ("<|python_tag|>",), _bare_json, leads=("{", "["))
HARMONY = Syntax(
    "harmony",
    ("<|channel|>", "<|start|>"),
    _harmony,
    ("<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"),
    leads=(" to=",),  # the prompt has the rest of the header
    channels=True,
)
SYNTAXES = (
    HARMONY,
    Syntax(
        "kimi",
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        _kimi,
        ("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ),
    Syntax(
        "dsml",
        ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        _dsml,
        ("<｜DSML｜invoke", "</｜DSML｜invoke>"),
    ),
    Syntax(
        "deepseek",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        _deepseek,
        ("<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    Syntax(
        "gemma",
        ("<|tool_call>",),
        partial(_gemma, "<|tool_call>", "<tool_call|>", '<|"|>'),
        ("<tool_call|>", '<|"|>'),
    ),
    Syntax(
        "function-gemma",
        ("<start_function_call>",),
        partial(_gemma, "<start_function_call>", "<end_function_call>", "<escape>"),
        ("<end_function_call>", "<escape>"),
    ),
    Syntax("mistral", ("[TOOL_CALLS]",), _mistral, ("[ARGS]", "[CALL_ID]")),
    Syntax(
        "glm",
        ("<tool_call>",),
        _key_value_tags,
        ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
    ),
    Syntax(
        "qwen-coder",
        ("<tool_call>", "<seed:tool_call>", "<function="),
        _functions_in_tags,
        ("</tool_call>", "</seed:tool_call>"),
    ),
    Syntax(
        "nemotron",
        ("<TOOLCALL>",),
        partial(_json_in_tags, "<TOOLCALL>", "</TOOLCALL>"),
        ("</TOOLCALL>",),
    ),
    GENERIC,
    BARE_JSON,
)
