"""Which part of which block a tier gives up next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from anaphora.cache.index import Block


class Holding(Protocol):
    """One part of one block as a tier holds it."""

    block: Block


T = TypeVar("T", bound=Holding)


class Recency(Generic[T]):
    """What a tier holds, to be given up least recently used first and leaves before parents.

    The order is that of ``Block.tick``. A use sets ticks and nothing else: the order is worked out
    when something has to go, for many evictions at a time.
    """

    def __init__(self, holds: Callable[[Block], bool]) -> None:
        """``holds`` says whether the tier holds any part of a block."""
        self._holds = holds
        self._held: dict[T, None] = {}
        self._queue: list[tuple[int, T]] = []
        """Tick when sorted, what is held; the next to go comes last."""

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[T]:
        return iter(self._held)

    def __contains__(self, item: T) -> bool:
        return item in self._held

    def add(self, item: T) -> None:
        self._held[item] = None

    def remove(self, item: T) -> None:
        del self._held[item]

    def next_victim(self, keep: Callable[[T], bool]) -> T | None:
        """The least recently used one that ``keep`` doesn't protect, or ``None``.

        Among parts of one block, the one added last goes first.
        """
        for queue_is_new in (False, True):
            if queue_is_new:
                self._sort()
            while self._queue:
                tick, item = self._queue.pop()
                current = item in self._held and item.block.tick == tick
                if current and not keep(item) and self._is_leaf(item.block):
                    return item
        return None

    def _sort(self) -> None:
        self._queue = [(item.block.tick, item) for item in self._held]
        self._queue.sort(key=lambda entry: (-entry[0], entry[1].block.start))

    def _is_leaf(self, block: Block) -> bool:
        return not any(self._holds(child) for below in block.children.values() for child in below)
