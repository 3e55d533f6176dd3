"""Anthropic's rules of prompt caching: writes at breakpoints, reads within 20 blocks of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from anaphora.profiles.decision import Decision, View, Write, distinct, out_of_reach, split
from anaphora.profiles.limits import check_count, complete
from anaphora.profiles.outline import Conditional, Outline, Ttl, match_key

Level = Literal["tools", "system", "messages"]
"""The order of a prompt. What changes on one level invalidates it and those after it."""


@dataclass(frozen=True, slots=True)
class Anthropic:
    """The rules, with their settings."""

    minimum: int = 1024
    """Tokens of the shortest prefix that is cached: 512 to 4,096, by model."""
    look_back: int = 20
    """Blocks in which a breakpoint looks for an entry, its own included."""
    lifetimes: Mapping[Ttl, float] = field(default_factory=dict)
    """Seconds by name, the provider's where none are given."""

    name: ClassVar[str] = "anthropic"

    def __post_init__(self) -> None:
        check_count("minimum", self.minimum)
        check_count("look_back", self.look_back)
        object.__setattr__(self, "lifetimes", complete(self.lifetimes))

    def decide(self, outline: Outline, length: int, view: View, now: float) -> Decision:
        """Each breakpoint reads the nearest entry in its window, and the longest of these counts.

        All entries on the way to it are refreshed. Every breakpoint at the minimum or behind it
        is written, unless an entry is there; one before the end of what is read costs nothing.
        """
        blocks = [boundary for boundary in outline.within(length) if boundary.kind == "block"]
        marked = [number for number, block in enumerate(blocks) if block.mark is not None]
        in_window = {
            number for mark in marked for number in range(mark - self.look_back + 1, mark + 1)
        }
        living = [
            number
            for number, block in enumerate(blocks)
            if block.position >= self.minimum and view.has(block, now)
        ]
        read = max((blocks[n].position for n in living if n in in_window), default=0)
        writes = distinct(
            Write(block.position, block.match, block.mark, self.lifetimes[block.mark])
            for number, block in enumerate(blocks)
            if block.mark is not None and block.position >= self.minimum and number not in living
        )
        on_the_way = [blocks[n] for n in living if blocks[n].position <= read]
        refreshed = dict.fromkeys((block.position, block.match) for block in on_the_way)
        unread = out_of_reach((blocks[n].position for n in living if marked), read)
        return Decision(length, now, read, split(read, writes), tuple(refreshed), writes, unread)


@dataclass(frozen=True, slots=True)
class Conditions(Conditional):
    """What a prefix has to match on besides its tokens. The defaults are the provider's own, so
    that a default given explicitly is the same as one left out.

    Tools and texts are not here: they are among the tokens.
    """

    speed: str = "standard"
    citations: bool = False
    web: bool = False
    """Whether web search or web fetch is among the tools."""
    tool_choice: str = "auto"
    """With the name of the tool where one is forced."""
    disable_parallel_tool_use: bool = False
    images: bool = False
    """Whether there are images anywhere in the prompt."""
    thinking: str = "disabled"
    """With its budget where one is given."""
    effort: str = "high"

    def match(self, level: Level) -> str:
        """The match key of boundaries on ``level``."""
        given = self.given
        if level != "messages":
            names = _SYSTEM if level == "system" else ()
            given = {name: value for name, value in given.items() if name in names}
        return match_key(given)


_SYSTEM = ("speed", "citations", "web")
"""What invalidates the system level; the messages' level follows from all."""


@dataclass(frozen=True, slots=True)
class Markable:
    """A block of a request that a breakpoint could stand on."""

    path: str
    """Where it is in the request: ``system.0``, ``messages.10.content.0``."""
    ttl: Ttl | None = None
    """The lifetime its ``cache_control`` asks for."""
    cacheable: bool = True
    """False for thinking and for empty texts: the top-level breakpoint passes them by."""


def top_level_target(blocks: Sequence[Markable]) -> int | None:
    """Which of ``blocks`` a top-level ``cache_control`` marks: the last that can be."""
    return next((n for n in reversed(range(len(blocks))) if blocks[n].cacheable), None)


def refusal(
    blocks: Sequence[Markable], top_level: Ttl | None = None, *, most: int = 4
) -> str | None:
    """Why breakpoints are refused, in the provider's words; ``None``: they are not.

    ``blocks`` come in the order tools, system, messages, each before what follows it;
    ``top_level`` is the lifetime of the request's own ``cache_control``. Where the provider's
    sentence leaves open which block it means, one more names it.
    """
    target = None if top_level is None else top_level_target(blocks)
    marked = [(block.path, block.ttl) for block in blocks]
    if target is not None:
        path, ttl = marked[target]
        if ttl is not None and ttl != top_level:
            return (
                f"Top-level cache_control has ttl='{top_level}' but the target block already has "
                f"cache_control with ttl='{ttl}'. The target block is {path}."
            )
        marked[target] = path, top_level
    marks = [(path, ttl) for path, ttl in marked if ttl is not None]
    if len(marks) > most:
        return f"A maximum of {most} blocks with cache_control may be provided. Found {len(marks)}."
    short: str | None = None
    for path, ttl in marks:
        if ttl == "5m":
            short = short or path
        elif ttl == "1h" and short is not None:
            return (
                f"{path}.cache_control.ttl: a ttl='1h' cache_control block must not come after a "
                "ttl='5m' cache_control block. Note that blocks are processed in the following "
                "order: `tools`, `system`, `messages`. The earlier block is "
                f"{short}."
            )
    return None
