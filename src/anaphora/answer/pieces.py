"""What answers are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the user, or a stretch of it."""

    text: str


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
        if kind is Call:
            result += run
        else:
            text = "".join(piece.text for piece in run if not isinstance(piece, Call))
            result.append(Text(text) if kind is Text else Reasoning(text))
    return result
