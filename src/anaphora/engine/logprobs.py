"""How likely tokens were, told together with the text they are part of."""

from __future__ import annotations

import codecs
from collections import deque

import numpy as np
from numpy.typing import NDArray

from anaphora.engine.protocol import Candidate, TokenLogprob

LEAST = -9999.0
"""What stands for anything less likely, as in OpenAI's API: JSON has no infinity."""

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Logprobs:
    """Measures the tokens of one answer, and keeps what it found until their text is given out.

    A token is told with the first of its characters, one that is a part of a character with that.
    Those that stand for no text are told with the text behind them.
    """

    __slots__ = ("_characters", "_decoder", "_given", "_top", "_waiting")

    def __init__(self, top: int) -> None:
        """``top``: how many of the likeliest tokens to tell beside each."""
        self._top = top
        self._decoder = _new_decoder("replace")
        self._characters = 0
        """Complete ones so far."""
        self._given = 0
        """Those that were given out."""
        self._waiting: deque[TokenLogprob] = deque()

    def add(self, token: int, piece: bytes, logits: NDArray[np.float32]) -> None:
        """``token`` was chosen by ``logits``, shape (vocabulary size,), and reads ``piece``."""
        offset = self._decode(piece[:1])
        self._decode(piece[1:])
        self._waiting.append(measured(token, logits, self._top, offset))

    def tell(self, characters: int, *, over: bool) -> tuple[TokenLogprob, ...]:
        """Those told with the next ``characters`` of the text.

        ``over``: the answer ends with them, and no stop text is why. So tokens count that stand
        behind them, such as the parts of a character that was cut off.
        """
        self._given += characters
        told = []
        while self._waiting and (over or self._waiting[0].offset < self._given):
            told.append(self._waiting.popleft())
        return tuple(told)

    def _decode(self, data: bytes) -> int:
        """Take in ``data``; returns which character its last byte is of, or the next one."""
        self._characters += len(self._decoder.decode(data))
        incomplete, _ = self._decoder.getstate()
        return self._characters - bool(data and not incomplete)


def measured(token: int, logits: NDArray[np.float32], top: int, offset: int = 0) -> TokenLogprob:
    """The log-softmax of ``logits``, shape (vocabulary size,), at ``token`` and the likeliest ones.

    ``top`` of these, the likeliest first, and of those that are alike the smallest id.
    """
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    candidates: NDArray[np.int64] = np.empty(0, np.int64)
    if top:
        least = np.partition(logits, -top)[-top] if top < len(logits) else logits.min()
        candidates = np.flatnonzero(logits >= least)
        candidates = candidates[np.argsort(-logits[candidates], kind="stable")][:top]
    return TokenLogprob(
        token,
        max(LEAST, float(values[token])),
        tuple(Candidate(int(one), max(LEAST, float(values[one]))) for one in candidates),
        offset,
    )
