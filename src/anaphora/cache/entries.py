"""Entries: promises about prefixes. What counts as read from the cache is decided by them alone."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from anaphora.cache.index import Block, Index
from anaphora.cache.keys import Segment, Tokens
from anaphora.clock import Clock
from anaphora.profiles.decision import Loss

LOCAL = "local"
"""The profile under which everything computed is promised, without being asked for."""

Party = tuple[str, str, bool]
"""Owner and profile of entries, and whether they have a lifetime."""

EntryId = tuple[str, str, bytes, str]
"""Owner, profile, prefix key and match key of an entry."""

_MOST_LOSSES = 20_000
"""Ids of entries that are gone, about 5 MB of them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The promise to ``owner`` that the first ``position`` tokens of a chain are cached."""

    owner: str
    profile: str
    key: bytes
    """Key of the prefix: of an automatic entry, that of the block it ends in, cut there; else from
    :func:`anaphora.cache.keys.prefixes`."""
    position: int
    lifetime: float | None = None
    """Seconds; ``None``: until space is needed."""
    expires_at: float | None = None
    """Seconds since the Unix epoch."""
    written_by: str = "automatic"
    match: str = ""
    """What its profile matches on besides tokens."""

    @property
    def id(self) -> EntryId:
        return self.owner, self.profile, self.key, self.match

    @property
    def party(self) -> Party:
        return self.owner, self.profile, self.lifetime is not None

    @property
    def automatic(self) -> bool:
        """Whether nobody asked for it."""
        return self.profile == LOCAL and not self.match

    def outlives(self, other: Entry) -> bool:
        """Whether it ends no sooner than ``other``."""
        if self.expires_at is None or other.expires_at is None:
            return self.expires_at is None
        return self.expires_at >= other.expires_at


class EntryTable:
    """All living entries, each tied to the block its position lies in.

    Promises are soft: where a block under an entry is gone, a ``local`` entry is shortened to what
    is left and any other is ended; both count as broken.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._blocks: dict[EntryId, Block] = {}
        self._expiries: list[tuple[float, EntryId]] = []
        """A heap of times to look at an entry; it may have been refreshed since."""
        self._next_look: dict[EntryId, float] = {}
        self.broken = 0
        """Promises broken since the start."""
        self.changed: set[EntryId] = set()
        """Ids added, changed or removed since somebody last cleared this set."""
        self.losses: OrderedDict[EntryId, Loss] = OrderedDict()
        """Why entries are gone, the latest. Automatic ones end block by block: by the key of a full
        block stands whether one reached its end."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Entry]:
        return (block.entries[entry_id] for entry_id, block in self._blocks.items())

    def find(self, entry_id: EntryId) -> tuple[Entry, Block] | None:
        block = self._blocks.get(entry_id)
        return None if block is None else (block.entries[entry_id], block)

    def add(self, entry: Entry, block: Block) -> None:
        """Write an entry whose position lies in ``block``.

        One with the same id that ends no sooner stays instead. An entry with a lifetime and no
        expiry gets one. An automatic entry replaces those of the same owner that are prefixes of
        it and end no later, and is left out where a longer one covers it that ends no sooner.
        """
        if entry.lifetime is not None and entry.expires_at is None:
            entry = replace(entry, expires_at=self._clock.now() + entry.lifetime)
        if entry.automatic:
            if self._is_covered(entry, block):
                return
            self._drop_prefixes(entry, block)
        same = self.find(entry.id)
        if same is not None and same[0].outlives(entry):
            return
        self.discard(entry.id)
        self._put(entry, block)

    def refresh(self, entry_id: EntryId, start: float) -> None:
        """An entry was read by a request that began at ``start``: it lives on from then."""
        found = self.find(entry_id)
        if found is None or found[0].lifetime is None:
            return
        entry, block = found
        refreshed = replace(entry, expires_at=start + found[0].lifetime)
        if not entry.outlives(refreshed):
            block.entries[entry_id] = refreshed
            self.changed.add(entry_id)

    def discard(self, entry_id: EntryId) -> None:
        block = self._blocks.pop(entry_id, None)
        if block is None:
            return
        self.changed.add(entry_id)
        party = block.entries.pop(entry_id).party
        for above in block.chain():
            above.promised[party] -= 1
            if not above.promised[party]:
                del above.promised[party]

    def over(self, block: Block) -> list[Entry]:
        """Entries that need ``block``: those in it and behind it."""
        found: list[Entry] = []
        to_visit = [block]
        while to_visit:
            current = to_visit.pop()
            found += current.entries.values()
            for children in current.children.values():
                to_visit += [child for child in children if child.promised]
        return found

    def expire(self) -> None:
        """End every entry whose time is over."""
        now = self._clock.now()
        while self._expiries and self._expiries[0][0] <= now:
            time, entry_id = heapq.heappop(self._expiries)
            if self._next_look.get(entry_id) != time:
                continue  # an earlier time was set since
            del self._next_look[entry_id]
            found = self.find(entry_id)
            if found is None or found[0].expires_at is None:
                continue
            if found[0].expires_at <= now:
                self.discard(entry_id)
                self._remember(*found, "expired")
            else:
                self._look_at(entry_id, found[0].expires_at)

    def lifetimes(self) -> dict[Block, float]:
        """Blocks under living entries that somebody asked for, with the longest of their lifetimes
        (seconds)."""
        self.expire()
        asked_for = [
            (entry.lifetime, self._blocks[entry.id])
            for entry in self
            if entry.lifetime is not None and not entry.automatic
        ]
        asked_for.sort(key=lambda found: -found[0])
        longest: dict[Block, float] = {}
        for lifetime, block in asked_for:
            for above in block.chain():
                if above in longest:
                    break  # and so is everything before it, for as long
                longest[above] = lifetime
        return longest

    def block_lost(self, block: Block, why: Loss = "evicted") -> None:
        """``block`` is gone everywhere: shorten or end every entry over it."""
        for entry in self.over(block):
            self.discard(entry.id)
            self.broken += 1
            self._remember(entry, block, why)
            left = block.parent
            if entry.profile == LOCAL and left is not None and left.parent is not None:
                self.add(replace(entry, key=left.key, position=left.end), left)

    def move(self, old: Block, new: Block) -> None:
        """Tie the entries in ``old`` to ``new``, a longer block that starts with all its tokens."""
        for entry in list(old.entries.values()):
            self.discard(entry.id)
            self.add(entry, new)

    def clear(self) -> None:
        for entry_id in list(self._blocks):
            self.discard(entry_id)
        self._expiries.clear()
        self._next_look.clear()
        self.losses.clear()

    def read_tokens(
        self, index: Index, tokens: Tokens, segments: tuple[Segment, ...], profile: str = LOCAL
    ) -> int:
        """The longest common prefix (tokens) of a prompt with any entry of its segments' owners."""
        self.expire()
        parties = {
            (segment.owner, profile, timed) for segment in segments for timed in (False, True)
        }
        found = index.longest(
            tokens, segments, lambda block, agreeing: min(agreeing, _reach(block, parties))
        )
        return found[0] if found else 0

    def _put(self, entry: Entry, block: Block) -> None:
        self.changed.add(entry.id)
        if self.losses:
            for lost in _ids(entry, block.chain()):
                self.losses.pop(lost, None)
        self._blocks[entry.id] = block
        block.entries[entry.id] = entry
        for above in block.chain():
            above.promised[entry.party] = above.promised.get(entry.party, 0) + 1
        if entry.expires_at is not None:
            self._look_at(entry.id, entry.expires_at)

    def _remember(self, entry: Entry, block: Block, why: Loss) -> None:
        """``entry`` has ended: all of it, or where it is lost, what of it is in ``block``."""
        for lost in _ids(entry, block.chain() if why == "expired" else (block,)):
            self.losses[lost] = why
            self.losses.move_to_end(lost)
        while len(self.losses) > _MOST_LOSSES:
            self.losses.popitem(last=False)

    def _look_at(self, entry_id: EntryId, time: float) -> None:
        if time < self._next_look.get(entry_id, float("inf")):
            self._next_look[entry_id] = time
            heapq.heappush(self._expiries, (time, entry_id))

    def _is_covered(self, entry: Entry, block: Block) -> bool:
        if _reach(block, {entry.party}) < entry.position - block.start:
            return False
        return entry.lifetime is None or any(
            other.party == entry.party
            and other.position >= entry.position
            and other.outlives(entry)
            for other in self.over(block)
        )

    def _drop_prefixes(self, entry: Entry, block: Block) -> None:
        for above in block.chain():
            for shorter in list(above.entries.values()):
                if (
                    shorter.automatic
                    and shorter.party == entry.party
                    and shorter.position <= entry.position
                    and entry.outlives(shorter)
                ):
                    self.discard(shorter.id)


def _ids(entry: Entry, blocks: Iterable[Block]) -> Iterator[EntryId]:
    """What the loss of an entry is remembered by; an automatic one's, block by block."""
    if not entry.automatic:
        yield entry.id
        return
    for block in blocks:
        if block.id.owner == entry.owner:
            yield entry.owner, entry.profile, block.key, entry.match


def _reach(block: Block, parties: set[Party]) -> int:
    """How far into ``block`` (tokens) the entries of ``parties`` go."""
    within = [entry for entry in block.entries.values() if entry.party in parties]
    if sum(block.promised.get(party, 0) for party in parties) > len(within):
        return len(block)
    return max((entry.position - block.start for entry in within), default=0)
