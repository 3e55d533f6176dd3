"""Leases: what the live sequences of an engine hold in its own cells."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from anaphora.cache import keys
from anaphora.cache.entries import LOCAL, Entry
from anaphora.cache.index import Block, common_prefix
from anaphora.cache.keys import BlockId, Segment, Tokens
from anaphora.cache.tiers import Tiers
from anaphora.profiles.decision import Decision


class Lease:
    """What one live sequence holds. Blocks under a lease are resident though no tier has them."""

    def __init__(self, tiers: Tiers, segments: tuple[Segment, ...], block_size: int) -> None:
        self._tiers = tiers
        self._segments = segments
        self._block_size = block_size
        self._tokens: Tokens = np.empty(0, dtype=np.int32)
        self._decoded_from: int | None = None
        self._chain: list[BlockId] = []
        """The whole blocks of what is held, that is without a tail that ends on no cut."""
        self._held: dict[bytes, Block] = {}
        """Blocks held in the index: those of the chain and tails that were promised."""

    def advance(self, tokens: Tokens, decoded_from: int | None = None) -> None:
        """The cells now hold exactly these tokens, more or fewer than before.

        ``decoded_from`` is the first position whose KV came from a decode step.
        """
        common = common_prefix(self._tokens, tokens)
        self._release_behind(common)
        self._tokens = np.array(tokens, dtype=np.int32)
        self._decoded_from = decoded_from
        start = self._chain[-1].end if self._chain else 0
        for begin, end, segment in self._cuts(start):
            if end % self._block_size == 0 or end == segment.end:
                self._chain.append(self._link(begin, end, segment))
                self._hold(self._chain[-1])

    def inherit(self, before: Lease) -> None:
        """Hold what ``before``, soon to be closed, holds of the same tokens under a promise."""
        common = common_prefix(self._tokens, before._tokens)
        for block in before._held.values():
            known = self._tiers.index.get(block.key) is block
            if known and block.promised and block.end <= common and block.key not in self._held:
                self._held[block.key] = block
                block.live += 1

    def promise(self, lifetime: float | None = None) -> None:
        """Write automatic entries for everything held, one for each owner of a part of it.

        They last for ``lifetime`` seconds, or until space is needed.
        """
        ends = {block_id.end: block_id for block_id in self._chain}
        tail = self._tail()
        if tail is not None:
            ends[tail.end] = tail
        position = 0
        for segment in self._segments:
            end = len(self._tokens)
            if segment.end is not None:
                end = min(end, segment.end)
            if end <= position:
                continue
            position = end
            block_id = ends[end]
            entry = Entry(segment.owner, LOCAL, block_id.key, end, lifetime)
            self._tiers.entries.add(entry, self._block(block_id))

    def write(self, profile: str, decision: Decision) -> None:
        """Write the entries that ``profile`` has decided on, as far as their prefixes are held."""
        found = keys.prefixes(
            self._tiers.index.root.key,
            self._tokens,
            self._segments,
            [write.position for write in decision.writes],
        )
        tail = self._tail()
        ends = [block_id.end for block_id in self._chain]
        for write in decision.writes:
            if write.position not in found:
                continue
            which = bisect_left(ends, write.position)
            block_id = self._chain[which] if which < len(ends) else tail
            assert block_id is not None
            owner, key = found[write.position]
            entry = Entry(
                owner,
                profile,
                key,
                write.position,
                write.lifetime,
                decision.started + write.lifetime,
                "breakpoint",
                write.match,
            )
            self._tiers.entries.add(entry, self._block(block_id))

    def unsaved(self) -> list[BlockId]:
        """Blocks of what is held, with the tail, of which no tier has bytes as good; in order."""
        index = self._tiers.index
        unsaved = [
            block_id
            for block_id in self._chain
            if not self._saves(index.get(block_id.key), block_id)
        ]
        tail = self._tail()
        if tail is not None and self._covering(tail) is None:
            unsaved.append(tail)
        return unsaved

    def close(self) -> None:
        """The cells are gone."""
        self._release_behind(0)
        self._tokens = self._tokens[:0]

    def _tail(self) -> BlockId | None:
        start = self._chain[-1].end if self._chain else 0
        return next((self._link(*cut) for cut in self._cuts(start)), None)

    def _cuts(self, start: int) -> list[tuple[int, int, Segment]]:
        return list(keys.cuts(len(self._tokens), self._segments, self._block_size, start))

    def _link(self, start: int, end: int, segment: Segment) -> BlockId:
        parent = self._chain[-1].key if self._chain else self._tiers.index.root.key
        return keys.link(parent, segment, start, self._tokens[start:end])

    def _covering(self, tail: BlockId) -> Block | None:
        """A stored block that has the tail's bytes, as good as the cells': itself or longer."""
        same = self._tiers.index.get(tail.key)
        stored = [same] if same is not None else []
        stored += self._tiers.index.longer(tail)
        return next((block for block in stored if self._saves(block, tail)), None)

    def _saves(self, block: Block | None, block_id: BlockId) -> bool:
        return (
            block is not None
            and block.has_bytes
            and block.at_least(block_id.end, self._decoded_from, exact=False)
        )

    def _block(self, block_id: BlockId) -> Block:
        """The block that an entry in ``block_id``, of the chain or the tail, hangs on."""
        in_chain = bool(self._chain) and block_id.end <= self._chain[-1].end
        return (None if in_chain else self._covering(block_id)) or self._hold(block_id)

    def _hold(self, block_id: BlockId) -> Block:
        """The block in the index, held; again if it was superseded since."""
        index = self._tiers.index
        if index.get(block_id.parent) is None:
            self._hold(next(above for above in self._chain if above.key == block_id.parent))
        held = self._held.get(block_id.key)
        if held is None or index.get(block_id.key) is not held:
            held = self._held[block_id.key] = index.ensure(block_id)
            held.live += 1
        return held

    def _release_behind(self, position: int) -> None:
        """Let go of every block that ends behind ``position``."""
        while self._chain and self._chain[-1].end > position:
            self._chain.pop()
        gone = sorted(
            (block for block in self._held.values() if block.end > position),
            key=lambda block: block.start,
        )
        for block in gone:  # from the front: what hangs on a lost block is lost with it, once
            del self._held[block.key]
            block.live -= 1
            self._tiers.settle(block)
