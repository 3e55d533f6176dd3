from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.cache.keys import DEFAULT_SEGMENTS, Segment, chain, prefixes, root_key, segment_id
from tests.cache.naive import steps
from tests.cache.support import prompt

texts = st.text(max_size=5)


@given(st.dictionaries(texts, texts, max_size=4), st.dictionaries(texts, texts, max_size=4))
def test_root_keys_are_equal_exactly_for_equal_identities(
    a: dict[str, str], b: dict[str, str]
) -> None:
    assert len(root_key(a)) == 32
    assert (root_key(a) == root_key(b)) == (a == b)


def test_root_key_does_not_depend_on_order() -> None:
    assert root_key({"a": "1", "b": "2"}) == root_key({"b": "2", "a": "1"})


def test_owner_and_salt_do_not_run_into_each_other() -> None:
    ids = {
        segment_id(Segment("acme", b"42")),
        segment_id(Segment("acme4", b"2")),
        segment_id(Segment("acme42", b"")),
    }
    assert len(ids) == 3
    assert all(len(one) == 16 for one in ids)


def test_segment_id_does_not_depend_on_where_the_segment_ends() -> None:
    assert segment_id(Segment("acme", b"s", 10)) == segment_id(Segment("acme", b"s"))


@given(
    length=st.integers(0, 70),
    ends=st.lists(st.integers(0, 80), max_size=3),
    block_size=st.integers(1, 20),
)
def test_blocks_are_cut_on_the_grid_and_where_segments_end(
    length: int, ends: list[int], block_size: int
) -> None:
    segments = (*(Segment(f"o{n}", b"", end) for n, end in enumerate(sorted(ends))), Segment())
    blocks = chain(b"r" * 32, np.arange(length, dtype=np.int32), segments, block_size)
    cuts = {*range(0, length, block_size), *(end for end in ends if end < length), length}
    assert [block.start for block in blocks] == sorted(cuts - {length})
    assert [block.end for block in blocks] == sorted(cuts - {0})
    parent = b"r" * 32
    for block in blocks:
        assert block.parent == parent
        parent = block.key
        owner = next(s.owner for s in segments if s.end is None or block.start < s.end)
        assert block.owner == owner


def test_a_key_depends_on_everything_before_it() -> None:
    tokens = prompt(1, 2, 3)
    keys = [block.key for block in chain(b"r" * 32, tokens, DEFAULT_SEGMENTS, 16)]
    changed = tokens.copy()
    changed[20] += 1
    others = [block.key for block in chain(b"r" * 32, changed, DEFAULT_SEGMENTS, 16)]
    assert keys[0] == others[0]
    assert keys[1] != others[1]
    assert keys[2] != others[2]
    assert chain(b"q" * 32, tokens, DEFAULT_SEGMENTS, 16)[0].key != keys[0]


@pytest.mark.parametrize("segments", [(Segment("a"),), (Segment(salt=b"s"),)])
def test_owner_and_salt_enter_the_key(segments: tuple[Segment, ...]) -> None:
    tokens = prompt(1)
    plain = chain(b"r" * 32, tokens, DEFAULT_SEGMENTS, 16)
    assert chain(b"r" * 32, tokens, segments, 16)[0].key != plain[0].key


def test_a_block_keeps_its_tokens_when_the_callers_array_changes() -> None:
    tokens = prompt(1)
    (block,) = chain(b"r" * 32, tokens, DEFAULT_SEGMENTS, 16)
    tokens[:] = 0
    assert block.tokens.any()
    with pytest.raises(ValueError, match="read-only"):
        block.tokens[0] = 1


numbers = st.lists(st.integers(0, 1), max_size=8)
divisions = st.sampled_from(
    [
        (Segment("a"),),
        (Segment("b"),),
        (Segment("a", b"s"),),
        (Segment("house", end=3), Segment("a")),
        (Segment("house", end=3), Segment("b")),
        (Segment("house", end=4), Segment("a")),
    ]
)


@given(numbers, divisions, numbers, divisions)
def test_prefix_keys_are_equal_exactly_for_equal_prefixes(
    one: list[int], of: tuple[Segment, ...], two: list[int], off: tuple[Segment, ...]
) -> None:
    left, right = np.array(one, np.int32), np.array(two, np.int32)
    mine = prefixes(b"r" * 32, left, of, range(10))
    theirs = prefixes(b"r" * 32, right, off, range(10))
    assert list(mine) == list(range(1, len(one) + 1))
    for here, prefix in mine.items():
        owner = next(s.owner for s in of if s.end is None or here <= s.end)
        assert prefix.owner == owner
        for there, other in theirs.items():
            same = steps(left, of)[:here] == steps(right, off)[:there]
            assert (prefix.key == other.key) == same
    others = prefixes(b"q" * 32, left, of, range(10)).values()
    assert not {prefix.key for prefix in mine.values()} & {prefix.key for prefix in others}
