"""Finds out where in the rendered text a content part ends, by rendering with marks in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from anaphora.prompt.conversation import Message, Plain

ALPHABET = 5
"""How many characters of its own a set of marks needs."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The end of a content part."""

    message: int
    part: int
    offset: int
    """In the string the template gets: the white space before the edge is left out, because
    templates trim."""
    space: str
    """That white space."""


@dataclass(frozen=True, slots=True)
class CallEdge:
    """The end of the last tool call's name, in a message that has no text to mark."""

    message: int


@dataclass(frozen=True, slots=True)
class ToolEdge:
    """A tool's description, or its name where it has none, as the way to the tool's end."""

    tool: int


def edges(messages: Sequence[Message], *, joined: bool) -> Iterator[Edge | CallEdge]:
    """The edges of ``messages``; ``joined``: the template gets a message's parts as one string."""
    for number, message in enumerate(messages):
        if not message.text.strip():
            if called_name(message.fields) is not None:
                yield CallEdge(number)
            continue
        before = ""
        for index, part in enumerate(message.content):
            before = before + part.text if joined else part.text
            bare = before.rstrip()
            yield Edge(number, index, len(bare), before[len(bare) :])


def called_name(fields: Mapping[str, Plain]) -> str | None:
    """The name of the last tool call, where the calls have the usual shape."""
    match fields.get("tool_calls"):
        case [*_, {"function": {"name": str(name)}}] | [*_, {"name": str(name)}]:
            return name
    return None


def with_called_name(fields: Mapping[str, Plain], name: str) -> dict[str, Plain]:
    """``fields`` with another name in the last tool call."""
    *others, last = fields["tool_calls"]
    if "function" in last:
        last = {**last, "function": {**last["function"], "name": name}}
    else:
        last = {**last, "name": name}
    return {**fields, "tool_calls": [*others, last]}


def with_mark(tool: Plain, mark: str) -> Plain:
    """``tool`` with a mark at the end of its description or name; as it is where it has neither."""
    wrapped = isinstance(tool, dict) and isinstance(tool.get("function"), dict)
    function = tool["function"] if wrapped else tool
    if not isinstance(function, dict):
        return tool
    texts = [name for name in ("description", "name") if isinstance(function.get(name), str)]
    name = next((name for name in texts if function[name].strip()), None)
    if name is None:
        return tool
    bare = function[name].rstrip()
    marked = {**function, name: bare + mark + function[name][len(bare) :]}
    return {**tool, "function": marked} if wrapped else marked


def behind(text: str, place: int, rest: str) -> int:
    """Where ``rest`` ends in ``text``, as far as it follows ``place``; white space may differ."""
    if text.startswith(rest, place):
        return place + len(rest)
    end = place
    for character in rest:
        if character.isspace():
            continue
        while place < len(text) and text[place].isspace():
            place += 1
        if not text.startswith(character, place):
            break
        place += 1
        end = place
    return end


class Marks:
    """Numbers from 0 to ``count`` - 1, written in characters that occur nowhere else."""

    def __init__(self, alphabet: Sequence[str], count: int) -> None:
        self._opening, *self._digits = alphabet
        self._width = 1
        while len(self._digits) ** self._width < count:
            self._width += 1
        self._pattern = re.compile(f"{self._opening}([{''.join(self._digits)}]{{{self._width}}})")

    def write(self, number: int) -> str:
        digits = []
        for _ in range(self._width):
            number, digit = divmod(number, len(self._digits))
            digits.append(self._digits[digit])
        return self._opening + "".join(reversed(digits))

    def take_out(self, text: str) -> tuple[str, dict[int, int]]:
        """``text`` without marks, and where in it each number stood (last)."""
        pieces: list[str] = []
        positions: dict[int, int] = {}
        length = done = 0
        for match in self._pattern.finditer(text):
            pieces.append(text[done : match.start()])
            length += len(pieces[-1])
            done = match.end()
            positions[self._read(match[1])] = length
        return "".join([*pieces, text[done:]]), positions

    def _read(self, digits: str) -> int:
        number = 0
        for digit in digits:
            number = number * len(self._digits) + self._digits.index(digit)
        return number
