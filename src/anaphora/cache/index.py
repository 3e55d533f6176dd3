"""The index of blocks: a trie that finds the longest cached prefix of a prompt, token by token."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from anaphora.cache.keys import BlockId, Segment, Tokens, segment_id

if TYPE_CHECKING:
    from anaphora.cache.disk import File
    from anaphora.cache.entries import Entry, EntryId, Party
    from anaphora.cache.memory import Buffer


class Block:
    """A node of the index: one block, and where its bytes are.

    A block without bytes in any tier stays while a lease holds it ("live") or while blocks hang
    on it (a ghost): look-ups stop before it, and once its bytes return, what hangs on it is
    usable again.
    """

    __slots__ = (
        "children",
        "disk",
        "entries",
        "id",
        "last_used",
        "live",
        "memory",
        "parent",
        "promised",
        "raw",
        "tick",
    )

    def __init__(self, block_id: BlockId) -> None:
        self.id = block_id
        self.raw = block_id.tokens.tobytes()
        self.parent: Block | None = None
        """``None`` for the root and for orphans, whose parent block is unknown."""
        self.children: dict[tuple[bytes, int], list[Block]] = {}
        """By segment id and first token. Several may start alike: diverging blocks, tails."""
        self.memory: dict[str, Buffer] = {}
        """Parts whose bytes are in memory."""
        self.disk: dict[str, File] = {}
        """Parts whose bytes are on disk."""
        self.live = 0
        """How many leases hold it."""
        self.entries: dict[EntryId, Entry] = {}
        """Entries whose position lies in this block (after its start, up to its end)."""
        self.promised: dict[Party, int] = {}
        """How many entries lie in this block or behind it, by whose they are."""
        self.tick = 0
        """When it was last used, in the order of uses. Never before any of its children."""
        self.last_used = 0.0
        """The same in seconds since the Unix epoch."""

    def __len__(self) -> int:
        return len(self.id.tokens)

    def __repr__(self) -> str:
        parts = ",".join(sorted(self.parts)) or "no bytes"
        return f"Block({self.key.hex()[:8]} {self.start}..{self.end} {parts})"

    @property
    def key(self) -> bytes:
        return self.id.key

    @property
    def start(self) -> int:
        return self.id.start

    @property
    def end(self) -> int:
        return self.id.end

    @property
    def tokens(self) -> Tokens:
        return self.id.tokens

    @property
    def parts(self) -> frozenset[str]:
        """Names of the parts whose bytes are in memory or on disk."""
        return frozenset(self.memory) | frozenset(self.disk)

    @property
    def has_bytes(self) -> bool:
        return bool(self.memory or self.disk)

    @property
    def resident(self) -> bool:
        """Whether its KV is anywhere: in a tier, or live in an engine."""
        return bool(self.memory or self.disk or self.live)

    @property
    def decoded_from(self) -> int | None:
        """First position whose KV came from a decode step, over all parts; ``None``: none did."""
        parts = self._parts()
        return min(
            (part.decoded_from for part in parts if part.decoded_from is not None), default=None
        )

    @property
    def exact(self) -> bool:
        """Whether all parts were computed alone in the context and on the grid."""
        parts = self._parts()
        return bool(parts) and all(part.exact for part in parts)

    def at_least(self, end: int, decoded_from: int | None, exact: bool) -> bool:
        """Whether its bytes up to ``end`` are as good as ones decoded from ``decoded_from`` on."""
        own = self.prefilled_to(end)
        other = end if decoded_from is None else max(self.start, min(decoded_from, end))
        return own > other or (own == other and (self.exact or not exact))

    def _parts(self) -> list[Buffer | File]:
        only_on_disk = [file for part, file in self.disk.items() if part not in self.memory]
        return [*self.memory.values(), *only_on_disk]

    def prefilled_to(self, end: int) -> int:
        """Up to which position, at most ``end``, its KV came from a prefill."""
        decoded_from = self.decoded_from
        return end if decoded_from is None else max(self.start, min(decoded_from, end))

    def chain(self) -> Iterator[Block]:
        """This block and those before it, up to but without the root."""
        block: Block = self
        while block.parent is not None:
            yield block
            block = block.parent


class Index:
    """All blocks, from the root down."""

    def __init__(self, root: bytes) -> None:
        nobody = BlockId(root, b"", "", b"", 0, np.empty(0, dtype=np.int32))
        self.root = Block(nobody)
        self._blocks: dict[bytes, Block] = {root: self.root}
        self._orphans: defaultdict[bytes, list[Block]] = defaultdict(list)

    def __iter__(self) -> Iterator[Block]:
        return (block for block in self._blocks.values() if block is not self.root)

    def __len__(self) -> int:
        return len(self._blocks) - 1

    def get(self, key: bytes) -> Block | None:
        return self._blocks.get(key)

    def ensure(self, block_id: BlockId) -> Block:
        """The block, added if it is new. Without its parent it waits, unreachable, as an orphan."""
        block = self._blocks.get(block_id.key)
        if block is not None:
            return block
        block = self._blocks[block_id.key] = Block(block_id)
        parent = self._blocks.get(block_id.parent)
        if parent is None:
            self._orphans[block_id.parent].append(block)
        else:
            self._attach(block, parent)
        for orphan in self._orphans.pop(block_id.key, ()):
            self._attach(orphan, block)
        return block

    def remove(self, block: Block) -> None:
        """Take out a block that nothing hangs on."""
        del self._blocks[block.key]
        if block.parent is None:
            home, key = self._orphans, block.id.parent
            home[key].remove(block)
            if not home[key]:
                del home[key]
            return
        siblings = block.parent.children[_child_key(block)]
        siblings.remove(block)
        if not siblings:
            del block.parent.children[_child_key(block)]

    def reaches(self, block: Block) -> bool:
        """Whether the way from the root to ``block`` is known."""
        while block.parent is not None:
            block = block.parent
        return block is self.root

    def prune(self, block: Block) -> None:
        """Take out a block that is nowhere, and every ghost that then has nothing behind it."""
        while block is not self.root and not block.resident and not block.children:
            parent = block.parent
            self.remove(block)
            if parent is None:
                return
            block = parent

    def alike(self, block_id: BlockId) -> list[Block]:
        """Blocks beside ``block_id`` of which one starts with all tokens of the other."""
        parent = self._blocks.get(block_id.parent)
        if parent is None:
            return []
        raw = block_id.tokens.tobytes()
        beside = parent.children.get((block_id.segment, int(block_id.tokens[0])), ())
        return [
            other
            for other in beside
            if other.key != block_id.key
            and (other.raw.startswith(raw) or raw.startswith(other.raw))
        ]

    def walk(
        self, tokens: Tokens, segments: tuple[Segment, ...], enter: Callable[[Block], bool]
    ) -> Iterator[tuple[Block, int]]:
        """Every block on the way of a prompt, and how many of its leading tokens agree (> 0).

        Goes on behind blocks that agree wholly, and only through blocks that ``enter`` accepts.
        """
        tokens = np.ascontiguousarray(tokens, dtype="<i4")
        raw = tokens.tobytes()
        ids = [segment_id(segment) for segment in segments]
        ends = [len(tokens) if segment.end is None else segment.end for segment in segments]
        to_visit = [self.root]
        while to_visit:
            block = to_visit.pop()
            position = block.end
            which = bisect_right(ends, position)
            if position >= len(tokens) or which == len(ends):
                continue
            limit = min(ends[which], len(tokens)) - position
            for child in block.children.get((ids[which], int(tokens[position])), ()):
                if not enter(child):
                    continue
                size = len(child)
                if size <= limit and raw[4 * position : 4 * (position + size)] == child.raw:
                    yield child, size
                    to_visit.append(child)
                else:
                    size = min(size, limit)
                    yield child, common_prefix(tokens[position : position + size], child.tokens)

    def _attach(self, block: Block, parent: Block) -> None:
        block.parent = parent
        parent.children.setdefault(_child_key(block), []).append(block)


def _child_key(block: Block) -> tuple[bytes, int]:
    return block.id.segment, int(block.tokens[0])


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens of ``a`` and ``b`` are equal."""
    size = min(len(a), len(b))
    if size == 0:
        return 0
    differs = a[:size] != b[:size]
    first = int(differs.argmax())
    return first if differs[first] else size
