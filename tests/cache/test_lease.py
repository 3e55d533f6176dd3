from __future__ import annotations

from anaphora.cache.keys import Segment
from tests.cache.support import (
    BLOCK_SIZE,
    check_consistent,
    compute,
    open_cache,
    prompt,
    read,
    store,
)


def test_promises_over_live_blocks_hold_until_the_cells_are_gone() -> None:
    cache, tokens = open_cache(), prompt(1, 2, length=20)
    lease = cache.lease()
    lease.advance(tokens)
    assert cache.read_tokens(tokens) == 0
    lease.promise()
    assert cache.read_tokens(tokens) == 40
    assert cache.match(tokens).length == 0, "no bytes in any tier"
    check_consistent(cache)
    lease.close()
    assert cache.read_tokens(tokens) == 0
    assert cache.stats().broken_promises == 1
    check_consistent(cache)


def test_what_was_saved_stays_promised() -> None:
    cache, tokens = open_cache(), prompt(1, 2, length=20)
    lease = cache.lease()
    lease.advance(tokens)
    lease.promise()
    store(cache, lease.unsaved()[0])
    lease.close()
    assert cache.read_tokens(tokens) == 16


def test_unsaved_blocks_come_in_order_with_the_tail_last() -> None:
    cache = open_cache()
    lease = cache.lease((Segment("house", b"", 20), Segment("tenant")))
    lease.advance(prompt(1, 2, length=20))
    unsaved = lease.unsaved()
    assert [(block.start, block.end) for block in unsaved] == [
        (0, 16),
        (16, 20),
        (20, 32),
        (32, 40),
    ]
    store(cache, unsaved[0])
    store(cache, unsaved[1])
    assert lease.unsaved() != []
    assert [block.start for block in lease.unsaved()] == [20, 32]


def test_cells_rolled_back_hold_only_what_is_left() -> None:
    cache, tokens = open_cache(), prompt(1, 2, 3)
    lease = cache.lease()
    lease.advance(tokens)
    lease.promise()
    lease.advance(tokens[:20])
    assert cache.read_tokens(tokens) == 16
    assert [block.end for block in lease.unsaved()] == [16, 20]
    check_consistent(cache)


def test_cells_that_take_another_way_let_go_of_the_old_one() -> None:
    cache = open_cache()
    lease = cache.lease()
    lease.advance(prompt(1, 2, 3))
    lease.promise()
    lease.advance(prompt(1, 4, 5))
    lease.promise()
    assert cache.read_tokens(prompt(1, 2, 3)) == 16
    assert cache.read_tokens(prompt(1, 4, 5)) == 48
    check_consistent(cache)


def test_a_conversation_that_goes_on_extends_its_promise() -> None:
    cache, tokens = open_cache(), prompt(1, 2, 3)
    lease = cache.lease()
    for length in (10, 20, 36, 40):
        lease.advance(tokens[:length])
        lease.promise()
        for block in lease.unsaved():
            store(cache, block)
        check_consistent(cache)
    lease.close()
    assert [entry.position for entry in cache.entries] == [40]
    assert read(cache, tokens) == 40
    check_consistent(cache)


def test_cells_hold_up_an_evicted_block() -> None:
    cache = open_cache(memory=1)
    lease = cache.lease()
    lease.advance(prompt(1))
    lease.promise()
    store(cache, lease.unsaved()[0])
    compute(cache, prompt(2))
    assert cache.match(prompt(1)).length == 0
    assert cache.read_tokens(prompt(1)) == 16
    assert [block.start for block in lease.unsaved()] == [0]


def test_two_leases_on_the_same_prefix_hold_it_twice() -> None:
    cache, tokens = open_cache(), prompt(1)
    leases = [cache.lease(), cache.lease()]
    for lease in leases:
        lease.advance(tokens)
        lease.promise()
    leases[0].close()
    assert cache.read_tokens(tokens) == 16
    leases[1].close()
    assert cache.read_tokens(tokens) == 0


def test_better_bytes_than_stored_are_unsaved() -> None:
    cache, tokens = open_cache(), prompt(1, 2)
    compute(cache, tokens, decoded_from=20)
    lease = cache.lease()
    lease.advance(tokens, decoded_from=20)
    assert lease.unsaved() == []
    lease.advance(tokens)
    assert [block.start for block in lease.unsaved()] == [16]


def test_a_lease_goes_on_behind_a_block_superseded_under_it() -> None:
    cache, tokens = open_cache(), prompt(1, 2, 3)
    cut = (Segment("house", b"", 20), Segment("tenant"))
    lease = cache.lease(cut)
    lease.advance(tokens[:20])
    lease.promise()
    for block in lease.unsaved():
        store(cache, block)
    compute(cache, tokens, (Segment("house"),))
    lease.advance(tokens)
    lease.promise()
    for block in lease.unsaved():
        assert store(cache, block)
    assert read(cache, tokens, cut) == 48
    lease.close()
    assert cache.read_tokens(tokens, cut) == 48
    check_consistent(cache)


def test_promises_over_held_cells_go_on_to_whatever_is_stored_of_them() -> None:
    """A sequence that goes on from decoded tokens counts as decoded to its end."""
    cache, tokens = open_cache(), prompt(1, 2)
    lease = cache.lease()
    lease.advance(tokens[:20], decoded_from=10)
    lease.promise()
    lease.advance(tokens[:24], decoded_from=10)
    for block in lease.unsaved():
        assert store(cache, block, decoded_from=10)
    lease.close()
    assert cache.read_tokens(tokens) == 20
    assert cache.stats().broken_promises == 0
    check_consistent(cache)


def test_a_lease_can_be_used_again_after_closing() -> None:
    cache = open_cache()
    lease = cache.lease()
    lease.close()
    lease.advance(prompt(1))
    assert len(lease.unsaved()) == 1
    lease.close()
    assert len(cache._index) == 0


def test_every_owner_of_a_held_prefix_gets_a_promise_up_to_where_his_part_ends() -> None:
    cache = open_cache()
    lease = cache.lease((Segment("house", b"", 2 * BLOCK_SIZE), Segment("tenant")))
    lease.advance(prompt(1, 2, 3))
    lease.promise()
    promised = {(entry.owner, entry.position) for entry in cache.entries}
    assert promised == {("house", 32), ("tenant", 48)}


def test_a_lease_inherits_what_was_promised_over_the_same_cells() -> None:
    cache, tokens = open_cache(), prompt(1, 2, length=20)
    before = cache.lease()
    before.advance(tokens)
    before.promise()
    after = cache.lease()
    after.advance(tokens)
    after.inherit(before)
    before.close()
    assert cache.read_tokens(tokens) == 40
    check_consistent(cache)
    after.close()
    assert len(cache._index) == 0
