"""The default profile: everything computed is promised, and stays until its space is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from anaphora.profiles.decision import Decision, View, Write, split
from anaphora.profiles.limits import check_seconds, complete
from anaphora.profiles.outline import Outline, Ttl


@dataclass(frozen=True, slots=True)
class Local:
    """Its rules, with their settings."""

    lifetime: float | None = None
    """Seconds that a promise lasts unless it is made again; ``None``: until space is needed."""
    lifetimes: Mapping[Ttl, float] = field(default_factory=dict)
    """Seconds by name that a breakpoint's prefix is kept in preference to other content; the
    providers' where none are given."""

    name: ClassVar[str] = "local"

    def __post_init__(self) -> None:
        if self.lifetime is not None:
            check_seconds("lifetime", self.lifetime)
        object.__setattr__(self, "lifetimes", complete(self.lifetimes))

    def decide(self, outline: Outline, length: int, view: View, now: float) -> Decision:
        """The longest prefix of ``length`` tokens that any entry has is read, the rest written.

        Breakpoints are promises on top: each is written with its lifetime, again by every
        request that has it.
        """
        writes = tuple(
            Write(boundary.position, boundary.mark, boundary.mark, self.lifetimes[boundary.mark])
            for boundary in outline.within(length)
            if boundary.mark is not None and boundary.position > 0
        )
        written = split(view.reach, writes)
        rest = length - view.reach - sum(written.values())
        if rest:
            written["unlimited"] = rest
        return Decision(length, now, view.reach, written, writes=writes)
