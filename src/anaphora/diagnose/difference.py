"""Where two prompts part, and the text around that place in both."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile

import numpy as np

from anaphora.cache.keys import Tokens
from anaphora.diagnose.prompts import Place, Remembered
from anaphora.vocabulary import Vocabulary

_BEFORE, _AFTER = 256, 1024
"""Bytes of text looked at on either side."""
_SHOWN, _MARKED = 60, 160
"""Characters shown on either side, and of the difference itself."""
_SAME_AGAIN = 6
"""So many equal characters, and the difference is over."""
_LONGEST_WORD = 64
_JOINERS = "-_:./+=@#"


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Text of a prompt around the place where it differs from another."""

    before: str
    marked: str
    """What differs; empty where the prompt ends, or the other has something more."""
    after: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a prompt parts from an earlier one."""

    position: int
    """Index of the first token that differs."""
    place: Place
    earlier: Excerpt
    now: Excerpt


@dataclass(frozen=True, slots=True)
class Change:
    """The text around a difference, long enough to judge it."""

    earlier: str
    now: str
    start: int
    """Index of the first character that differs, in both."""
    in_text: bool
    """Whether there is one: the same text can be made of other tokens."""


def shared(one: Tokens, other: Tokens) -> int:
    """Length (tokens) of the common prefix."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


class Reader:
    """Turns stretches of tokens back into text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._control = {token: text.encode() for text, token in vocabulary.control.items()}

    def text(self, tokens: Tokens, start: int, end: int) -> str:
        """The text of ``tokens[start:end]``, without halves of characters at its edges."""
        data = b"".join(self._piece(token) for token in tokens[start:end])
        if start > 0:
            data = data[sum(1 for _ in takewhile(_continues, data[:3])) :]
        if end < len(tokens):
            data = data[: len(data) - _unfinished(data)]
        return data.decode("utf-8", "replace")

    def change(self, earlier: Tokens, now: Tokens, position: int) -> Change:
        """What lies around ``position``, the first token that differs."""
        start = position
        size = 0
        while start > 0 and size < _BEFORE:
            start -= 1
            size += max(1, len(self._piece(now[start])))
        before, after = (self.text(one, start, self._end(one, position)) for one in (earlier, now))
        shortest = min(len(before), len(after))
        pairs = zip(before, after, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), shortest)
        ended = any(self._end(one, position) == len(one) for one in (earlier, now))
        if common < shortest or (ended and before != after):
            return Change(before, after, common, True)
        return Change(before, after, min(common, len(self.text(now, start, position))), False)

    def _end(self, tokens: Tokens, position: int) -> int:
        size = 0
        while position < len(tokens) and size < _AFTER:
            size += max(1, len(self._piece(tokens[position])))
            position += 1
        return position

    def _piece(self, token: np.int32) -> bytes:
        return self._vocabulary.piece(int(token)) or self._control.get(int(token), b"")


def difference(earlier: Remembered, now: Remembered, position: int, change: Change) -> Difference:
    """What is shown of a change at the token ``position``."""
    place = (now if position < len(now.tokens) else earlier).region(position).place
    start, ends = change.start, _ends(change)
    if change.in_text:
        start, ends = _whole_words(change, ends)
    return Difference(
        position,
        place,
        _excerpt(change.earlier, start, ends[0]),
        _excerpt(change.now, start, ends[1]),
    )


def _excerpt(text: str, start: int, end: int) -> Excerpt:
    cut = min(end, start + _MARKED)
    after = text[end : end + _SHOWN] if cut == end else ""
    return Excerpt(text[max(0, start - _SHOWN) : start], text[start:cut], after)


def _ends(change: Change) -> tuple[int, int]:
    """Where the two texts are the same again; where they never are: the end of what is marked."""
    reach = change.start + 2 * _MARKED
    before, after = change.earlier[change.start : reach], change.now[change.start : reach]
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    for block in matcher.get_matching_blocks():
        both_end = (block.a + block.size, block.b + block.size) == (len(before), len(after))
        if block.size >= _SAME_AGAIN or both_end:
            return change.start + block.a, change.start + block.b
    return change.start + len(before), change.start + len(after)


def _whole_words(change: Change, ends: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    """The stretch that differs, grown to whole words, numbers and times."""
    start = change.start
    while start > max(0, change.start - _LONGEST_WORD) and _is_word(change.now[start - 1]):
        start -= 1
    texts = (change.earlier, change.now)
    if not any(_is_word(text[end - 1 : end]) for text, end in zip(texts, ends, strict=True)):
        return start, ends
    return start, (_word_end(change.earlier, ends[0]), _word_end(change.now, ends[1]))


def _word_end(text: str, end: int) -> int:
    grown = end
    while grown < min(len(text), end + _LONGEST_WORD) and _is_word(text[grown]):
        grown += 1
    while grown > end and text[grown - 1] in _JOINERS:
        grown -= 1
    return grown


def _is_word(character: str) -> bool:
    return character.isalnum() or (character != "" and character in _JOINERS)


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _unfinished(data: bytes) -> int:
    """How many bytes at the end of ``data`` are the beginning of a character."""
    for length in range(1, min(3, len(data)) + 1):
        byte = data[-length]
        if not _continues(byte):
            needed = 2 if byte >> 5 == 0b110 else 3 if byte >> 4 == 0b1110 else 4
            return length if byte >= 0xC0 and length < needed else 0
    return 0
