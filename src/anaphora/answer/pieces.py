"""What answers are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from anaphora.engine.protocol import TokenLogprob


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the user, or a stretch of it."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens that begin in it, where they are asked for."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers, or a stretch of it."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, complete."""

    name: str
    arguments: str
    """A JSON object."""
    id: str = ""
    """Empty: the model gave it none."""


Piece = Text | Reasoning | Call


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """``pieces`` with stretches of the same kind that follow each other joined."""
    result: list[Piece] = []
    for kind, run in groupby(pieces, type):
        stretches = list(run)
        if kind is Call:
            result += stretches
            continue
        text = "".join(piece.text for piece in stretches if not isinstance(piece, Call))
        result.append(Text(text, logprobs(stretches)) if kind is Text else Reasoning(text))
    return result


def logprobs(pieces: Iterable[Piece]) -> tuple[TokenLogprob, ...]:
    """Those of all texts among ``pieces``."""
    return tuple(one for piece in pieces if isinstance(piece, Text) for one in piece.logprobs)
