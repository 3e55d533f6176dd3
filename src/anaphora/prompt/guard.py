"""Keeps user text from ever becoming a control token.

A noncharacter that occurs nowhere in the request is put into everything in a user's string that
looks like a control token, and where such a look-alike could arise at the string's edges together
with its neighbours. After rendering, whatever still reads as a control token was written by the
template; then the noncharacters are taken out again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from anaphora.errors import PromptError
from anaphora.prompt.conversation import Plain

# Unicode promises never to assign these; the private use of plane 15 is there if they run out.
_NONCHARACTERS = [
    *map(chr, range(0xFDD0, 0xFDF0)),
    *(chr(plane << 16 | last) for plane in range(17) for last in (0xFFFE, 0xFFFF)),
]
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_ROLES = {
    *("system", "developer", "user", "assistant", "tool", "function"),
    *("model", "ipython", "observation"),
}


def unused_characters(texts: Sequence[str], count: int) -> list[str]:
    """``count`` characters without meaning that occur in none of ``texts``.

    :raises PromptError: the texts hold nearly all of the 65,600 that could be used.
    """
    rich = [text for text in texts if not text.isascii()]
    free = (c for c in _NONCHARACTERS if not any(c in text for text in rich))
    found = list(islice(free, count))
    if len(found) < count:
        used = set().union(*rich)
        found += islice((c for c in map(chr, _PRIVATE_USE) if c not in used), count - len(found))
    if len(found) < count:
        raise PromptError("the conversation uses up all of Unicode's noncharacters")
    return found


def strings(value: Plain) -> Iterator[str]:
    """Every string inside ``value``, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


class ControlTokens:
    """The control tokens of a vocabulary, found in text.

    A token of one character cannot be told from text and is never found.
    """

    def __init__(self, control: Mapping[str, int]) -> None:
        self._ids = {text: token for text, token in control.items() if len(text) > 1}
        self._lengths = sorted({len(text) for text in self._ids}, reverse=True)
        self._first = _any_of(text[0] for text in self._ids)
        # A template may change the case of what it prints.
        folded = {text.lower() for text in self._ids}
        self._folded = folded
        self._folded_first = _any_of(c for text in folded for c in (text[0], text[0].upper()))
        self._prefixes = {text[:end] for text in folded for end in range(1, len(text))}
        self._suffixes = {text[start:] for text in folded for start in range(1, len(text))}

    def split(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Start, end and id of every control token in ``text``: leftmost first, then longest."""
        end = 0
        for match in self._first.finditer(text):
            start = match.start()
            if start < end:
                continue
            for length in self._lengths:
                token = self._ids.get(text[start : start + length])
                if token is not None:
                    end = start + length
                    yield start, end, token
                    break

    def contain(self, text: str) -> bool:
        """Whether ``text`` is a part of a control token."""
        return any(text.lower() in folded for folded in self._folded)

    def breaks(self, text: str) -> list[int]:
        """Offsets in ``text`` where a guard has to go, in order."""
        offsets = [
            match.start() + 1
            for match in self._folded_first.finditer(text)
            if any(
                text[match.start() : match.start() + length].lower() in self._folded
                for length in self._lengths
            )
        ]
        longest = max(self._lengths, default=0)
        if any(text[:end].lower() in self._suffixes for end in range(1, longest)):
            offsets.insert(0, 0)
        if any(text[-length:].lower() in self._prefixes for length in range(1, longest)):
            offsets.append(len(text))
        return offsets


class Guard:
    """Guards the strings of one request with one character."""

    def __init__(self, control: ControlTokens, character: str) -> None:
        self.character = character
        self._control = control

    def text(self, text: str, marks: Iterable[tuple[int, str]] = ()) -> str:
        """``text`` guarded; ``marks`` (offset, mark) are put in as well."""
        inserts = [(offset, self.character) for offset in self._control.breaks(text)]
        return insert(text, [*inserts, *marks])

    def value(self, value: Plain) -> Plain:
        """A copy of ``value`` with every string inside it guarded, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def role(self, role: str) -> str:
        """A role guarded. The usual ones stay as they are: templates compare them, and some build
        control tokens from them (``'<|' + role + '|>'``), which no other role may do."""
        if role in _ROLES:
            return role
        guarded = self.text(role)
        return self.character + guarded if self._control.contain(role) else guarded


def insert(text: str, inserts: Iterable[tuple[int, str]]) -> str:
    """``text`` with strings put in at offsets."""
    pieces, done = [], 0
    for offset, piece in sorted(inserts, key=lambda one: one[0]):
        pieces += [text[done:offset], piece]
        done = offset
    return "".join([*pieces, text[done:]]) if pieces else text


def _any_of(characters: Iterable[str]) -> re.Pattern[str]:
    members = "".join(re.escape(c) for c in sorted(set(characters)))
    return re.compile(f"[{members}]" if members else r"(?!)")
