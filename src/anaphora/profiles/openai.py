"""OpenAI's rules of prompt caching: a breakpoint of its own, explicit ones, exact boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from anaphora.profiles.decision import Decision, View, Write, distinct, out_of_reach, split
from anaphora.profiles.limits import check_count, complete
from anaphora.profiles.outline import Conditional, Outline, Ttl, match_key


@dataclass(frozen=True, slots=True)
class OpenAI:
    """The rules, with their settings."""

    minimum: int = 1024
    """Tokens of the shortest prefix that is cached."""
    rounding: int = 1
    """What is read is counted in steps of so many tokens; 128 for older models."""
    most_writes: int = 4
    """Breakpoints written by one request, the implicit one included."""
    most_explicit: int = 80
    """Explicit breakpoints, the latest ones, at which a request reads."""
    most_messages: int = 20
    """Ends of messages before the implicit breakpoint at which a request reads."""
    lifetimes: Mapping[Ttl, float] = field(default_factory=dict)
    """Seconds by name, the provider's where none are given."""

    name: ClassVar[str] = "openai"

    def __post_init__(self) -> None:
        for limit in ("minimum", "rounding", "most_writes", "most_explicit", "most_messages"):
            check_count(limit, getattr(self, limit))
        object.__setattr__(self, "lifetimes", complete(self.lifetimes))

    def decide(self, outline: Outline, length: int, view: View, now: float) -> Decision:
        """The longest entry at a boundary of the request is read; its breakpoints are written.

        Nothing is looked for between boundaries. What is read is not written again.
        """
        boundaries = [b for b in outline.within(length) if b.position >= self.minimum]
        latest = [(b, b.mark) for b in reversed(boundaries) if b.mark is not None]
        usable = [boundary for boundary, _ in latest]
        readable = usable[: self.most_explicit]
        written = latest[: self.most_writes]
        if outline.implicit is not None:
            ends = [b for b in reversed(boundaries) if b.kind != "block"]
            usable += ends
            readable += ends[: 1 + self.most_messages]
            readable += [end for end in ends if end.kind == "developer"]
            written = latest[: self.most_writes - 1]
            written += [(end, outline.implicit) for end in ends[:1]]
        read = max((b.position for b in readable if view.has(b, now)), default=0)
        counted = read // self.rounding * self.rounding
        writes = distinct(
            Write(boundary.position, boundary.match, ttl, self.lifetimes[ttl])
            for boundary, ttl in written
            if not view.has(boundary, now)
        )
        refreshed = dict.fromkeys(
            (b.position, b.match) for b in boundaries if b.position <= read and view.has(b, now)
        )
        unread = out_of_reach((b.position for b in usable if view.has(b, now)), read)
        return Decision(length, now, counted, split(read, writes), tuple(refreshed), writes, unread)


@dataclass(frozen=True, slots=True)
class Conditions(Conditional):
    """What a prefix has to match on besides its tokens, with the provider's defaults.

    Tools and texts are not here: they are among the tokens. Nor is ``tool_choice``, which changes
    nothing about the prefix.
    """

    prompt_cache_key: str = ""
    """An empty key is the same as none."""
    parallel_tool_calls: bool = True
    text_format: str = "text"
    """With its schema where it has one."""
    reasoning_effort: str = "medium"
    verbosity: str = "medium"
    context_management: str = ""

    @property
    def match(self) -> str:
        """The match key of every boundary of the request."""
        return match_key(self.given)
