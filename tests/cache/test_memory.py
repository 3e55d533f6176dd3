from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from anaphora.cache.index import Block, Siblings
from anaphora.cache.keys import DEFAULT_SEGMENTS, chain
from anaphora.cache.memory import GRANULE, Buffer, MemoryTier

BLOCKS = [
    Block(block_id)
    for block_id in chain(b"r" * 32, np.arange(40, dtype=np.int32), DEFAULT_SEGMENTS, 4)
]


def take(tier: MemoryTier, size: int, block: Block | None = None) -> Buffer:
    buffer = tier.take(size, block or BLOCKS[0], "base")
    assert buffer is not None
    return buffer


def test_used_and_free_memory_never_exceed_the_budget() -> None:
    tier = MemoryTier(4 * GRANULE)
    small = [take(tier, 1) for _ in range(4)]
    assert tier.take(1, BLOCKS[0], "base") is None
    for buffer in small:
        tier.give_back(buffer)
    assert (tier.used, tier.free) == (0, 4 * GRANULE)
    take(tier, 3 * GRANULE)
    assert (tier.used, tier.free) == (3 * GRANULE, GRANULE), "free ones of other sizes went"


def test_memory_is_used_again() -> None:
    tier = MemoryTier(2 * GRANULE)
    first = take(tier, 100)
    memory = first.memory
    tier.give_back(first)
    assert take(tier, GRANULE).memory is memory


def test_a_view_has_the_size_asked_for() -> None:
    assert len(take(MemoryTier(GRANULE), 1000).view) == 1000


def test_a_view_somebody_still_has_does_not_break_unmapping() -> None:
    tier = MemoryTier(2 * GRANULE)
    buffer = take(tier, 10)
    view = buffer.view
    view[:3] = b"abc"
    tier.give_back(buffer)
    take(tier, 2 * GRANULE)
    assert bytes(view[:3]) == b"abc"


def test_a_dropped_buffer_is_free_only_when_unpinned() -> None:
    tier = MemoryTier(GRANULE)
    buffer = take(tier, 10)
    tier.hold(buffer)
    tier.pin(buffer)
    tier.drop(buffer)
    assert tier.take(10, BLOCKS[0], "base") is None
    tier.unpin(buffer)
    assert tier.take(10, BLOCKS[0], "base") is not None


def test_mapping_ahead_stays_in_the_budget_and_is_used() -> None:
    tier = MemoryTier(4 * GRANULE)
    with ThreadPoolExecutor(1) as threads:
        tier.map_ahead([10, 2 * GRANULE, 2 * GRANULE], threads)
        assert tier.free == 3 * GRANULE
        take(tier, 2 * GRANULE)
        assert (tier.used, tier.free) == (2 * GRANULE, GRANULE)


def test_the_least_recently_used_leaf_is_given_up_first() -> None:
    tier = MemoryTier(10 * GRANULE)
    parent, child, other = (Block(block.id) for block in BLOCKS[:3])
    child.parent = parent
    for block, tick in ((parent, 5), (child, 5), (other, 4)):
        tier.hold(take(tier, 10, block))
        block.tick = tick
    order = []
    while (victim := tier.held.next_victim(lambda held: False, dict)) is not None:
        order.append(victim.block)
        tier.drop(victim)
    assert order == [other, child, parent]


def test_a_use_after_sorting_counts() -> None:
    tier = MemoryTier(10 * GRANULE)
    blocks = [Block(block.id) for block in BLOCKS[:3]]
    for tick, block in enumerate(blocks):
        tier.hold(take(tier, 10, block))
        block.tick = tick
    first = tier.held.next_victim(lambda held: held.block is not blocks[0], dict)
    assert first is not None
    blocks[1].tick = 9
    second = tier.held.next_victim(lambda held: held.block is blocks[0], dict)
    assert second is not None
    assert (first.block, second.block) == (blocks[0], blocks[2])


def test_a_parent_stays_while_a_child_came_after_sorting() -> None:
    tier = MemoryTier(10 * GRANULE)
    parent, child, other = (Block(block.id) for block in BLOCKS[:3])
    for block, tick in ((parent, 5), (other, 4)):
        tier.hold(take(tier, 10, block))
        block.tick = tick
    first = tier.held.next_victim(lambda held: False, dict)
    assert first is not None
    assert first.block is other
    tier.drop(first)
    child.parent, child.tick = parent, 5
    parent.children[child.id.segment] = siblings = Siblings()
    siblings.add(child)
    tier.hold(take(tier, 10, child))
    second = tier.held.next_victim(lambda held: False, dict)
    assert second is not None
    assert second.block is child


def order_of_eviction(tier: MemoryTier, promised: dict[Block, float]) -> list[Block]:
    order = []
    while (victim := tier.held.next_victim(lambda held: False, lambda: promised)) is not None:
        order.append(victim.block)
        tier.drop(victim)
    return order


def holding(*ticks: int) -> tuple[MemoryTier, list[Block]]:
    tier, blocks = MemoryTier(10 * GRANULE), [Block(block.id) for block in BLOCKS[: len(ticks)]]
    for block, tick in zip(blocks, ticks, strict=True):
        tier.hold(take(tier, 10, block))
        block.tick = tick
    return tier, blocks


def test_what_is_promised_goes_after_the_rest_the_longest_promise_last() -> None:
    tier, (long, short, new, newer) = holding(1, 2, 3, 4)
    assert order_of_eviction(tier, {long: 3600.0, short: 300.0}) == [new, newer, short, long]


def test_promises_keep_half_of_the_tier_at_most() -> None:
    tier, (old, older, used, new) = holding(2, 1, 3, 4)
    promised = dict.fromkeys((old, older, used), 300.0)
    assert order_of_eviction(tier, promised)[:2] == [older, new], "one of the three is one too many"


def test_what_came_after_sorting_goes_before_what_is_promised() -> None:
    tier, (promised, other) = holding(1, 2)
    lifetimes = {promised: 300.0}
    first = tier.held.next_victim(lambda held: False, lambda: lifetimes)
    assert first is not None
    assert first.block is other
    tier.drop(first)
    new = Block(BLOCKS[2].id)
    tier.hold(take(tier, 10, new))
    new.tick = 3
    assert order_of_eviction(tier, lifetimes) == [new, promised]
