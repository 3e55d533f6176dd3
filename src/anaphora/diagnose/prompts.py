"""What is remembered of a request, so that a later miss can be explained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from anaphora.cache.keys import Tokens
from anaphora.profiles.decision import Unread


@dataclass(frozen=True, slots=True)
class Place:
    """What of a request a stretch of its prompt is from. Numbers count from 1."""

    kind: Literal["tool", "system", "message", "template"]
    """``template``: text the chat template put between."""
    number: int = 0
    part: int = 0
    """Content part of a message; 0: there is one, or nobody knows."""
    name: str = ""
    """A tool's name, or the role of a message."""

    def __str__(self) -> str:
        named = f" ({self.name})" if self.name else ""
        match self.kind:
            case "tool":
                return f"tool {self.number}{named}"
            case "system":
                return f"system block {self.number}"
            case "message":
                part = f", part {self.part}" if self.part else ""
                return f"message {self.number}{named}{part}"
        return "the chat template's own text"


TEMPLATE = Place("template")


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens ``start`` to ``end`` (not included) of a prompt, and where they are from."""

    start: int
    end: int
    place: Place


@dataclass(frozen=True, slots=True)
class Decision:
    """What the profile decided about a request. Positions are tokens from the prompt's start."""

    read: int
    """Tokens that counted as read."""
    breakpoints: tuple[int, ...] | None = None
    """Where it looked and wrote; ``None``: everywhere."""
    minimum: int = 0
    """The shortest prefix the profile caches."""
    reused: int = 0
    """Tokens whose KV was there, whatever the profile counts."""
    unread: Mapping[Unread, int] = field(default_factory=dict)
    """How far entries would have reached beyond that, by why they don't."""


@dataclass(frozen=True, slots=True, eq=False)
class Remembered:
    """A request's prompt and what was decided about it."""

    request_id: str
    time: float
    """When it arrived, in seconds since the Unix epoch."""
    tokens: Tokens
    spans: tuple[Span, ...]
    """In order, without overlaps; what lies between is the template's."""
    match: Mapping[str, str]
    """What else has to be equal for a read, by name: ``model``, ``profile``, ``cache_key``, ..."""
    decision: Decision
    rules: tuple[str, ...] = field(default=())
    """Names of the rules for volatile text that were applied."""

    def region(self, position: int) -> Span:
        """The span ``position`` lies in, or the stretch of the template's between two spans."""
        start, end = 0, len(self.tokens)
        for span in self.spans:
            if span.start <= position < span.end:
                return span
            if span.end <= position:
                start = span.end
            else:
                end = min(end, span.start)
        return Span(start, end, TEMPLATE)
