"""The prefix cache in memory, without a disk tier."""

from __future__ import annotations

import numpy as np
import pytest

from anaphora.cache.keys import DEFAULT_SEGMENTS, Segment, chain
from anaphora.cache.memory import GRANULE
from anaphora.cache.store import PrefixCache
from tests.cache.support import (
    BLOCK_SIZE,
    PAYLOAD,
    ROOT,
    check_consistent,
    compute,
    open_cache,
    prompt,
    read,
    store,
)


def test_what_was_stored_is_read_back() -> None:
    cache, tokens = open_cache(), prompt(1, 2, 3, length=20)
    assert compute(cache, tokens) == 4
    assert read(cache, tokens) == 60
    assert compute(cache, tokens) == 0
    check_consistent(cache)


def test_prompts_that_part_inside_a_block_share_its_beginning() -> None:
    cache, tokens = open_cache(), prompt(1, 2, 3)
    compute(cache, tokens)
    other = tokens.copy()
    other[37] += 1
    match = cache.match(other)
    assert match.length == 37
    assert [piece.length for piece in match.pieces] == [16, 16, 5]
    assert read(cache, other) == 37


def test_a_prompt_shorter_than_its_block_takes_the_beginning() -> None:
    cache, tokens = open_cache(), prompt(1, 2)
    compute(cache, tokens)
    assert cache.match(tokens[:20]).length == 20


def test_nothing_cached_is_a_counted_miss() -> None:
    cache = open_cache()
    assert cache.match(prompt(1)).length == 0
    assert cache.stats().misses.absent == cache.stats().lookups == 1


def test_a_fill_that_gives_up_leaves_nothing() -> None:
    cache = open_cache()
    (block,) = chain(ROOT, prompt(1), DEFAULT_SEGMENTS, BLOCK_SIZE)
    assert not cache.store(block, {"base": PAYLOAD}, lambda views: False)
    assert cache.match(prompt(1)).length == 0
    check_consistent(cache)


def test_a_fill_that_raises_leaves_nothing() -> None:
    cache = open_cache()
    (block,) = chain(ROOT, prompt(1), DEFAULT_SEGMENTS, BLOCK_SIZE)
    with pytest.raises(ZeroDivisionError):
        cache.store(block, {"base": PAYLOAD}, lambda views: 1 // 0 == 0)
    assert cache.match(prompt(1)).length == 0
    check_consistent(cache)


def test_a_block_whose_beginning_is_nowhere_is_refused() -> None:
    cache = open_cache()
    blocks = chain(ROOT, prompt(1, 2), DEFAULT_SEGMENTS, BLOCK_SIZE)
    assert not store(cache, blocks[1])
    assert store(cache, blocks[0])
    assert store(cache, blocks[1])
    assert cache.stats().stores_refused == 1


def test_the_least_recently_used_leaves_go_first() -> None:
    cache = open_cache(memory=4)
    compute(cache, prompt(1, 2))
    compute(cache, prompt(3, 4))
    cache.match(prompt(1, 2))
    compute(cache, prompt(5))
    assert cache.match(prompt(1, 2)).length == 32
    assert cache.match(prompt(3, 4)).length == 16
    assert cache.stats().evicted_from_memory == 1
    check_consistent(cache)


def test_the_head_of_a_chain_that_does_not_fit_is_kept_and_not_thrashed() -> None:
    cache = open_cache(memory=3)
    tokens = prompt(*range(8))
    for _ in range(3):
        compute(cache, tokens)
        assert read(cache, tokens) == 48
    assert cache.stats().evicted_from_memory == 0
    check_consistent(cache)


def test_a_block_larger_than_the_budget_is_refused_without_evicting_anything() -> None:
    cache = open_cache(memory=2)
    compute(cache, prompt(1))
    (large,) = chain(ROOT, prompt(2), DEFAULT_SEGMENTS, BLOCK_SIZE)
    assert not cache.store(large, {"base": 3 * GRANULE}, lambda views: True)
    assert cache.match(prompt(1)).length == 16


def test_no_memory_at_all_stores_nothing_and_fails_nowhere() -> None:
    cache = open_cache(memory=0)
    assert compute(cache, prompt(1, 2)) == 0
    assert read(cache, prompt(1, 2)) == 0
    check_consistent(cache)


def test_one_off_prompts_do_not_push_out_the_prefix_used_all_the_time() -> None:
    cache = open_cache(memory=16)
    house = prompt(*range(8))
    compute(cache, house)
    for turn in range(100):
        compute(cache, prompt(1000 + turn, 2000 + turn))
        if turn % 3 == 0:
            assert cache.match(house).length == len(house)
    assert read(cache, house) == len(house)


def test_evicting_a_block_shortens_the_promises_over_it() -> None:
    cache = open_cache(memory=3)
    compute(cache, prompt(1, 2, 3))
    compute(cache, prompt(4))
    assert cache.read_tokens(prompt(1, 2, 3)) == 32
    assert cache.stats().broken_promises == 1
    check_consistent(cache)


def test_bytes_being_restored_are_not_evicted() -> None:
    cache = open_cache(memory=3)
    tokens = prompt(1, 2, 3)
    compute(cache, tokens)
    restoring = cache.restore(cache.match(tokens).pieces)
    first = next(restoring)
    before = bytes(first.parts["base"])
    assert compute(cache, prompt(4, 5, 6)) == 0
    assert bytes(first.parts["base"]) == before
    restoring.close()
    check_consistent(cache)
    assert compute(cache, prompt(4, 5, 6)) == 3


def test_a_restore_that_is_never_started_holds_nothing() -> None:
    cache = open_cache(memory=1)
    compute(cache, prompt(1))
    restoring = cache.restore(cache.match(prompt(1)).pieces)
    assert compute(cache, prompt(2)) == 1
    assert list(restoring) == []


def test_a_longer_block_supersedes_the_provisional_tail() -> None:
    cache = open_cache()
    compute(cache, prompt(1, 2)[:20])
    compute(cache, prompt(1, 2)[:27])
    assert cache.stats().memory_parts == 2
    compute(cache, prompt(1, 2))
    assert cache.stats().memory_parts == 2
    assert [entry.position for entry in cache.entries] == [32]
    assert read(cache, prompt(1, 2)[:20]) == 20
    check_consistent(cache)


def test_an_entry_on_a_superseded_tail_keeps_its_position() -> None:
    cache = open_cache()
    compute(cache, prompt(1, 2)[:20])
    lease = cache.lease()
    lease.advance(prompt(1, 2))
    for block in lease.unsaved():
        store(cache, block)
    lease.close()
    assert cache.read_tokens(prompt(1, 2)) == 20
    assert cache.match(prompt(1, 2)).length == 32
    check_consistent(cache)


def test_a_tail_covered_by_a_stored_block_needs_no_saving() -> None:
    cache = open_cache()
    compute(cache, prompt(1, 2))
    assert compute(cache, prompt(1, 2)[:20]) == 0
    assert cache.read_tokens(prompt(1, 2)[:20]) == 20


def test_diverging_tails_are_kept_beside_each_other() -> None:
    cache = open_cache()
    first, second = prompt(1, 2)[:20], prompt(1, 3)[:20]
    compute(cache, first)
    compute(cache, second)
    assert read(cache, first) == read(cache, second) == 20
    assert cache.stats().memory_parts == 3


def test_a_block_that_ends_with_its_segment_is_kept_when_others_go_on_behind_it() -> None:
    cache = open_cache()
    tokens = prompt(1, 2, 3)
    cut = (Segment("house", b"", 20), Segment("tenant"))
    compute(cache, tokens, cut)
    compute(cache, tokens, (Segment("house"),))
    assert read(cache, tokens, cut) == 48
    assert read(cache, tokens, (Segment("house"),)) == 48
    check_consistent(cache)


def test_prefilled_bytes_replace_decoded_ones_and_not_the_other_way_round() -> None:
    cache = open_cache()
    tokens = prompt(1, 2)
    compute(cache, tokens, decoded_from=20)
    assert [p.block.decoded_from for p in cache.match(tokens).pieces] == [None, 20]
    assert compute(cache, tokens, decoded_from=18) == 0
    assert compute(cache, tokens, decoded_from=25) == 1
    assert cache.match(tokens).pieces[1].block.decoded_from == 25
    assert compute(cache, tokens) == 1
    assert compute(cache, tokens, decoded_from=3) == 0
    assert cache.match(tokens).pieces[1].block.decoded_from is None
    check_consistent(cache)


def test_exact_bytes_replace_others_and_not_the_other_way_round() -> None:
    cache = open_cache()
    (block,) = chain(ROOT, prompt(1), DEFAULT_SEGMENTS, BLOCK_SIZE)
    store(cache, block)
    assert not cache.match(prompt(1)).pieces[0].block.exact
    store(cache, block, exact=True)
    store(cache, block)
    assert cache.match(prompt(1)).pieces[0].block.exact


def test_a_prefilled_tail_is_not_given_up_for_a_decoded_block() -> None:
    cache = open_cache()
    compute(cache, prompt(1, 2)[:24])
    compute(cache, prompt(1, 2), decoded_from=18)
    match = cache.match(prompt(1, 2)[:24])
    assert match.length == 24
    assert match.pieces[-1].block.decoded_from is None


def test_a_missing_part_is_added() -> None:
    cache = open_cache()
    (block,) = chain(ROOT, prompt(1), DEFAULT_SEGMENTS, BLOCK_SIZE)
    store(cache, block, ("base",))
    store(cache, block, ("base", "window"))
    assert cache.match(prompt(1)).pieces[0].block.parts == {"base", "window"}
    assert read(cache, prompt(1)) == 16
    check_consistent(cache)


def test_parts_named_later_go_first() -> None:
    cache = open_cache(memory=3)
    compute(cache, prompt(1), parts=("base", "window"))
    compute(cache, prompt(2), parts=("base", "window"))
    assert cache.match(prompt(1)).pieces[0].block.parts == {"base"}
    assert cache.match(prompt(2)).pieces[0].block.parts == {"base", "window"}


def test_clear_forgets_everything_but_what_is_live() -> None:
    cache = open_cache()
    compute(cache, prompt(1, 2))
    lease = cache.lease()
    lease.advance(prompt(1, 2))
    cache.clear()
    assert cache.match(prompt(1, 2)).length == cache.read_tokens(prompt(1, 2)) == 0
    assert len(lease.unsaved()) == 2
    check_consistent(cache)
    lease.close()
    assert len(cache._index) == 0


def test_without_a_disk_there_is_nothing_to_maintain() -> None:
    cache = open_cache()
    compute(cache, prompt(1))
    assert cache.unwritten == 0
    assert not cache.maintain(1.0)
    cache.flush()
    cache.close()


def test_a_long_prompt_is_matched_without_recursion() -> None:
    cache = PrefixCache(ROOT, memory_budget=3000 * GRANULE, block_size=4)
    tokens = np.arange(4 * 2500, dtype=np.int32)
    lease = cache.lease()
    lease.advance(tokens)
    lease.promise()
    for block in lease.unsaved():
        assert store(cache, block)
    assert cache.match(tokens).length == len(tokens)
    assert cache.read_tokens(tokens) == len(tokens)
