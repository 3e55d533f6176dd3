from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.cache.entries import Entry, EntryTable
from anaphora.cache.index import Block, Index
from anaphora.cache.keys import DEFAULT_SEGMENTS, Segment, Tokens, chain
from anaphora.clock import ManualClock
from tests.cache.naive import NaiveEntries, steps
from tests.cache.support import BLOCK_SIZE, ROOT, check_consistent, compute, open_cache, prompt

HOUSE = Segment("house", b"", 2 * BLOCK_SIZE)


def blocks_of(index: Index, tokens: Tokens) -> list[Block]:
    ids = chain(ROOT, tokens, DEFAULT_SEGMENTS, BLOCK_SIZE)
    return [index.ensure(block_id) for block_id in ids]


def entry_over(block: Block, profile: str = "anthropic", lifetime: float | None = None) -> Entry:
    return Entry("local", profile, block.key, block.end, lifetime)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=18),
            st.sampled_from(
                [
                    DEFAULT_SEGMENTS,
                    (Segment("house", b"", 6), Segment("a")),
                    (Segment("house", b"", 6), Segment("b")),
                    (Segment("a"),),
                ]
            ),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_read_tokens_are_what_the_naive_entries_say(
    prompts: list[tuple[list[int], tuple[Segment, ...]]],
) -> None:
    cache, naive = open_cache(memory=2000), NaiveEntries()
    for numbers, segments in prompts:
        tokens = np.repeat(np.array(numbers, np.int32), BLOCK_SIZE // 4)
        assert cache.read_tokens(tokens, segments) == naive.read_tokens(tokens, segments)
        compute(cache, tokens, segments)
        position = 0
        for segment in segments:
            end = len(tokens) if segment.end is None else min(segment.end, len(tokens))
            if end > position:
                naive.promised.append((segment.owner, steps(tokens, segments)[:end]))
            position = max(position, end)
    check_consistent(cache)


def test_a_repeated_prompt_reads_all_of_it() -> None:
    cache, tokens = open_cache(), prompt(1, 2, length=20)
    assert cache.read_tokens(tokens) == 0
    compute(cache, tokens)
    assert cache.read_tokens(tokens) == 40
    assert len(cache.entries) == 1


def test_a_longer_promise_extends_the_entry() -> None:
    cache = open_cache()
    for pieces in ((1,), (1, 2), (1, 2, 3), (1, 2)):
        compute(cache, prompt(*pieces, length=20))
    assert [entry.position for entry in cache.entries] == [60]


def test_a_tenant_reads_the_shared_trunk_that_another_wrote_but_nothing_of_his() -> None:
    cache, tokens = open_cache(), prompt(1, 2, 3, 4)
    compute(cache, tokens, (HOUSE, Segment("one")))
    assert cache.read_tokens(tokens, (HOUSE, Segment("one"))) == 4 * BLOCK_SIZE
    assert cache.read_tokens(tokens, (HOUSE, Segment("two"))) == 2 * BLOCK_SIZE
    assert cache.match(tokens, (HOUSE, Segment("two"))).length == 2 * BLOCK_SIZE
    assert cache.read_tokens(tokens, (Segment("two"),)) == 0
    assert cache.match(tokens, (Segment("two"),)).length == 0


def test_owners_meet_neither_by_name_nor_by_salt() -> None:
    cache, tokens = open_cache(), prompt(1, 2)
    compute(cache, tokens, (Segment("acme", b"42"),))
    for owner, salt in (("acme4", b"2"), ("acme42", b""), ("acme", b""), ("acme", b"4")):
        assert cache.match(tokens, (Segment(owner, salt),)).length == 0
        assert cache.read_tokens(tokens, (Segment(owner, salt),)) == 0
    assert cache.match(tokens, (Segment("acme", b"42"),)).length == 32


def test_an_entry_ends_when_its_time_is_over_and_not_before() -> None:
    clock, index = ManualClock(), Index(ROOT)
    entries = EntryTable(clock)
    tokens = prompt(1, 2)
    block = blocks_of(index, tokens)[1]
    entries.add(entry_over(block, lifetime=300), block)
    clock.advance(299)
    assert entries.read_tokens(index, tokens, DEFAULT_SEGMENTS, "anthropic") == 32
    clock.advance(1)
    assert entries.read_tokens(index, tokens, DEFAULT_SEGMENTS, "anthropic") == 0
    assert len(entries) == 0
    assert entries.broken == 0


def test_an_entry_written_again_lives_from_then_on() -> None:
    clock, index = ManualClock(), Index(ROOT)
    entries = EntryTable(clock)
    block = blocks_of(index, prompt(1))[0]
    entries.add(entry_over(block, lifetime=300), block)
    clock.advance(200)
    entries.add(entry_over(block, lifetime=300), block)
    clock.advance(200)
    entries.expire()
    assert len(entries) == 1
    clock.advance(100)
    entries.expire()
    assert len(entries) == 0


def test_of_two_with_one_id_the_one_that_lives_longer_stays() -> None:
    clock, index = ManualClock(), Index(ROOT)
    entries = EntryTable(clock)
    block = blocks_of(index, prompt(1))[0]
    for lifetime in 3600, 300:
        entries.add(entry_over(block, lifetime=lifetime), block)
    assert [entry.lifetime for entry in entries] == [3600]


def test_a_refreshed_entry_lives_from_the_start_of_the_request_that_read_it() -> None:
    clock, index = ManualClock(), Index(ROOT)
    entries = EntryTable(clock)
    block = blocks_of(index, prompt(1))[0]
    entry = entry_over(block, lifetime=300)
    entries.add(entry, block)
    clock.advance(200)
    entries.refresh(entry.id, clock.now() - 50)
    entries.refresh(entry.id, clock.now() - 60)
    clock.advance(249)
    entries.expire()
    assert len(entries) == 1
    clock.advance(1)
    entries.expire()
    assert len(entries) == 0


def test_every_block_under_a_promise_has_the_longest_lifetime_over_it() -> None:
    clock, index = ManualClock(), Index(ROOT)
    entries = EntryTable(clock)
    blocks = blocks_of(index, prompt(1, 2, 3, 4))
    entries.add(entry_over(blocks[3], "local"), blocks[3])
    entries.add(entry_over(blocks[2], lifetime=300), blocks[2])
    entries.add(entry_over(blocks[1], lifetime=3600), blocks[1])
    assert entries.lifetimes() == {blocks[0]: 3600, blocks[1]: 3600, blocks[2]: 300}
    clock.advance(300)
    assert entries.lifetimes() == {blocks[0]: 3600, blocks[1]: 3600}


def test_a_lost_block_shortens_local_entries_and_ends_others() -> None:
    index = Index(ROOT)
    entries = EntryTable(ManualClock())
    blocks = blocks_of(index, prompt(1, 2, 3))
    entries.add(entry_over(blocks[2], "local"), blocks[2])
    entries.add(entry_over(blocks[2]), blocks[2])
    entries.add(entry_over(blocks[0]), blocks[0])
    entries.block_lost(blocks[1])
    left = {(entry.profile, entry.position) for entry in entries}
    assert left == {("local", BLOCK_SIZE), ("anthropic", BLOCK_SIZE)}
    assert entries.broken == 2


def test_losing_the_first_block_ends_everything_over_it() -> None:
    index = Index(ROOT)
    entries = EntryTable(ManualClock())
    blocks = blocks_of(index, prompt(1, 2, 3))
    entries.add(entry_over(blocks[2], "local"), blocks[2])
    entries.block_lost(blocks[0])
    assert len(entries) == 0
    assert not blocks[0].promised


def test_profiles_do_not_read_each_others_entries() -> None:
    index = Index(ROOT)
    entries = EntryTable(ManualClock())
    tokens = prompt(1)
    (block,) = blocks_of(index, tokens)
    entries.add(entry_over(block), block)
    assert entries.read_tokens(index, tokens, DEFAULT_SEGMENTS) == 0
    assert entries.read_tokens(index, tokens, DEFAULT_SEGMENTS, "anthropic") == BLOCK_SIZE
