"""What a profile has to know of a prompt: where reusable prefixes may end, and what was asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from blake3 import blake3

from anaphora.errors import SettingsError

Ttl = Literal["5m", "1h", "30m", "12h"]
"""Names of the lifetimes that can be asked for, as both providers write them."""

LIFETIMES: Mapping[Ttl, float] = {"5m": 300.0, "1h": 3600.0, "30m": 1800.0, "12h": 43_200.0}
"""Seconds, as the providers have them."""

Kind = Literal["block", "message", "developer"]
"""What ends at a boundary. A ``block`` is a tool, a system block or a content block: one position
of Anthropic's look-back. A ``message`` is one that OpenAI can end a prefix at: a user message, or
the last tool response of a group. ``developer``: the last message of the initial developer block.
"""


def _check_ttl(ttl: object) -> None:
    if ttl is not None and ttl not in LIFETIMES:
        raise SettingsError(f"a breakpoint has the lifetime {ttl!r}: use {', '.join(LIFETIMES)}")


@dataclass(frozen=True, slots=True)
class Boundary:
    """A place in a prompt where a reusable prefix may end."""

    position: int
    """Tokens from the start of the prompt. Where the template hides the place: the last known one
    before it."""
    kind: Kind = "block"
    match: str = ""
    """What the prefix has to match on besides its tokens, from :func:`match_key`."""
    mark: Ttl | None = None
    """The lifetime asked for, where the sender put a breakpoint here."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Boundaries of a prompt, in the order of the prompt; those behind its end don't count."""

    boundaries: tuple[Boundary, ...] = ()
    implicit: Ttl | None = None
    """Lifetime of the breakpoint that OpenAI manages itself; ``None``: only explicit ones."""

    def __post_init__(self) -> None:
        position = 0
        for boundary in self.boundaries:
            if not isinstance(boundary, Boundary) or boundary.position < position:
                raise SettingsError("boundaries have to be Boundary objects in order of position")
            _check_ttl(boundary.mark)
            position = boundary.position
        _check_ttl(self.implicit)

    def within(self, length: int) -> list[Boundary]:
        """Boundaries of the first ``length`` tokens."""
        return [boundary for boundary in self.boundaries if boundary.position <= length]


NO_OUTLINE = Outline()


@dataclass(frozen=True, slots=True)
class Conditional:
    """Conditions, each with a default."""

    @property
    def given(self) -> dict[str, Any]:
        """Those that are not the default, by name."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: value for field, value in values if value != field.default}


def match_key(conditions: Mapping[str, Any]) -> str:
    """32 hexadecimal digits that stand for JSON values by name; empty where there are none.

    Two mappings have the same key exactly when they are equal, whatever their order.
    """
    if not conditions:
        return ""
    return blake3(json.dumps(conditions, sort_keys=True).encode()).hexdigest(length=16)
