"""The sequences in the context: what their cells hold, and how it leaves them and comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anaphora.cache.index import common_prefix
from anaphora.cache.keys import BlockId, Segment, Tokens
from anaphora.cache.store import Lease, Piece, PrefixCache
from anaphora.engine.llamacpp.cells import CellLedger
from anaphora.engine.llamacpp.context import GRID, LlamaContext

logger = logging.getLogger(__name__)

_GROWTH = 256


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence with KV in cells, whether or not a request uses it now."""

    number: int
    segments: tuple[Segment, ...]
    lease: Lease
    kept: bool
    """Whether others may reuse it, and it may stay when its request is done."""
    tokens: Tokens
    """A buffer; the first ``length`` of it are in cells."""
    length: int = 0
    decoded_from: int | None = None
    """First position whose KV came from a decode step."""
    used: int = 0
    busy: bool = True

    @property
    def held(self) -> Tokens:
        return self.tokens[: self.length]

    def declare(self) -> None:
        """Tell the cache what the cells hold."""
        self.lease.advance(self.held, self.decoded_from)


class LiveSequences:
    """All sequences of one context, and the books of its cells."""

    def __init__(
        self, context: LlamaContext, cache: PrefixCache, count: int, *, exact: bool
    ) -> None:
        self.cells = CellLedger(context.cells)
        self._context = context
        self._cache = cache
        self._exact = exact
        self.grid = GRID if exact else 1
        """Hits end on multiples of this."""
        self._free = list(range(count - 1, -1, -1))
        self._lives: dict[int, LiveSequence] = {}
        self._tick = 0

    @property
    def has_free(self) -> bool:
        """Whether another sequence can be opened."""
        return bool(self._free)

    def idle(self) -> list[LiveSequence]:
        """Those no request uses, least recently used first."""
        return sorted((x for x in self._lives.values() if not x.busy), key=lambda x: x.used)

    def best(
        self, tokens: Tokens, segments: tuple[Segment, ...], limit: int
    ) -> tuple[LiveSequence | None, int]:
        """The sequence that shares most with a prompt, and how much: at most ``limit`` tokens."""
        best, length = None, 0
        for live in self._lives.values():
            if not live.kept:
                continue
            agreed = min(common_segments(segments, live.segments), limit)
            common = min(common_prefix(tokens, live.held), agreed) // self.grid * self.grid
            # Of equals an idle one: it can be taken over instead of copied.
            if common > length or (common == length > 0 and best and best.busy and not live.busy):
                best, length = live, common
        return best, length

    def open(self, segments: tuple[Segment, ...], *, kept: bool) -> LiveSequence:
        """An empty sequence; the caller has checked :attr:`has_free`."""
        live = LiveSequence(
            self._free.pop(),
            segments,
            self._cache.lease(segments),
            kept,
            np.empty(0, dtype=np.int32),
        )
        self._lives[live.number] = live
        return live

    def share(self, source: LiveSequence, target: LiveSequence, length: int) -> None:
        """Let ``target``, which is empty, hold the first ``length`` tokens of ``source`` too."""
        self._context.copy(source.number, target.number, 0, length)
        self.cells.share(source.number, target.number, length)
        target.tokens, target.length = source.held[:length].copy(), length
        if source.decoded_from is not None and source.decoded_from < length:
            target.decoded_from = source.decoded_from

    def take_over(self, live: LiveSequence, segments: tuple[Segment, ...], *, kept: bool) -> None:
        """Use an idle sequence for a new prompt, whose segments agree as far as it reaches."""
        before = live.lease
        live.segments, live.kept, live.busy = segments, kept, True
        live.lease = self._cache.lease(segments)
        live.declare()
        live.lease.inherit(before)
        before.close()

    def restore(self, live: LiveSequence, pieces: Sequence[Piece], length: int) -> tuple[int, int]:
        """Bring blocks into cells up to ``length``; returns tokens from (memory, disk).

        Stops at the first block that turns out damaged or gone, or before it on the grid.
        """
        begun, from_memory = live.length, np.zeros(length, dtype=bool)
        for loaded in self._cache.restore(pieces):
            block = loaded.piece.block
            start = max(block.start, live.length)
            end = min(block.start + loaded.piece.length, length)
            if not self._context.restore(live.number, loaded.parts["base"], start, end, block.end):
                logger.warning("llama.cpp refused a cached block: it is computed again")
                self._context.truncate(live.number, live.length)
                break
            self.cells.append(live.number, end - start)
            live.length = end
            if block.decoded_from is not None and block.decoded_from < end:
                first = max(block.decoded_from, start)
                live.decoded_from = min(live.decoded_from or first, first)
            from_memory[start:end] = loaded.tier == "memory"
        if live.length % self.grid:
            self.cut(live, live.length // self.grid * self.grid)
        memory = int(np.count_nonzero(from_memory[begun : live.length]))
        return memory, live.length - begun - memory

    def reserve(self, live: LiveSequence, tokens: Tokens, length: int) -> None:
        """Let the buffer of ``live`` begin with ``tokens`` and have room for ``length``."""
        buffer = np.empty(max(length, len(tokens)) + _GROWTH, dtype=np.int32)
        buffer[: len(tokens)] = tokens
        live.tokens = buffer

    def append_decoded(self, live: LiveSequence, token: int) -> None:
        """A decode step has put ``token`` into a cell."""
        if live.length == len(live.tokens):
            live.tokens = np.concatenate([live.tokens, np.empty(_GROWTH, dtype=np.int32)])
        self.cells.append(live.number, 1)
        live.tokens[live.length] = token
        if live.decoded_from is None:
            live.decoded_from = live.length
        live.length += 1

    def retire(self, live: LiveSequence) -> None:
        """No request uses it any more: it may stay until its cells are wanted."""
        self._tick += 1
        live.used, live.busy = self._tick, False
        if not live.kept:
            self.drop(live)

    def cut(self, live: LiveSequence, length: int) -> None:
        """Keep the first ``length`` tokens."""
        self._context.truncate(live.number, length)
        self.cells.truncate(live.number, length)
        live.length = length
        if live.decoded_from is not None and live.decoded_from >= length:
            live.decoded_from = None
        live.declare()

    def drop(self, live: LiveSequence) -> None:
        self._context.truncate(live.number, 0)
        self.cells.truncate(live.number, 0)
        live.lease.close()
        live.length = 0  # whoever still means to export it finds nothing
        del self._lives[live.number]
        self._free.append(live.number)

    def save(self, live: LiveSequence) -> bool:
        """Export what is in no tier yet; False where not all of it found room."""
        if not live.kept:
            return False
        saved = [self.export(live, block) for block in live.lease.unsaved()]
        return all(saved)

    def unsaved(self) -> Iterator[tuple[LiveSequence, BlockId]]:
        """Blocks of idle sequences that are in no tier yet."""
        for live in self.idle():
            for block in live.lease.unsaved():
                yield live, block

    def export(self, live: LiveSequence, block: BlockId) -> bool:
        """Copy a block out of the cells into the cache."""
        if live.length < block.end:
            return False
        decoded_from = live.decoded_from
        if decoded_from is not None and decoded_from >= block.end:
            decoded_from = None
        on_grid = live.length >= -(-block.end // self.grid) * self.grid
        if not on_grid and any(block.end == segment.end for segment in live.segments):
            return False  # longer prompts share it, and need its last tokens computed on the grid

        def store(size: int, fill: Callable[[Any], bool]) -> bool:
            return self._cache.store(
                block,
                {"base": size},
                lambda parts: fill(parts["base"]),
                decoded_from=decoded_from,
                exact=self._exact and on_grid,
            )

        return self._context.export(live.number, block.start, block.end, store)


def common_segments(a: Sequence[Segment], b: Sequence[Segment]) -> int:
    """Up to which position two prompts' segments agree, so that their cells may be shared."""
    position = 0
    for left, right in zip(a, b, strict=False):
        if (left.owner, left.salt) != (right.owner, right.salt):
            return position
        if left.end != right.end:
            return min(end for end in (left.end, right.end) if end is not None)
        if left.end is None:
            break
        position = left.end
    return int(np.iinfo(np.int32).max)
