"""What the cache tests share: prompts, payloads that tell whose they are, and whole passes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from anaphora.cache.disk import DiskTier
from anaphora.cache.keys import DEFAULT_SEGMENTS, BlockId, Segment, Tokens, root_key
from anaphora.cache.memory import GRANULE
from anaphora.cache.store import PrefixCache
from anaphora.clock import Clock, ManualClock

IDENTITY = {"model": "toy", "kv": "f32"}
ROOT = root_key(IDENTITY)
BLOCK_SIZE = 16
PAYLOAD = 5000
"""Bytes of one part: one granule of memory, and no multiple of a page on disk."""
LARGE = 1 << 30


def prompt(*pieces: int, length: int = BLOCK_SIZE) -> Tokens:
    """Tokens in stretches of ``length``; the same number makes the same stretch."""
    stretches = [np.random.default_rng(piece).integers(0, 50_000, length) for piece in pieces]
    return np.concatenate(stretches).astype(np.int32) if stretches else np.empty(0, np.int32)


def payload(key: bytes, part: str, size: int = PAYLOAD) -> bytes:
    return hashlib.shake_128(key + part.encode()).digest(size)


def open_cache(
    folder: Path | None = None,
    *,
    memory: int = 64,
    disk: int = LARGE,
    clock: Clock | None = None,
    root: bytes = ROOT,
    block_size: int = BLOCK_SIZE,
) -> PrefixCache:
    """A cache with room for ``memory`` parts in memory and ``disk`` bytes in ``folder``."""
    clock = clock or ManualClock()
    tier = None
    if folder is not None:
        tier = DiskTier.open(folder, root, IDENTITY, disk, clock, model="toy")
    return PrefixCache(
        root, memory_budget=memory * GRANULE, disk=tier, block_size=block_size, clock=clock
    )


def store(
    cache: PrefixCache,
    block: BlockId,
    parts: tuple[str, ...] = ("base",),
    decoded_from: int | None = None,
    exact: bool = False,
) -> bool:
    def fill(views: Mapping[str, memoryview]) -> bool:
        for part, view in views.items():
            view[:] = payload(block.key, part)
        return True

    sizes = dict.fromkeys(parts, PAYLOAD)
    return cache.store(block, sizes, fill, decoded_from=decoded_from, exact=exact)


def compute(
    cache: PrefixCache,
    tokens: Tokens,
    segments: tuple[Segment, ...] = DEFAULT_SEGMENTS,
    *,
    decoded_from: int | None = None,
    parts: tuple[str, ...] = ("base",),
) -> int:
    """What an engine does with a prompt, without reading: returns how many blocks were kept."""
    lease = cache.lease(segments)
    lease.advance(tokens, decoded_from)
    lease.promise()
    kept = sum([store(cache, block, parts, decoded_from) for block in lease.unsaved()])
    lease.close()
    return kept


def read(
    cache: PrefixCache, tokens: Tokens, segments: tuple[Segment, ...] = DEFAULT_SEGMENTS
) -> int:
    """Restore what is cached of a prompt; returns how many tokens, after checking every byte."""
    restored = 0
    for loaded in cache.restore(cache.match(tokens, segments).pieces):
        block = loaded.piece.block
        assert block.start == restored
        stretch = tokens[restored : restored + loaded.piece.length]
        assert np.array_equal(block.tokens[: loaded.piece.length], stretch)
        assert loaded.parts
        for part, view in loaded.parts.items():
            assert bytes(view) == payload(block.key, part), "wrong bytes"
        restored += loaded.piece.length
    return restored


def crash(cache: PrefixCache) -> None:
    """What the end of its process does to a cache that nobody closed."""
    assert cache._disk is not None
    cache._disk.close()


def block_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/blocks/*/*") if path.is_file())


def check_consistent(cache: PrefixCache) -> None:
    """Every count and cross reference, recounted from scratch."""
    memory, disk, index, entries = cache._memory, cache._disk, cache._index, cache.entries
    memory._collect_mapped(wait=True)
    assert memory.used + memory.free <= memory.budget
    free = sum(len(buffer) for buffers in memory._free.values() for buffer in buffers)
    assert memory.free == free
    assert memory.used == sum(buffer.capacity for buffer in memory.held)
    for buffer in memory.held:
        assert buffer.block.memory[buffer.part] is buffer
        assert index.get(buffer.block.key) is buffer.block
        assert not buffer.pins
    assert len(memory.held) == sum(len(block.memory) for block in index)
    if disk is not None:
        assert disk.used <= disk.budget
        assert disk.used == sum(file.header.file_bytes for file in disk.held)
        assert len(disk.held) == sum(len(block.disk) for block in index)
        for file in disk.held:
            assert file.block.disk[file.part] is file
            assert index.get(file.block.key) is file.block
    for buffer in cache._tiers._unwritten:
        assert buffer in memory.held
    for block in index:
        assert block.resident or block.children, "a block that is nowhere and holds nothing"
        if block.has_bytes and block.parent is not None and block.parent.has_bytes:
            assert block.tick <= block.parent.tick
        for entry in block.entries.values():
            assert entries.find(entry.id) == (entry, block)
            assert block.start < entry.position <= block.end
            assert all(above.resident for above in block.chain()), "a promise over nothing"
        count = sum(block.promised.values())
        below = sum(
            sum(child.promised.values()) for beside in block.children.values() for child in beside
        )
        assert count == len(block.entries) + below
    assert len(entries) == sum(len(block.entries) for block in index)
