"""Keys of cached blocks: a hash chain over exact token lists.

A block's key says everything its bytes depend on: the model and how it computes (the root key),
every token before it (the parent's key), its own tokens, and the salt of the segment it lies in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from anaphora.errors import SettingsError

Tokens = NDArray[np.int32]
"""Token ids, shape (n,)."""


_LONGEST_OWNER = 1024


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a prompt that belongs to one owner of cache content.

    Blocks are cut where a segment ends, and ``salt`` enters the key of every block inside it, so
    that owners never meet in the cache except in a segment they share.
    """

    owner: str = "local"
    salt: bytes = b""
    end: int | None = None
    """Position (tokens) where the segment ends; ``None``: with the prompt and its answer."""

    def __post_init__(self) -> None:
        try:
            long = len(self.owner.encode()) > _LONGEST_OWNER
        except (AttributeError, UnicodeError):
            long = True
        if long:
            raise SettingsError(
                f"the owner of a segment is {self.owner!r:.60}: use a text of at most "
                f"{_LONGEST_OWNER} bytes"
            )
        if not isinstance(self.salt, bytes):
            raise SettingsError(f"the salt of a segment is a {type(self.salt).__name__}: use bytes")
        if self.end is not None and not isinstance(self.end, int):
            raise SettingsError(f"a segment ends at {self.end!r}: use a position or None")


DEFAULT_SEGMENTS: tuple[Segment, ...] = (Segment(),)


@dataclass(frozen=True, slots=True, eq=False)
class BlockId:
    """What a block is: its place in the chain and the tokens it stands for."""

    key: bytes
    """32 bytes."""
    parent: bytes
    """Key of the block before it, or the root key."""
    owner: str
    segment: bytes
    """:func:`segment_id` of the segment it lies in."""
    start: int
    """Position of its first token."""
    tokens: Tokens

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)


def root_key(identity: Mapping[str, str]) -> bytes:
    """The key every chain starts from: 32 bytes over the exact list of names and values.

    Two mappings have the same root key exactly when they are equal, whatever their order.
    """
    fields = [text.encode() for name in sorted(identity) for text in (name, identity[name])]
    return _digest(b"anaphora root 1", *fields)


@lru_cache(maxsize=4096)
def segment_id(segment: Segment) -> bytes:
    """16 bytes that stand for a segment's owner and salt (not for where it ends)."""
    return _digest(b"anaphora segment 1", segment.owner.encode(), segment.salt)[:16]


def link(parent: bytes, segment: Segment, start: int, tokens: Tokens) -> BlockId:
    """The block of ``tokens`` at position ``start``, behind the block whose key is ``parent``."""
    own = np.array(tokens, dtype="<i4")  # a copy: the caller's array may change or be large
    own.flags.writeable = False
    segment_key = segment_id(segment)
    key = _digest(b"anaphora block 1", parent, segment_key, own.tobytes())
    return BlockId(key, parent, segment.owner, segment_key, start, own)


def cuts(
    length: int, segments: tuple[Segment, ...], block_size: int, start: int = 0
) -> Iterator[tuple[int, int, Segment]]:
    """Where blocks are cut between ``start`` (itself a cut) and ``length``: start, end, segment.

    Cuts lie at multiples of ``block_size`` from position 0 and where segments end.
    """
    for segment in segments:
        end = length if segment.end is None else min(segment.end, length)
        while start < end:
            cut = min(end, (start // block_size + 1) * block_size)
            yield start, cut, segment
            start = cut


def chain(
    root: bytes, tokens: Tokens, segments: tuple[Segment, ...], block_size: int
) -> list[BlockId]:
    """The blocks of a whole prompt. A last one that ends on no cut is a provisional tail."""
    blocks: list[BlockId] = []
    parent = root
    for start, end, segment in cuts(len(tokens), segments, block_size):
        blocks.append(link(parent, segment, start, tokens[start:end]))
        parent = blocks[-1].key
    return blocks


class Prefix(NamedTuple):
    """What a prefix of a prompt is: whose, and which."""

    owner: str
    """Of the segment it ends in."""
    key: bytes
    """32 bytes; unlike a block's key it does not depend on where blocks are cut."""


def prefixes(
    root: bytes, tokens: Tokens, segments: tuple[Segment, ...], positions: Iterable[int]
) -> dict[int, Prefix]:
    """The prefixes of a prompt that end at ``positions``, as far as these lie in it."""
    wanted = sorted({position for position in positions if 0 < position <= len(tokens)})
    if not wanted:
        return {}
    raw = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    found: dict[int, Prefix] = {}
    parent, start = root, 0
    for segment in segments:
        end = len(tokens) if segment.end is None else min(segment.end, len(tokens))
        if end <= start:
            continue
        hasher = blake3(b"anaphora prefix 1" + parent + segment_id(segment))
        for position in [p for p in wanted if start < p < end] + [end]:
            hasher.update(raw[4 * start : 4 * position])
            start = position
            found[position] = Prefix(segment.owner, hasher.digest())
        parent = found[end].key
    return {position: found[position] for position in wanted}


def _digest(*fields: bytes) -> bytes:
    """BLAKE3 over fields with their lengths, so that no two lists of fields collide."""
    return blake3(b"".join([len(field).to_bytes(8, "little") + field for field in fields])).digest()
