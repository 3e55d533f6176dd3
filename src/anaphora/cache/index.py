"""The index of blocks: a trie that finds the longest cached prefix of a prompt, token by token."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
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
        self.children: dict[bytes, Siblings] = {}
        """By segment id."""
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


class Siblings:
    """Blocks that follow the same block in the same segment, however many start alike.

    Kept in the order of their tokens' bytes, where those that agree longest with a prompt are next
    to the place the prompt itself would have.
    """

    __slots__ = ("_by_tokens", "_sizes", "_sorted")

    def __init__(self) -> None:
        self._by_tokens: dict[bytes, Block] = {}
        self._sizes: Counter[int] = Counter()
        """How many have how many bytes of tokens."""
        self._sorted: list[bytes] = []

    def __iter__(self) -> Iterator[Block]:
        return iter(self._by_tokens.values())

    def __bool__(self) -> bool:
        return bool(self._by_tokens)

    def add(self, block: Block) -> None:
        self._by_tokens[block.raw] = block
        self._sizes[len(block.raw)] += 1
        insort(self._sorted, block.raw)

    def remove(self, block: Block) -> None:
        del self._by_tokens[block.raw]
        self._sizes[len(block.raw)] -= 1
        if not self._sizes[len(block.raw)]:
            del self._sizes[len(block.raw)]
        del self._sorted[bisect_left(self._sorted, block.raw)]

    @property
    def longest(self) -> int:
        """Tokens of the longest one."""
        return max(self._sizes) // 4

    def beginning(self, raw: bytes) -> list[Block]:
        """Blocks that ``raw`` begins with."""
        found = (self._by_tokens.get(raw[:size]) for size in self._sizes if size <= len(raw))
        return [block for block in found if block is not None]

    def starting_with(self, raw: bytes) -> list[Block]:
        """Blocks that begin with ``raw``."""
        found = []
        for place in range(bisect_left(self._sorted, raw), len(self._sorted)):
            if not self._sorted[place].startswith(raw):
                break
            found.append(self._by_tokens[self._sorted[place]])
        return found

    def nearest(self, raw: bytes) -> Iterator[tuple[Block, int]]:
        """Blocks and how many leading tokens agree (> 0), those that agree longest first."""
        after = bisect_left(self._sorted, raw)
        before = after - 1
        agree_before, agree_after = self._agreeing(before, raw), self._agreeing(after, raw)
        while agree_before or agree_after:
            if agree_before >= agree_after:
                yield self._by_tokens[self._sorted[before]], agree_before
                before -= 1
                agree_before = self._agreeing(before, raw)
            else:
                yield self._by_tokens[self._sorted[after]], agree_after
                after += 1
                agree_after = self._agreeing(after, raw)

    def _agreeing(self, place: int, raw: bytes) -> int:
        if not 0 <= place < len(self._sorted):
            return 0
        tokens, other = np.frombuffer(raw, "<i4"), np.frombuffer(self._sorted[place], "<i4")
        return common_prefix(tokens, other)


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
        siblings = block.parent.children[block.id.segment]
        siblings.remove(block)
        if not siblings:
            del block.parent.children[block.id.segment]

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

    def shorter(self, block_id: BlockId) -> list[Block]:
        """Blocks beside ``block_id`` that it begins with."""
        siblings = self._siblings(block_id)
        found = siblings.beginning(block_id.tokens.tobytes()) if siblings else []
        return [block for block in found if block.key != block_id.key]

    def longer(self, block_id: BlockId) -> list[Block]:
        """Blocks beside ``block_id`` that begin with it."""
        siblings = self._siblings(block_id)
        found = siblings.starting_with(block_id.tokens.tobytes()) if siblings else []
        return [block for block in found if block.key != block_id.key]

    def longest(
        self, tokens: Tokens, segments: tuple[Segment, ...], worth: Callable[[Block, int], int]
    ) -> tuple[int, Block] | None:
        """The longest prefix of a prompt: its length (tokens) and the block it ends in.

        ``worth`` is asked how many of the leading tokens of a block that agree with the prompt do
        count; behind the block it goes on only where all of its tokens do.
        """
        raw = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        ids = [segment_id(segment) for segment in segments]
        ends = [len(tokens) if segment.end is None else segment.end for segment in segments]
        longest, last = 0, self.root
        to_visit = [self.root]
        while to_visit:
            block = to_visit.pop()
            position = block.end
            which = bisect_right(ends, position)
            siblings = block.children.get(ids[which]) if which < len(ends) else None
            if siblings is None:
                continue
            rest = raw[4 * position : 4 * min(ends[which], position + siblings.longest)]
            for child in siblings.beginning(rest):
                counting = worth(child, len(child))
                if counting == len(child):
                    to_visit.append(child)
                if position + counting > longest:
                    longest, last = position + counting, child
            for child, agreeing in siblings.nearest(rest):
                if position + agreeing <= longest:
                    break
                counting = worth(child, agreeing)
                if position + counting > longest:
                    longest, last = position + counting, child
        return (longest, last) if longest else None

    def _siblings(self, block_id: BlockId) -> Siblings | None:
        parent = self._blocks.get(block_id.parent)
        return parent.children.get(block_id.segment) if parent is not None else None

    def _attach(self, block: Block, parent: Block) -> None:
        block.parent = parent
        parent.children.setdefault(block.id.segment, Siblings()).add(block)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens of ``a`` and ``b`` are equal."""
    size = min(len(a), len(b))
    if size == 0:
        return 0
    differs = a[:size] != b[:size]
    first = int(differs.argmax())
    return first if differs[first] else size
