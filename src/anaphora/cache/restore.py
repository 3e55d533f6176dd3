"""Reading a chain back: ahead of the engine, in threads, each block checked before it is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Literal

from anaphora.cache.disk import File
from anaphora.cache.files import is_shortage
from anaphora.cache.format import DamagedError, Header
from anaphora.cache.index import Block
from anaphora.cache.memory import Buffer
from anaphora.cache.tiers import MissCause, Tiers

READ_AHEAD = 6
"""Blocks read before the one the engine is importing is done."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The first ``length`` tokens of a block."""

    block: Block
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A piece's bytes. The views are valid until the next piece is asked for."""

    piece: Piece
    tier: Literal["memory", "disk"]
    parts: Mapping[str, memoryview]


@dataclass(slots=True)
class Step:
    """A piece being loaded."""

    piece: Piece
    in_memory: list[Buffer] = field(default_factory=list)
    """Pinned."""
    reads: list[tuple[File, Buffer, Future[Header]]] = field(default_factory=list)


class Restore:
    """One pass over the pieces of a match."""

    def __init__(self, tiers: Tiers, threads: Executor, pieces: Sequence[Piece]) -> None:
        self._tiers = tiers
        self._threads = threads
        self._pieces = pieces
        self._keep = {piece.block for piece in pieces}
        self._given = 0
        """Bytes of memory that the pieces given so far take."""
        self._waiting: deque[Step] = deque()
        self._loading: deque[Step] = deque()

    def run(self) -> Generator[Loaded, None, None]:
        """Give the pieces in order, up to the first that cannot be had."""
        for piece in self._pieces:
            self._waiting.append(Step(piece))
            self._pin_memory(self._waiting[-1])
        try:
            while self._waiting or self._loading:
                self._read_ahead()
                while not self._loading and self._let_go_of_last():
                    self._read_ahead()
                if not self._loading:
                    self._read_ahead(insist=True)
                if not self._loading:
                    self._tiers.misses["no_room"] += 1
                    return
                step = self._loading.popleft()
                from_disk = bool(step.reads)
                try:
                    if not self._finish(step):
                        return
                    self._tiers.used_again(step.piece.block)
                    parts = {buffer.part: buffer.view for buffer in step.in_memory}
                    yield Loaded(step.piece, "disk" if from_disk else "memory", parts)
                finally:
                    self._done_with(step)
        finally:
            for step in self._loading:
                self._finish(step)
            for step in (*self._loading, *self._waiting):
                self._unpin(step)

    def _read_ahead(self, insist: bool = False) -> None:
        while self._waiting and len(self._loading) < READ_AHEAD:
            if not self._begin(self._waiting[0], insist and not self._loading):
                return
            self._loading.append(self._waiting.popleft())

    def _begin(self, step: Step, insist: bool) -> bool:
        """Start to read what is not in memory. False: no room at the moment."""
        block = step.piece.block
        self._pin_memory(step)
        missing = {part: file for part, file in block.disk.items() if part not in block.memory}
        if not missing:
            return True
        sizes = {part: file.header.payload_bytes for part, file in missing.items()}
        buffers = self._tiers.reserve(block, sizes, self._keep, insist=insist)
        if buffers is None:
            return False
        disk = self._tiers.disk
        assert disk is not None
        for part, buffer in buffers.items():
            file = missing[part]
            step.reads.append((file, buffer, self._threads.submit(disk.read, file, buffer)))
        return True

    def _let_go_of_last(self) -> bool:
        """Allow the last block held in memory to go; it is read from disk when it is its turn."""
        for step in list(self._waiting)[:0:-1]:
            if step.in_memory and self._tiers.write(step.piece.block):
                self._unpin(step)
                self._keep.discard(step.piece.block)
                return True
        return False

    def _finish(self, step: Step) -> bool:
        """Wait for the reads of a step. Returns whether all its bytes are in memory now."""
        tiers, block = self._tiers, step.piece.block
        complete = True
        for file, buffer, read in step.reads:
            miss = _outcome(read)
            current = block.disk.get(file.part) is file
            if miss is None and current and file.part not in block.memory:
                file.header = read.result()
                buffer.decoded_from, buffer.exact = file.decoded_from, file.exact
                tiers.loaded(buffer)
            else:  # also where the file went, or another restore was faster, since it was begun
                tiers.give_back({file.part: buffer})
            if miss == "no_room":
                tiers.misses[miss] += 1
            elif miss is not None and current:
                tiers.lose_file(file, miss)
                if miss == "gone":  # seldom alone
                    tiers.lose_missing(piece.block for piece in self._pieces)
            complete = complete and file.part in block.memory
        step.reads.clear()
        self._pin_memory(step)
        return complete and bool(step.in_memory)

    def _pin_memory(self, step: Step) -> None:
        for buffer in step.piece.block.memory.values():
            if buffer not in step.in_memory:
                self._tiers.memory.pin(buffer)
                step.in_memory.append(buffer)

    def _done_with(self, step: Step) -> None:
        """Of a chain larger than memory, the head stays; the rest goes through the other half."""
        self._given += sum(buffer.capacity for buffer in step.in_memory)
        if self._given > self._tiers.memory.budget // 2:
            self._keep.discard(step.piece.block)
        self._unpin(step)

    def _unpin(self, step: Step) -> None:
        for buffer in step.in_memory:
            self._tiers.memory.unpin(buffer)
        step.in_memory.clear()


def _outcome(read: Future[Header]) -> MissCause | None:
    try:
        read.result()
    except DamagedError:
        return "damaged"
    except OSError as error:
        return "no_room" if is_shortage(error) else "gone"
    return None
