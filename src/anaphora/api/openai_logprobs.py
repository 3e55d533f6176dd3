"""How OpenAI's protocols word log probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from anaphora.engine.protocol import Candidate, TokenLogprob
from anaphora.vocabulary import Vocabulary


class Wording:
    """In the words of a vocabulary.

    A token that is not text by itself, but a part of a character, is written as its bytes; one that
    stands for no text has a name.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._names = {token: text for text, token in vocabulary.control.items()}

    def listed(self, logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        """As Chat Completions and Responses have them."""
        return [
            {**self._token(one), "top_logprobs": [self._token(other) for other in one.top]}
            for one in logprobs
        ]

    def in_columns(self, logprobs: Iterable[TokenLogprob], top: int) -> dict[str, Any]:
        """As Completions have them. The token that came is among the ``top`` likeliest."""
        given = list(logprobs)
        return {
            "tokens": [self._column(one.token) for one in given],
            "token_logprobs": [one.logprob for one in given],
            "top_logprobs": [self._likeliest(one) for one in given] if top else None,
            "text_offset": [one.offset for one in given],
        }

    def _likeliest(self, one: TokenLogprob) -> dict[str, float]:
        likeliest = {self._column(other.token): other.logprob for other in one.top}
        return {**likeliest, self._column(one.token): one.logprob}

    def _token(self, one: TokenLogprob | Candidate) -> dict[str, Any]:
        piece = self._vocabulary.piece(one.token)
        text = _text(piece) or self._names.get(one.token, "")
        shown = text or _escaped(piece)
        return {"token": shown, "logprob": one.logprob, "bytes": list(piece)}

    def _column(self, token: int) -> str:
        piece = self._vocabulary.piece(token)
        return _text(piece) or self._names.get(token, f"bytes:{_escaped(piece)}")


def _text(piece: bytes) -> str | None:
    """``None``: it is no text by itself."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _escaped(piece: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in piece)
