"""From marked edges in the text to token positions of messages and content parts."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from anaphora.prompt.conversation import Message
from anaphora.prompt.layout import Layout
from anaphora.prompt.marks import CallEdge, Edge


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where a message ends in the prompt, in tokens from its start.

    A position is the last token boundary not after the end of the text; ``None`` where the
    template changes or drops the text so that its end cannot be told.
    """

    end: int | None
    """After the control token that ends the turn, where the template writes one."""
    parts: tuple[int | None, ...]
    """After each content part."""


class Places:
    """Where the edges of ``messages`` lie in the guarded text.

    A message ends after the end-of-turn token that directly follows its text or, with tool calls,
    after the first one behind it. A message without text ends after the first end-of-turn token
    that no earlier message has. Otherwise the end of the text is the end of the message.

    :param edges: as far as they are known; ``None``: the template dropped that text.
    """

    def __init__(
        self,
        guarded: str,
        messages: Sequence[Message],
        edges: Mapping[Edge | CallEdge, int | None],
    ) -> None:
        self._messages = messages
        self._parts: list[dict[int, int]] = [{} for _ in messages]
        self._anchors: list[int | None] = [None] * len(messages)
        """Where the search for a message's end starts: the end of its text, or of its calls."""
        self._dropped: set[int] = set()
        for edge, place in edges.items():
            last = isinstance(edge, CallEdge) or (
                edge.part == len(messages[edge.message].content) - 1
            )
            if place is None:
                if last and isinstance(edge, Edge):
                    self._dropped.add(edge.message)
                continue
            if isinstance(edge, Edge):
                if guarded.startswith(edge.space, place):
                    place += len(edge.space)
                self._parts[edge.message][edge.part] = place
            if last:
                self._anchors[edge.message] = place
        later = sys.maxsize
        self._limits: list[int] = []
        """Where the text of the messages after each one begins to end."""
        for anchor in reversed(self._anchors):
            self._limits.insert(0, later)
            later = later if anchor is None else min(later, anchor)

    def boundaries(self, layout: Layout, end_of_turn: frozenset[int]) -> tuple[Boundaries, ...]:
        """One for each message, never decreasing."""
        return tuple(self._walk(layout, end_of_turn))

    def _walk(self, layout: Layout, end_of_turn: frozenset[int]) -> Iterator[Boundaries]:
        reached = 0
        for number, message in enumerate(self._messages):
            parts: list[int | None] = []
            for index in range(len(message.content)):
                place = self._parts[number].get(index)
                reached = max(reached, place or 0)
                parts.append(None if place is None else layout.token_at(reached))
            end = self._end(number, reached, layout.control, end_of_turn)
            reached = max(reached, end or 0)
            yield Boundaries(None if end is None else layout.token_at(reached), tuple(parts))

    def _end(
        self,
        number: int,
        reached: int,
        control: Sequence[tuple[int, int, int]],
        end_of_turn: frozenset[int],
    ) -> int | None:
        if number in self._dropped:
            return None
        anchor = self._anchors[number]
        direct = anchor is not None and "tool_calls" not in self._messages[number].fields
        start = max(reached, anchor or 0)
        for index in range(bisect_left(control, (start, 0, 0)), len(control)):
            _, stop, token = control[index]
            if stop > self._limits[number]:
                break
            if token in end_of_turn:
                return stop
            if direct:
                break
        return reached if self._parts[number] and anchor is not None else None
