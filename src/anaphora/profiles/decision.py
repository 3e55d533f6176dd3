"""What a profile decides about a request, and from what: no clock, no cache, no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from anaphora.profiles.outline import Boundary, Ttl

Place = tuple[int, str]
"""Position (tokens) and match key of an entry whose tokens are a prefix of the prompt's."""

Lifetime = Ttl | Literal["unlimited"]
"""What written tokens are counted under; ``unlimited``: until space is needed."""

Loss = Literal["expired", "evicted", "lost"]
"""Why an entry is gone: its time was over; its space was needed; a file was damaged or deleted."""

Unread = Loss | Literal["out_of_reach"]
"""Why nothing is read where an entry was. ``out_of_reach``: it is there, and the profile does not
look at it, since too much lies between."""


@dataclass(frozen=True, slots=True)
class View:
    """What is promised of a prompt to its sender, under his profile."""

    reach: int = 0
    """The longest common prefix (tokens) of the prompt with any entry."""
    expiries: Mapping[Place, float | None] = field(default_factory=dict)
    """When entries that end at boundaries of the prompt expire (seconds since the Unix epoch).
    One that is still being computed is not here: it can be read once its request has begun to
    answer."""

    def has(self, boundary: Boundary, now: float) -> bool:
        """Whether a living entry ends at ``boundary``."""
        place = boundary.position, boundary.match
        if place not in self.expiries:
            return False
        expiry = self.expiries[place]
        return expiry is None or expiry > now


@dataclass(frozen=True, slots=True)
class Write:
    """An entry to be written when the request begins to answer."""

    position: int
    match: str
    ttl: Ttl
    lifetime: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Counters of a request, all in tokens, and what becomes of entries."""

    prompt: int
    started: float
    """When the request began (seconds since the Unix epoch): from then on lifetimes run."""
    read: int = 0
    written: Mapping[Lifetime, int] = field(default_factory=dict)
    """By lifetime; without zeros."""
    refreshed: tuple[Place, ...] = ()
    """Entries that live on, since it reads them."""
    writes: tuple[Write, ...] = ()
    unread: Mapping[Unread, int] = field(default_factory=dict)
    """How far (tokens) entries would have reached beyond what is read, by why they don't."""

    @property
    def uncached(self) -> int:
        """Tokens neither read nor written."""
        return self.prompt - self.read - sum(self.written.values())


def out_of_reach(living: Iterable[int], read: int) -> dict[Unread, int]:
    """What a profile tells of the positions of living entries, where it has read so far."""
    longest = max(living, default=0)
    return {"out_of_reach": longest} if longest > read else {}


def distinct(writes: Iterable[Write]) -> tuple[Write, ...]:
    """One for each place, the one that lives longest; in order of position."""
    longest: dict[Place, Write] = {}
    for write in writes:
        place = write.position, write.match
        if place not in longest or longest[place].lifetime < write.lifetime:
            longest[place] = write
    return tuple(sorted(longest.values(), key=lambda write: write.position))


def split(start: int, writes: Iterable[Write]) -> dict[Lifetime, int]:
    """How many tokens behind ``start`` are written for each lifetime.

    A token counts once, for the longest lifetime of the breakpoints behind it. With A the end of
    what was read, B the last breakpoint of one hour and C the last of all, that is Anthropic's
    rule: B - A for one hour, C - B for five minutes.
    """
    counts: dict[Lifetime, int] = {}
    for write in sorted(writes, key=lambda write: -write.lifetime):
        if write.position > start:
            counts[write.ttl] = counts.get(write.ttl, 0) + write.position - start
            start = write.position
    return counts
