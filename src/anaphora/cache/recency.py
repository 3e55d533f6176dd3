"""Which part of which block a tier gives up next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from anaphora.cache.index import Block


class Holding(Protocol):
    """One part of one block as a tier holds it."""

    block: Block


T = TypeVar("T", bound=Holding)


class Recency(Generic[T]):
    """What a tier holds, to be given up least recently used first and leaves before parents.

    What is under a promise of a lifetime goes after everything else, the longest-lived last. This
    holds for half of the tier at most: were it full of promises, nothing new could stay.

    The order is that of ``Block.tick``. A use sets ticks and nothing else: the order is worked out
    when something has to go, for many evictions at a time.
    """

    def __init__(self, holds: Callable[[Block], bool]) -> None:
        """``holds`` says whether the tier holds any part of a block."""
        self._holds = holds
        self._held: dict[T, None] = {}
        self._queue: list[tuple[float, int, T]] = []
        """Lifetime promised and tick when sorted, what is held; the next to go comes last."""

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

    def next_victim(
        self, keep: Callable[[T], bool], promised: Callable[[], Mapping[Block, float]]
    ) -> T | None:
        """The next to go that ``keep`` doesn't protect, or ``None``.

        ``promised`` gives the lifetimes (seconds) that blocks are promised for; it is asked only
        when the order is worked out. Among parts of one block, the one added last goes first.
        """
        for queue_is_new in (False, True):
            if queue_is_new:
                self._sort(promised())
            while self._queue:
                lifetime, tick, item = self._queue.pop()
                if lifetime and not queue_is_new:
                    break  # what came since may have to go before it
                current = item in self._held and item.block.tick == tick
                if current and not keep(item) and self._is_leaf(item.block):
                    return item
        return None

    def _sort(self, promised: Mapping[Block, float]) -> None:
        def last_to_go(entry: tuple[float, int, T]) -> tuple[float, int, int]:
            lifetime, tick, item = entry
            return -lifetime, -tick, item.block.start

        every = [(promised.get(item.block, 0.0), item.block.tick, item) for item in self._held]
        kept = sorted((entry for entry in every if entry[0]), key=last_to_go)
        kept = kept[: len(every) // 2]
        protected = {item for _, _, item in kept}
        others = [(0.0, tick, item) for _, tick, item in every if item not in protected]
        self._queue = kept + sorted(others, key=last_to_go)

    def _is_leaf(self, block: Block) -> bool:
        return not any(self._holds(child) for below in block.children.values() for child in below)
