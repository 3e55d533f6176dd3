"""The prefix cache: what an engine asks for the KV of a prompt, and where it leaves new KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from anaphora.cache.disk import DiskTier
from anaphora.cache.entries import LOCAL, EntryId, EntryTable
from anaphora.cache.index import Block, Index
from anaphora.cache.keys import DEFAULT_SEGMENTS, BlockId, Segment, Tokens, chain, prefixes
from anaphora.cache.lease import Lease
from anaphora.cache.memory import MemoryTier
from anaphora.cache.restore import Loaded, Piece, Restore
from anaphora.cache.tiers import Tiers
from anaphora.clock import Clock, SystemClock
from anaphora.profiles import DEFAULT_PROFILE, Profile
from anaphora.profiles.decision import Decision, Place, Unread, View
from anaphora.profiles.outline import NO_OUTLINE, Outline

__all__ = ["CacheStats", "Lease", "Loaded", "Match", "Misses", "Piece", "PrefixCache"]

READ_THREADS = 4
"""They mostly wait for the disk, which is fastest with a few requests at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The longest prefix of a prompt whose bytes are in memory or on disk."""

    pieces: tuple[Piece, ...] = ()
    """Contiguous from position 0; only the last may be shorter than its block."""

    @property
    def length(self) -> int:
        """Tokens."""
        return sum(piece.length for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Misses:
    """How often something was not found, by cause."""

    absent: int
    """Look-ups that found nothing."""
    damaged: int
    """Files that were not what was once written."""
    gone: int
    """Bytes that were no longer there when they were to be read."""
    no_room: int
    """There was no memory to read bytes into, or no descriptor to read them with."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Sizes in bytes; counts are since the cache was opened. Without a disk tier its are 0."""

    memory_budget: int
    memory_used: int
    """Buffers in use and free."""
    memory_parts: int
    disk_budget: int
    disk_used: int
    disk_parts: int
    blocks: int
    """Blocks with bytes anywhere."""
    entries: int
    lookups: int
    misses: Misses
    evicted_from_memory: int
    """Parts of blocks."""
    evicted_from_disk: int
    broken_promises: int
    stores_refused: int
    bytes_written: int
    bytes_read: int
    write_failures: int


class PrefixCache:
    """KV of prompt prefixes, under keys made of their tokens, in memory and on disk.

    The bytes mean nothing to it. Not thread safe: one thread uses it.
    """

    def __init__(
        self,
        root: bytes,
        *,
        memory_budget: int,
        disk: DiskTier | None = None,
        block_size: int = 256,
        clock: Clock | None = None,
    ) -> None:
        """``memory_budget`` in bytes; blocks that don't fit it one by one can't be cached."""
        self._clock = clock = clock or SystemClock()
        self._block_size = block_size
        self._disk = disk
        self._index = Index(root)
        self._memory = MemoryTier(memory_budget)
        self.entries = EntryTable(clock)
        self._tiers = Tiers(self._index, self.entries, self._memory, disk, block_size, clock)
        self._threads = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="cache-read")
        self._lookups = 0
        self._stores_refused = 0
        if disk is not None:
            self._tiers.recover()
            latest = sorted(disk.held, key=lambda file: -file.block.tick)
            sizes = [file.header.payload_bytes for file in latest]
            self._memory.map_ahead(sizes, self._threads)

    def match(
        self,
        tokens: Tokens,
        segments: tuple[Segment, ...] = DEFAULT_SEGMENTS,
        *,
        record: bool = True,
    ) -> Match:
        """The longest token-exact prefix of a prompt with bytes in memory or on disk.

        ``record``: whether this counts as a look-up and a use; an engine may ask more than once.
        """
        self._lookups += record
        found = self._index.longest(
            tokens, segments, lambda block, agreeing: agreeing if block.has_bytes else 0
        )
        if found is None:
            self._tiers.misses["absent"] += record
            return Match()
        end, last = found
        if record:
            self._tiers.touch(last)
        pieces = [Piece(block, min(block.end, end) - block.start) for block in last.chain()]
        return Match(tuple(reversed(pieces)))

    def read_tokens(
        self,
        tokens: Tokens,
        segments: tuple[Segment, ...] = DEFAULT_SEGMENTS,
        profile: str = LOCAL,
    ) -> int:
        """How much of a prompt (tokens) is promised: its longest common prefix with any living
        entry of its segments' owners. Under ``local`` that counts as read."""
        return self.entries.read_tokens(self._index, tokens, segments, profile)

    def begin(
        self,
        tokens: Tokens,
        segments: tuple[Segment, ...] = DEFAULT_SEGMENTS,
        profile: Profile = DEFAULT_PROFILE,
        outline: Outline = NO_OUTLINE,
        *,
        read: bool = True,
        write: bool = True,
    ) -> Decision:
        """A request begins: what counts as read and written, by the rules of ``profile``.

        Entries that it reads are refreshed. Those that it writes are left to
        :meth:`Lease.write`, once it begins to answer.
        """
        now = self._clock.now()
        places = {(boundary.position, boundary.match) for boundary in outline.within(len(tokens))}
        found = prefixes(
            self._index.root.key, tokens, segments, {position for position, _ in places}
        )
        ids: dict[Place, EntryId] = {
            (position, match): (found[position].owner, profile.name, found[position].key, match)
            for position, match in places
            if position in found
        }
        view = self._view(tokens, segments, profile.name, ids) if read else View()
        decision = profile.decide(outline, len(tokens), view, now)
        for place in decision.refreshed:
            self.entries.refresh(ids[place], now)
        if read:
            losses = self._losses(tokens, segments, profile.name, ids, decision.read)
            decision = replace(decision, unread={**decision.unread, **losses})
        return decision if write else replace(decision, written={}, writes=())

    def _view(
        self,
        tokens: Tokens,
        segments: tuple[Segment, ...],
        profile: str,
        ids: Mapping[Place, EntryId],
    ) -> View:
        reach = self.read_tokens(tokens, segments, profile)
        entries = {place: self.entries.find(entry_id) for place, entry_id in ids.items()}
        return View(reach, {p: found[0].expires_at for p, found in entries.items() if found})

    def _losses(
        self,
        tokens: Tokens,
        segments: tuple[Segment, ...],
        profile: str,
        ids: Mapping[Place, EntryId],
        read: int,
    ) -> Mapping[Unread, int]:
        """How far entries that are gone would have reached beyond ``read`` (tokens), and why they
        are."""
        found: dict[Unread, int] = {}
        if not self.entries.losses:
            return found
        for (position, _), entry_id in ids.items():
            why = self.entries.losses.get(entry_id)
            if why is not None and position > read:
                found[why] = max(found.get(why, 0), position)
        if profile == LOCAL:
            for block_id in chain(self._index.root.key, tokens, segments, self._block_size):
                if block_id.end <= read:
                    continue
                why = self.entries.losses.get((block_id.owner, LOCAL, block_id.key, ""))
                if why is None:
                    break
                found[why] = block_id.end
        return found

    def restore(self, pieces: Sequence[Piece]) -> Generator[Loaded, None, None]:
        """The bytes of pieces of a match, in order, read ahead and checked in threads.

        Ends early at the first block that is damaged or gone, which is then dropped and counted.
        """
        return Restore(self._tiers, self._threads, pieces).run()

    def lease(self, segments: tuple[Segment, ...] = DEFAULT_SEGMENTS) -> Lease:
        """For a live sequence that holds KV in the engine's own cells."""
        return Lease(self._tiers, segments, self._block_size)

    def store(
        self,
        block_id: BlockId,
        sizes: Mapping[str, int],
        fill: Callable[[Mapping[str, memoryview]], bool],
        *,
        decoded_from: int | None = None,
        exact: bool = False,
    ) -> bool:
        """Keep a block's bytes: ``fill`` writes its parts, of ``sizes`` bytes, where it is told.

        ``decoded_from`` is the first position whose KV came from a decode step. Bytes already
        stored are kept where they are as good, and replaced where they are not. False, with
        nothing kept: there is no room, nothing the block could follow, or ``fill`` gave up.
        """
        if decoded_from is not None and decoded_from >= block_id.end:
            decoded_from = None
        block = self._index.get(block_id.key)
        if (
            block is not None
            and sizes.keys() <= block.parts
            and block.at_least(block.end, decoded_from, exact)
        ):
            self._tiers.touch(block)
            return True
        before = self._usable_before(block_id)
        if before is None:
            self._stores_refused += 1
            return False
        if before:
            self._tiers.touch(before[0])
        block = self._index.ensure(block_id)
        buffers = self._tiers.reserve(block, sizes, {block, *before})
        if buffers is None:
            self._index.prune(block)
            self._stores_refused += 1
            return False
        filled = False
        try:
            filled = fill({part: buffer.view for part, buffer in buffers.items()})
        finally:
            if not filled:
                self._tiers.give_back(buffers)
                self._index.prune(block)
        if filled:
            for buffer in buffers.values():
                buffer.decoded_from, buffer.exact = decoded_from, exact
                self._tiers.hold(buffer)
            self._tiers.touch(block)
            self._tiers.supersede_tails(block)
        return filled

    def maintain(self, seconds: float) -> bool:
        """Write what waits for the disk, for about ``seconds``. True if more is waiting."""
        return self._tiers.write_some(time.perf_counter() + seconds)

    @property
    def unwritten(self) -> int:
        """Bytes in memory that wait to be written to disk; 0 without a disk tier."""
        return self._tiers.unwritten

    def flush(self) -> None:
        """Write everything that waits for the disk."""
        self._tiers.write_some(float("inf"))

    def close(self) -> None:
        """Write everything and let go of the disk."""
        self._threads.shutdown()
        if self._disk is not None:
            try:
                self.flush()
            finally:  # whatever happened: the next process must get the namespace
                self._disk.close()

    def clear(self) -> None:
        """Forget all bytes and entries, on disk too."""
        self._tiers.clear()

    def stats(self) -> CacheStats:
        disk, misses = self._disk, self._tiers.misses
        return CacheStats(
            memory_budget=self._memory.budget,
            memory_used=self._memory.used + self._memory.free,
            memory_parts=len(self._memory.held),
            disk_budget=disk.budget if disk else 0,
            disk_used=disk.used if disk else 0,
            disk_parts=len(disk.held) if disk else 0,
            blocks=sum(block.has_bytes for block in self._index),
            entries=len(self.entries),
            lookups=self._lookups,
            misses=Misses(misses["absent"], misses["damaged"], misses["gone"], misses["no_room"]),
            evicted_from_memory=self._tiers.evicted_from_memory,
            evicted_from_disk=self._tiers.evicted_from_disk,
            broken_promises=self.entries.broken,
            stores_refused=self._stores_refused,
            bytes_written=disk.bytes_written if disk else 0,
            bytes_read=disk.bytes_read if disk else 0,
            write_failures=disk.write_failures if disk else 0,
        )

    def _usable_before(self, block_id: BlockId) -> list[Block] | None:
        """The blocks before one, last first; ``None`` where one of them is nowhere."""
        parent = self._index.get(block_id.parent)
        if parent is None:
            return None
        before = list(parent.chain())
        reached = self._index.reaches(parent) and all(block.resident for block in before)
        return before if reached else None
