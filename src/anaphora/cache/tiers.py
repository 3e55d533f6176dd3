"""Which bytes lie in which tier: making room, writing to disk, and what follows when bytes go."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from anaphora.cache.catalog import StoredEntry
from anaphora.cache.disk import DiskTier, File
from anaphora.cache.entries import LOCAL, Entry, EntryId, EntryTable
from anaphora.cache.index import Block, Index
from anaphora.cache.memory import Buffer, MemoryTier
from anaphora.clock import Clock
from anaphora.profiles.decision import Loss

MissCause = Literal["absent", "damaged", "gone", "no_room"]
"""Nothing of a prompt was cached; bytes were not what was written; they were no longer there;
or there was no memory to read them into, or no descriptor to read them with."""


class Tiers:
    """The policy over both tiers. The tiers themselves only know how."""

    def __init__(
        self,
        index: Index,
        entries: EntryTable,
        memory: MemoryTier,
        disk: DiskTier | None,
        block_size: int,
        clock: Clock,
    ) -> None:
        self.index = index
        self.entries = entries
        self.memory = memory
        self.disk = disk
        self.evicted_from_memory = 0
        self.evicted_from_disk = 0
        self.misses: Counter[MissCause] = Counter()
        self._block_size = block_size
        self._clock = clock
        self._tick = 0
        self._unwritten: dict[Buffer, None] = {}
        """In memory, not yet on disk, and wanted there; oldest first."""
        self._used_again: dict[Buffer, None] = {}
        """Those among them that were used a second time."""
        self._ahead_of_disk: set[EntryId] = set()
        """Entries of which the index on disk has less."""
        self._declined: set[Buffer] = set()
        """No use trying: the disk is full of blocks used more recently than these or what is
        before them."""

    # Use

    def touch(self, block: Block) -> None:
        """``block`` and everything before it is in use now."""
        self._tick += 1
        now = self._clock.now()
        for used in block.chain():
            used.tick = self._tick
            used.last_used = now
        if self.disk is not None:
            self.disk.touched.add(block)

    def used_again(self, block: Block) -> None:
        """A block's bytes proved useful: it is among the first to be written to disk."""
        for buffer in block.memory.values():
            if buffer in self._declined:
                self._declined.discard(buffer)
                self._unwritten[buffer] = None
            if buffer in self._unwritten:
                self._used_again[buffer] = None

    # Memory

    def reserve(
        self, block: Block, sizes: Mapping[str, int], keep: set[Block], *, insist: bool = True
    ) -> dict[str, Buffer] | None:
        """Buffers for parts of ``block``, by evicting what was used least recently.

        Nothing in ``keep`` is evicted, except, to ``insist``, what is on disk too while nothing
        else is left. ``None``: no room.
        """
        wanted = list(sizes.values())
        if not self.memory.could_take(wanted, keep):
            if not insist:
                return None
            keep = {kept for kept in keep if not self.write(kept)}
            if not self.memory.could_take(wanted, keep):
                return None
        buffers: dict[str, Buffer] = {}
        for part, size in sizes.items():
            while (buffer := self.memory.take(size, block, part)) is None:
                victim = self.memory.held.next_victim(
                    lambda held: held.pins > 0 or held.block in keep, self.entries.lifetimes
                )
                if victim is None:
                    self.give_back(buffers)
                    return None
                self._evict(victim)
            buffers[part] = buffer
        return buffers

    def give_back(self, buffers: Mapping[str, Buffer]) -> None:
        """Buffers that were reserved and not filled."""
        for buffer in buffers.values():
            self.memory.give_back(buffer)

    def hold(self, buffer: Buffer) -> None:
        """A reserved buffer is filled with new bytes, which replace the same part's older ones."""
        older = buffer.block.memory.get(buffer.part)
        if older is not None:
            self._forget(older)
        self.memory.hold(buffer)
        if self.disk is not None and not _is_written(buffer):
            self._unwritten[buffer] = None

    def loaded(self, buffer: Buffer) -> None:
        """A reserved buffer is filled with the bytes of its file."""
        assert self.disk is not None
        self.disk.bytes_read += buffer.block.disk[buffer.part].header.file_bytes
        self.memory.hold(buffer)

    def _evict(self, buffer: Buffer) -> None:
        if not _is_written(buffer):
            self.write(buffer.block)
        self._forget(buffer)
        self.evicted_from_memory += 1
        self.settle(buffer.block)

    def _forget(self, buffer: Buffer) -> None:
        self._unwritten.pop(buffer, None)
        self._used_again.pop(buffer, None)
        self._declined.discard(buffer)
        self.memory.drop(buffer)

    # Disk

    @property
    def unwritten(self) -> int:
        """Bytes in memory that wait to be written to disk."""
        return sum(buffer.size for buffer in self._unwritten)

    def write_some(self, deadline: float) -> bool:
        """Write what waits until ``deadline`` (``perf_counter`` seconds), then the index.

        Returns whether more is waiting that can be written now.
        """
        if self.disk is None:
            return False
        more = False
        for block in self._to_write():
            if more or not self.disk.ready:
                break
            self.write(block)
            more = time.perf_counter() >= deadline
        self._write_index(self.disk)
        return more

    def _to_write(self) -> Iterator[Block]:
        """Blocks that wait to be written: those used again, then whole blocks, then tails."""
        waiting = dict.fromkeys(buffer.block for buffer in self._unwritten)
        yield from dict.fromkeys(buffer.block for buffer in list(self._used_again))
        yield from (block for block in waiting if not self._is_tail(block))
        yield from (block for block in waiting if self._is_tail(block))

    def write(self, block: Block) -> bool:
        """Write a block to disk, after those before it: without them it would be unusable.

        Returns whether the block's memory may now go without anything being lost.
        """
        if self.disk is None:
            return False
        unwritten: list[Buffer] = []
        for above in block.chain():
            buffers = [buffer for buffer in above.memory.values() if not _is_written(buffer)]
            if not buffers and above is not block and above.disk:
                break  # on disk, and so is what is before it
            unwritten += buffers
            if not above.has_bytes:
                self._decline(block)
                return False
        for buffer in sorted(unwritten, key=lambda buffer: buffer.block.start):
            if not self._write(buffer):
                if self.disk.ready:
                    self._decline(block)
                return False
        return True

    def _write(self, buffer: Buffer) -> bool:
        disk, block = self.disk, buffer.block
        if disk is None or not disk.ready or buffer in self._declined:
            return False
        if not self._make_disk_room(block, disk.file_bytes(buffer)):
            self._decline(block)
            return False
        if not disk.put(buffer):
            return False
        self._unwritten.pop(buffer, None)
        self._used_again.pop(buffer, None)
        self.supersede_tails(block)
        return True

    def _decline(self, block: Block) -> None:
        """Don't try to write a block again before it is used again."""
        for buffer in block.memory.values():
            if not _is_written(buffer):
                self._unwritten.pop(buffer, None)
                self._used_again.pop(buffer, None)
                self._declined.add(buffer)

    def _make_disk_room(self, block: Block, size: int) -> bool:
        """Evict files until ``size`` more bytes fit: those used less recently than ``block``, or
        promised for less long."""
        disk = self.disk
        assert disk is not None
        before = set(block.chain())
        while disk.used + size > disk.budget:
            victim = disk.held.next_victim(
                lambda file: file.block in before, self.entries.lifetimes
            )
            if victim is None:
                return False
            if victim.block.tick > block.tick:
                promised = self.entries.lifetimes()
                if promised.get(victim.block, 0.0) >= promised.get(block, 0.0):
                    return False
            disk.drop(victim)
            self.evicted_from_disk += 1
            self._ahead_of_disk.update(entry.id for entry in self.entries.over(victim.block))
            self.settle(victim.block)
        return True

    # The index on disk

    def _write_index(self, disk: DiskTier) -> None:
        """Bring the index up to date with the files, and with the entries as far as they are."""
        self.entries.expire()
        changed = self.entries.changed | self._ahead_of_disk
        self.entries.changed.clear()
        self._ahead_of_disk.clear()
        rows: dict[EntryId, StoredEntry | None] = {}
        for entry_id in changed:
            found = self.entries.find(entry_id)
            rows[entry_id] = None if found is None else _on_disk(*found)
            if found is not None and rows[entry_id] != StoredEntry(found[0], found[1].key):
                self._ahead_of_disk.add(entry_id)
        disk.commit(rows)

    def recover(self) -> None:
        """Take over what an earlier process left on disk."""
        disk, index = self.disk, self.index
        assert disk is not None
        found = disk.recover()
        self.misses["damaged"] += found.damaged
        self.misses["gone"] += found.gone
        for files, in_index in ((found.listed, True), (found.unlisted, False)):
            for header, last_used in files:
                block = index.ensure(header.block)
                block.last_used = max(block.last_used, last_used)
                disk.hold(File(block, header), in_index)
        ghosts = [index.ensure(header.block) for header in found.missing]
        self._recover_order()
        for stored in found.entries:
            anchor = index.get(stored.block)
            if anchor is None or not index.reaches(anchor):
                self.entries.broken += 1
            elif anchor.start < stored.entry.position <= anchor.end:
                self.entries.add(stored.entry, anchor)
        for ghost in sorted(ghosts, key=lambda block: block.start):
            self.settle(ghost, "lost")
        if not found.complete:
            self._promise_what_is_there()
        while disk.used > disk.budget:
            victim = disk.held.next_victim(lambda file: False, self.entries.lifetimes)
            if victim is None:
                break
            disk.drop(victim)
            self.evicted_from_disk += 1
            self.settle(victim.block)

    def _recover_order(self) -> None:
        """Ticks from times of last use; a block was used whenever one behind it was."""
        blocks = sorted(self.index, key=lambda block: -block.start)
        for block in blocks:
            if block.parent is not None:
                block.parent.last_used = max(block.parent.last_used, block.last_used)
        blocks.sort(key=lambda block: block.last_used)
        for before, block in zip([None, *blocks], blocks, strict=False):
            self._tick += before is None or before.last_used < block.last_used
            block.tick = self._tick

    def _promise_what_is_there(self) -> None:
        """Make the automatic entries again from the last blocks of every owner."""
        for block in list(self.index):
            followers = (child for below in block.children.values() for child in below)
            last = not any(child.disk and child.id.owner == block.id.owner for child in followers)
            if last and self.index.reaches(block) and all(above.disk for above in block.chain()):
                self.entries.add(Entry(block.id.owner, LOCAL, block.key, block.end), block)

    # What follows

    def settle(self, block: Block, why: Loss = "evicted") -> None:
        """Bytes or a lease of ``block`` are gone: if they were the last, it is lost."""
        if block.resident or self.index.get(block.key) is not block:
            return
        self.entries.block_lost(block, why)
        self.index.prune(block)

    def lose_file(self, file: File, cause: MissCause) -> None:
        """A file cannot be used: it is not there any more, or not what was written."""
        assert self.disk is not None
        self.misses[cause] += 1
        self.disk.drop(file)
        buffer = file.block.memory.get(file.part)
        if buffer is not None:
            self._unwritten[buffer] = None
        self.settle(file.block, "lost")

    def lose_missing(self, blocks: Iterable[Block]) -> None:
        """Drop all files of ``blocks`` that are gone, so that these are stored again at once."""
        assert self.disk is not None
        for block in blocks:
            for file in list(block.disk.values()):
                if self.disk.is_missing(file):
                    self.lose_file(file, "gone")

    def supersede_tails(self, block: Block) -> None:
        """Delete provisional tails that ``block``, stored by now, begins with.

        One that is on disk stays there until ``block`` is.
        """
        for tail in self.index.shorter(block.id):
            buffers = list(tail.memory.values())
            if (
                tail.children
                or not tail.parts <= block.parts
                or (tail.has_bytes and not block.at_least(tail.end, tail.decoded_from, tail.exact))
                or any(buffer.pins for buffer in buffers)
            ):
                continue
            for buffer in buffers:
                self._forget(buffer)
            if tail.disk and not _is_on_disk(block):
                continue
            for file in list(tail.disk.values()):
                assert self.disk is not None
                self.disk.drop(file)
            self.entries.move(tail, block)
            self.index.remove(tail)

    def clear(self) -> None:
        """Forget all bytes, and every promise with them."""
        self.entries.clear()
        for block in list(self.index):
            for buffer in list(block.memory.values()):
                self._forget(buffer)
            for file in list(block.disk.values()):
                assert self.disk is not None
                self.disk.drop(file)
        for block in list(self.index):
            if self.index.get(block.key) is block:
                self.index.prune(block)
        if self.disk is not None:
            self._write_index(self.disk)

    def _is_tail(self, block: Block) -> bool:
        return block.end % self._block_size != 0 and not block.children


def _on_disk(entry: Entry, block: Block) -> StoredEntry | None:
    """What of an entry can be kept on disk: all, or where it is ``local``, the chain's beginning.

    An entry that outlives its blocks would promise what isn't there.
    """
    kept: Block | None = None
    for above in block.chain():
        if not above.disk:
            kept = None
        elif kept is None:
            kept = above
    if kept is block:
        return StoredEntry(entry, block.key)
    if kept is None or entry.profile != LOCAL:
        return None
    return StoredEntry(replace(entry, key=kept.key, position=kept.end), kept.key)


def _is_on_disk(block: Block) -> bool:
    """Whether the disk has everything that memory has of a block."""
    return bool(block.disk) and all(_is_written(buffer) for buffer in block.memory.values())


def _is_written(buffer: Buffer) -> bool:
    """Whether the disk has these very bytes, not only worse ones."""
    file = buffer.block.disk.get(buffer.part)
    return file is not None and (
        (file.decoded_from, file.exact) == (buffer.decoded_from, buffer.exact)
    )
