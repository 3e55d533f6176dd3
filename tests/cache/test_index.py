from __future__ import annotations

import mmap

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.cache.index import Block, Index, common_prefix
from anaphora.cache.keys import DEFAULT_SEGMENTS, Segment, Tokens, chain
from anaphora.cache.memory import Buffer
from tests.cache.naive import NaiveIndex

ROOT = b"r" * 32
BLOCK_SIZE = 4

tokens_lists = st.lists(st.integers(0, 1), min_size=1, max_size=18)
segment_lists = st.sampled_from(
    [
        DEFAULT_SEGMENTS,
        (Segment("house", b"", 6), Segment("tenant", b"1")),
        (Segment("house", b"", 6), Segment("tenant", b"2")),
        (Segment("house", b"", 9), Segment("tenant", b"1")),
        (Segment("house", b""),),
    ]
)


def give_bytes(block: Block) -> None:
    block.memory["base"] = Buffer(mmap.mmap(-1, 1), 1, 1, block, "base")


def match(index: Index, tokens: Tokens, segments: tuple[Segment, ...]) -> int:
    found = index.longest(tokens, segments, lambda block, n: n if block.has_bytes else 0)
    return found[0] if found else 0


@settings(max_examples=300)
@given(
    stored=st.lists(st.tuples(tokens_lists, segment_lists), max_size=8),
    lost=st.lists(st.integers(0, 40)),
    returned=st.lists(st.integers(0, 40)),
    asked=st.lists(st.tuples(tokens_lists, segment_lists), min_size=1, max_size=6),
)
def test_finds_what_the_naive_index_finds(
    stored: list[tuple[list[int], tuple[Segment, ...]]],
    lost: list[int],
    returned: list[int],
    asked: list[tuple[list[int], tuple[Segment, ...]]],
) -> None:
    index, naive = Index(ROOT), NaiveIndex(ROOT)
    ids = []
    for tokens, segments in stored:
        for block_id in chain(ROOT, np.array(tokens, np.int32), segments, BLOCK_SIZE):
            give_bytes(index.ensure(block_id))
            naive.blocks[block_id.key] = block_id
            ids.append(block_id)
    for number in lost:
        block = index.get(ids[number % len(ids)].key) if ids else None
        if block is not None:
            block.memory.clear()
            naive.blocks.pop(block.key, None)
            index.prune(block)
    for block_id in [ids[number % len(ids)] for number in returned if ids]:
        give_bytes(index.ensure(block_id))
        naive.blocks[block_id.key] = block_id
    for tokens, segments in asked + stored:
        array = np.array(tokens, np.int32)
        assert match(index, array, segments) == naive.longest(array, segments)


def test_a_ghost_hides_what_hangs_on_it_until_its_bytes_return() -> None:
    index = Index(ROOT)
    tokens = np.arange(12, dtype=np.int32)
    blocks = [index.ensure(one) for one in chain(ROOT, tokens, DEFAULT_SEGMENTS, BLOCK_SIZE)]
    for block in blocks:
        give_bytes(block)
    blocks[1].memory.clear()
    index.prune(blocks[1])
    assert match(index, tokens, DEFAULT_SEGMENTS) == 4
    give_bytes(blocks[1])
    assert match(index, tokens, DEFAULT_SEGMENTS) == 12


def test_an_orphan_is_usable_once_its_parent_is_known() -> None:
    index = Index(ROOT)
    tokens = np.arange(12, dtype=np.int32)
    ids = chain(ROOT, tokens, DEFAULT_SEGMENTS, BLOCK_SIZE)
    for block_id in reversed(ids):
        assert match(index, tokens, DEFAULT_SEGMENTS) == 0
        give_bytes(index.ensure(block_id))
    assert match(index, tokens, DEFAULT_SEGMENTS) == 12


def test_pruning_takes_ghosts_along_and_leaves_nothing() -> None:
    index = Index(ROOT)
    blocks = [
        index.ensure(block_id)
        for block_id in chain(ROOT, np.arange(12, dtype=np.int32), DEFAULT_SEGMENTS, BLOCK_SIZE)
    ]
    index.prune(blocks[1])
    assert len(index) == 3
    index.prune(blocks[2])
    assert len(index) == 0
    assert not index.root.children


def test_an_orphan_can_be_pruned() -> None:
    index = Index(ROOT)
    ids = chain(ROOT, np.arange(12, dtype=np.int32), DEFAULT_SEGMENTS, BLOCK_SIZE)
    index.prune(index.ensure(ids[2]))
    assert len(index) == 0


def test_shorter_and_longer_blocks_that_start_alike() -> None:
    index = Index(ROOT)
    tokens = np.arange(4, dtype=np.int32)
    (full,) = chain(ROOT, tokens, DEFAULT_SEGMENTS, BLOCK_SIZE)
    (tail,) = chain(ROOT, tokens[:2], DEFAULT_SEGMENTS, BLOCK_SIZE)
    (other,) = chain(ROOT, tokens[1:3], DEFAULT_SEGMENTS, BLOCK_SIZE)
    for block_id in (full, tail, other):
        index.ensure(block_id)
    assert [block.key for block in index.shorter(full)] == [tail.key]
    assert [block.key for block in index.longer(tail)] == [full.key]
    assert index.shorter(other) == index.longer(other) == []


@given(tokens_lists, tokens_lists)
def test_common_prefix(a: list[int], b: list[int]) -> None:
    count = common_prefix(np.array(a, np.int32), np.array(b, np.int32))
    assert a[:count] == b[:count]
    assert count == min(len(a), len(b)) or a[count] != b[count]
