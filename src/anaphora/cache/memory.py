"""The memory tier: a bounded pool of page-aligned buffers that hold parts of blocks."""

from __future__ import annotations

import contextlib
import mmap
from collections import defaultdict, deque
from collections.abc import Iterable
from concurrent.futures import Executor, Future

from anaphora.cache.index import Block
from anaphora.cache.recency import Recency

GRANULE = 64 * 1024
"""Buffer sizes are multiples of this (bytes), so that a freed buffer fits the next block."""

MAP_AHEAD = 256 * 1024 * 1024
"""At most this much memory (bytes) is mapped before it is needed."""


class Buffer:
    """Memory for one part of one block. The memory is used again once the buffer is given back."""

    __slots__ = ("block", "capacity", "decoded_from", "exact", "memory", "part", "pins", "size")

    def __init__(
        self, memory: mmap.mmap, capacity: int, size: int, block: Block, part: str
    ) -> None:
        self.memory = memory
        self.capacity = capacity
        self.size = size
        self.block = block
        self.part = part
        self.decoded_from: int | None = None
        self.exact = False
        self.pins = 0
        """Above 0, somebody looks at the bytes and they stay."""

    @property
    def view(self) -> memoryview:
        """The part's own bytes."""
        return memoryview(self.memory)[: self.size]


class MemoryTier:
    """Buffers in use and free, never more than ``budget`` bytes together.

    Fresh memory costs far more to fill than memory already mapped, so that buffers are kept and
    handed out again.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        """Bytes of buffers handed out, rounded up to granules."""
        self.free = 0
        """Bytes of buffers waiting to be used again."""
        self.held: Recency[Buffer] = Recency(lambda block: bool(block.memory))
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self._coming: deque[Future[mmap.mmap]] = deque()
        """Buffers being mapped; they count as free."""
        self._pinned: set[Buffer] = set()

    def take(self, size: int, block: Block, part: str) -> Buffer | None:
        """A buffer of ``size`` bytes to fill, or ``None`` where something must go first."""
        capacity = rounded(size)
        self._collect_mapped(wait=not self._free[capacity])
        if self._free[capacity]:
            self.free -= capacity
            memory = self._free[capacity].pop()
        else:
            self._unmap_down_to(self.budget - capacity)
            if self.used + self.free + capacity > self.budget:
                return None
            memory = mmap.mmap(-1, capacity)
        self.used += capacity
        return Buffer(memory, capacity, size, block, part)

    def map_ahead(self, sizes: Iterable[int], threads: Executor) -> None:
        """Map buffers for parts of these sizes in the background, as far as the budget allows.

        The first fill of fresh memory is mostly page faults: as slow as reading a block from disk.
        """
        for capacity in map(rounded, sizes):
            if self.used + self.free + capacity > min(self.budget, MAP_AHEAD):
                return
            self.free += capacity
            self._coming.append(threads.submit(_mapped, capacity))

    def give_back(self, buffer: Buffer) -> None:
        self.used -= buffer.capacity
        self.free += buffer.capacity
        self._free[buffer.capacity].append(buffer.memory)

    def hold(self, buffer: Buffer) -> None:
        """The buffer is filled: its block has these bytes in memory."""
        buffer.block.memory[buffer.part] = buffer
        self.held.add(buffer)

    def drop(self, buffer: Buffer) -> None:
        """Its block no longer has these bytes in memory. Its memory is free once unpinned."""
        del buffer.block.memory[buffer.part]
        self.held.remove(buffer)
        if not buffer.pins:
            self.give_back(buffer)

    def pin(self, buffer: Buffer) -> None:
        buffer.pins += 1
        self._pinned.add(buffer)

    def unpin(self, buffer: Buffer) -> None:
        buffer.pins -= 1
        if not buffer.pins:
            self._pinned.discard(buffer)
            if buffer not in self.held:
                self.give_back(buffer)

    def could_take(self, sizes: list[int], keep: set[Block]) -> bool:
        """Whether buffers of these sizes fit once everything that isn't kept or pinned is gone."""
        kept = {buffer for block in keep for buffer in block.memory.values()} | self._pinned
        stays = sum(buffer.capacity for buffer in kept)
        return stays + sum(rounded(size) for size in sizes) <= self.budget

    def _collect_mapped(self, wait: bool) -> None:
        """Take over buffers mapped in the background."""
        while self._coming and (wait or self._coming[0].done()):
            memory = self._coming.popleft().result()
            self._free[len(memory)].append(memory)

    def _unmap_down_to(self, size: int) -> None:
        """Unmap free buffers until at most ``size`` bytes are mapped, or none are free."""
        for buffers in self._free.values():
            while buffers and self.used + self.free > size:
                memory = buffers.pop()
                self.free -= len(memory)
                with contextlib.suppress(BufferError):  # a view is left: it goes with that
                    memory.close()


def rounded(size: int) -> int:
    """Bytes a buffer of ``size`` bytes takes."""
    return max(1, -(-size // GRANULE)) * GRANULE


def _mapped(capacity: int) -> mmap.mmap:
    """Fresh memory whose pages are all there."""
    memory = mmap.mmap(-1, capacity)
    with open("/dev/zero", "rb", buffering=0) as zeros:
        zeros.readinto(memory)
    return memory
