"""Rendered text as tokens, and which token a place in the text falls on."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock

import numpy as np

from anaphora.cache.keys import Tokens
from anaphora.prompt.guard import ControlTokens
from anaphora.vocabulary import Vocabulary

# What C's isspace() takes for white space: what some control tokens swallow beside them.
_SPACE = " \t\n\v\f\r"


class PieceCache:
    """Remembers the tokens of long texts: a conversation is rendered anew for every turn.

    :param budget: bytes of text and tokens kept; the least recently used go first.
    """

    _WORTH_IT = 256

    def __init__(self, vocabulary: Vocabulary, budget: int = 16 << 20) -> None:
        self._vocabulary = vocabulary
        self._free = budget
        self._known: OrderedDict[str, Tokens] = OrderedDict()
        self._lock = Lock()

    def encode(self, text: str) -> Tokens:
        with self._lock:
            if (tokens := self._known.get(text)) is not None:
                self._known.move_to_end(text)
                return tokens
        tokens = np.array(self._vocabulary.encode(text), dtype=np.int32)
        if len(text) >= self._WORTH_IT:
            with self._lock:
                self._keep(text, tokens)
        return tokens

    def _keep(self, text: str, tokens: Tokens) -> None:
        if text in self._known:
            return
        self._known[text] = tokens
        self._free -= _cost(text, tokens)
        while self._free < 0:
            self._free += _cost(*self._known.popitem(last=False))


def _cost(text: str, tokens: Tokens) -> int:
    return sys.getsizeof(text) + tokens.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """A control token, or the text between two of them."""

    start: int
    end: int
    tokens: Tokens
    first: int
    """How many tokens there are before it, without an added BOS."""
    text: str = ""
    """What was tokenized: without guards and swallowed white space."""
    swallowed: int = 0
    """Characters swallowed at the start."""


class Layout:
    """``guarded`` text cut at its control tokens and tokenized.

    All places are offsets in ``guarded``, guards included.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        control: ControlTokens,
        pieces: PieceCache,
        guarded: str,
        guard: str,
    ) -> None:
        self._vocabulary = vocabulary
        self._pieces = pieces
        self._guarded = guarded
        self._guard = guard
        self.control = list(control.split(guarded))
        """Start, end and id of every control token."""
        self._spans: list[_Span] = []
        self._token_ends: dict[int, list[int]] = {}

        self._count = 0
        place, before = 0, None
        for start, end, token in self.control:
            self._add_text(place, start, before, token)
            self._add(_Span(start, end, np.array([token], dtype=np.int32), self._count))
            place, before = end, token
        self._add_text(place, len(guarded), before, None)
        self._starts = [span.start for span in self._spans]
        none = np.empty(0, dtype=np.int32)
        tokens: Tokens = np.concatenate([none, *(span.tokens for span in self._spans)])
        bos = vocabulary.bos
        self._added = 0
        if vocabulary.add_bos and bos is not None and tokens[:1].tolist() != [bos]:
            tokens = np.concatenate([np.array([bos], dtype=np.int32), tokens])
            self._added = 1
        self.tokens = tokens
        self.tokens.flags.writeable = False

    @property
    def text(self) -> str:
        return self._guarded.replace(self._guard, "")

    def token_at(self, place: int) -> int:
        """How many tokens of the prompt lie wholly before ``place``."""
        index = bisect_right(self._starts, place) - 1
        if index < 0:
            return self._added
        span = self._spans[index]
        first = self._added + span.first
        if place >= span.end:
            return first + len(span.tokens)
        before = self._guarded[span.start : place].replace(self._guard, "")
        inside = len(before) - span.swallowed
        if inside <= 0:
            return first
        if inside >= len(span.text):
            return first + len(span.tokens)
        return first + self._tokens_within(index, span, inside)

    def _tokens_within(self, index: int, span: _Span, characters: int) -> int:
        """How many tokens of ``span`` lie wholly within its first ``characters``."""
        if index not in self._token_ends:
            lengths = (len(self._vocabulary.piece(token)) for token in span.tokens.tolist())
            self._token_ends[index] = list(accumulate(lengths))
        ends = self._token_ends[index]
        # Some tokenizers put a space in front; with any other difference nothing can be told.
        extra = ends[-1] - len(span.text.encode()) if ends else 0
        if extra not in (0, 1):
            return 0
        return bisect_right(ends, len(span.text[:characters].encode()) + extra)

    def _add_text(self, start: int, end: int, before: int | None, after: int | None) -> None:
        text = whole = self._guarded[start:end].replace(self._guard, "")
        if before in self._vocabulary.strips_right:
            text = text.lstrip(_SPACE)
        swallowed = len(whole) - len(text)
        if after in self._vocabulary.strips_left:
            text = text.rstrip(_SPACE)
        if text:
            self._add(_Span(start, end, self._pieces.encode(text), self._count, text, swallowed))

    def _add(self, span: _Span) -> None:
        self._spans.append(span)
        self._count += len(span.tokens)
