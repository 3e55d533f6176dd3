"""The profiles on a real cache: what is promised, and what becomes of it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.cache.format import PAGE
from anaphora.cache.keys import DEFAULT_SEGMENTS, Segment, Tokens
from anaphora.cache.store import PrefixCache
from anaphora.clock import ManualClock
from anaphora.profiles import Anthropic, Local, OpenAI, Profile
from anaphora.profiles.decision import Decision
from anaphora.profiles.outline import NO_OUTLINE, Boundary, Outline
from tests.cache.support import BLOCK_SIZE, PAYLOAD, check_consistent, open_cache, prompt, store
from tests.conftest import SOAK
from tests.profiles.naive import Account, Promise
from tests.profiles.requests import Asked, requests

RULES = Anthropic(minimum=10)
TOKENS = prompt(1, 2, 3, length=20)
OUTLINE = Outline((Boundary(20, mark="1h"), Boundary(37, mark="5m")))


def answer(
    cache: PrefixCache,
    tokens: Tokens = TOKENS,
    outline: Outline = OUTLINE,
    profile: Profile = RULES,
    segments: tuple[Segment, ...] = DEFAULT_SEGMENTS,
) -> Decision:
    """A request from its start to the end of its prompt; its blocks are stored."""
    decision = cache.begin(tokens, segments, profile, outline)
    lease = cache.lease(segments)
    lease.advance(tokens)
    if isinstance(profile, Local):
        lease.promise(profile.lifetime)
    lease.write(profile.name, decision)
    for block in lease.unsaved():
        store(cache, block)
    lease.close()
    return decision


def read(
    cache: PrefixCache,
    tokens: Tokens = TOKENS,
    outline: Outline = OUTLINE,
    profile: Profile = RULES,
    segments: tuple[Segment, ...] = DEFAULT_SEGMENTS,
) -> int:
    return cache.begin(tokens, segments, profile, outline, write=False).read


def test_a_prefix_can_be_read_once_its_request_has_begun_to_answer() -> None:
    cache = open_cache()
    first = cache.begin(TOKENS, DEFAULT_SEGMENTS, RULES, OUTLINE)
    assert (first.read, first.written, first.uncached) == (0, {"1h": 20, "5m": 17}, 23)
    lease = cache.lease()
    lease.advance(TOKENS)
    assert read(cache) == 0
    lease.write(RULES.name, first)
    assert read(cache) == 37
    check_consistent(cache)
    lease.close()
    assert read(cache) == 0, "its cells are gone, and nothing was stored"
    assert cache.stats().broken_promises == 2


def test_a_request_that_may_not_read_or_write_does_not() -> None:
    cache = open_cache()
    answer(cache)
    unread = cache.begin(TOKENS, DEFAULT_SEGMENTS, RULES, OUTLINE, read=False)
    assert (unread.read, unread.written) == (0, {"1h": 20, "5m": 17})
    unwritten = cache.begin(prompt(9), DEFAULT_SEGMENTS, RULES, OUTLINE, write=False)
    assert (unwritten.read, unwritten.written, unwritten.writes) == (0, {}, ())
    assert unwritten.uncached == BLOCK_SIZE


def test_other_tokens_conditions_owners_and_profiles_read_nothing() -> None:
    cache = open_cache()
    answer(cache)
    other = TOKENS.copy()
    other[19] += 1
    matching = Outline((Boundary(20, match="a", mark="1h"), Boundary(37, match="a", mark="5m")))
    assert read(cache, other) == 0
    assert read(cache, outline=matching) == 0
    assert read(cache, segments=(Segment("other"),)) == 0
    assert read(cache, segments=(Segment(salt=b"other"),)) == 0
    assert read(cache, profile=OpenAI(minimum=10)) == 0
    assert read(cache, profile=Local()) == 0
    assert cache.match(TOKENS).length == len(TOKENS), "but the bytes are there for all of them"
    assert read(cache) == 37


def test_what_tenants_share_is_read_by_all_of_them_and_no_more() -> None:
    cache = open_cache()
    one, two = ((Segment("house", end=20), Segment(name, name.encode())) for name in ("a", "b"))
    answer(cache, segments=one)
    assert read(cache, segments=one) == 37
    assert read(cache, segments=two) == 20
    assert read(cache, segments=(Segment("house"),)) == 20
    assert read(cache, segments=(Segment("b", b"b"),)) == 0


def test_entries_survive_a_restart_and_end_when_their_time_is_over(tmp_path: Path) -> None:
    clock = ManualClock()
    cache = open_cache(tmp_path, clock=clock)
    answer(cache)
    cache.close()
    clock.advance(200)
    cache = open_cache(tmp_path, clock=clock)
    assert read(cache) == 37
    cache.close()
    clock.advance(299.9)  # since the last use
    cache = open_cache(tmp_path, clock=clock)
    assert len(cache.entries) == 2
    clock.advance(0.1)
    assert read(cache) == 20
    cache.close()
    clock.advance(3600)
    cache = open_cache(tmp_path, clock=clock)
    assert read(cache) == 0
    assert len(cache.entries) == cache.stats().broken_promises == 0
    cache.close()


def test_an_entry_whose_blocks_are_not_on_disk_does_not_outlive_the_process(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, memory=2, disk=0)
    answer(cache, TOKENS[:32], Outline((Boundary(20, mark="1h"),)))
    assert read(cache) == 20
    cache.close()
    cache = open_cache(tmp_path)
    assert len(cache.entries) == 0
    cache.close()


def test_another_block_size_after_a_restart_finds_the_same_entries(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    answer(cache)
    cache.close()
    cache = open_cache(tmp_path, block_size=2 * BLOCK_SIZE)
    assert read(cache) == 37
    cache.close()


def test_an_entry_ends_with_a_block_under_it_and_the_request_is_decided_again() -> None:
    cache = open_cache(memory=3)
    outline = Outline((Boundary(16, mark="5m"), Boundary(48, mark="5m")))
    tokens = prompt(1, 2, 3)
    answer(cache, tokens, outline)
    assert read(cache, tokens, outline) == 48
    answer(cache, prompt(4), NO_OUTLINE)
    assert read(cache, tokens, outline) == 16
    assert cache.stats().broken_promises == 1
    check_consistent(cache)


def test_a_local_promise_is_shortened_where_others_end() -> None:
    cache = open_cache(memory=3)
    tokens, outline = prompt(1, 2, 3), Outline((Boundary(40, mark="1h"),))
    answer(cache, tokens, outline, Local())
    answer(cache, prompt(4), NO_OUTLINE, Local())
    asked_for = [entry for entry in cache.entries if entry.lifetime == 3600]
    assert [entry.position for entry in asked_for] == [32]
    check_consistent(cache)


def test_an_entry_moves_to_the_block_that_takes_its_tails_place() -> None:
    cache = open_cache()
    decision = cache.begin(TOKENS, DEFAULT_SEGMENTS, RULES, Outline((Boundary(55, mark="5m"),)))
    lease = cache.lease()
    lease.advance(TOKENS)
    lease.write(RULES.name, decision)
    answered = np.concatenate([TOKENS, prompt(8)])
    lease.advance(answered, decoded_from=len(TOKENS))
    for block in lease.unsaved():
        store(cache, block, decoded_from=len(TOKENS))
    lease.close()
    check_consistent(cache)
    assert cache.stats().broken_promises == 0
    assert read(cache, outline=Outline((Boundary(55, mark="5m"),))) == 55


class TestBreakpointsUnderLocal:
    """Everything is cached anyway; what was asked for is kept in preference."""

    def test_everything_is_read_and_lifetimes_only_divide_what_is_written(self) -> None:
        cache = open_cache()
        first = answer(cache, profile=Local())
        assert first.written == {"1h": 20, "5m": 17, "unlimited": 23}
        assert answer(cache, profile=Local()).read == len(TOKENS)

    def test_what_was_asked_for_outlasts_what_is_newer(self) -> None:
        clock = ManualClock()
        cache = open_cache(memory=8, clock=clock)
        kept, plain = prompt(1, 2), prompt(3, 4)
        answer(cache, kept, Outline((Boundary(32, mark="1h"),)), Local())
        answer(cache, plain, NO_OUTLINE, Local())
        for turn in range(20):
            answer(cache, prompt(100 + turn), NO_OUTLINE, Local())
        assert cache.match(plain).length == 0
        assert cache.match(kept, record=False).length == 32
        clock.advance(3600)
        for turn in range(20):
            answer(cache, prompt(200 + turn), NO_OUTLINE, Local())
        assert cache.match(kept).length == 0, "least recently used, as anything else"

    def test_promises_never_keep_new_content_out(self) -> None:
        cache = open_cache(memory=4)
        forever = Outline((Boundary(BLOCK_SIZE, mark="12h"),))
        for number in range(10):
            answer(cache, prompt(number), forever, Local())
        answer(cache, prompt(50), NO_OUTLINE, Local())
        answer(cache, prompt(51), NO_OUTLINE, Local())
        assert cache.match(prompt(50)).length == cache.match(prompt(51)).length == BLOCK_SIZE

    def test_a_promise_outlasts_newer_files_on_disk_too(self, tmp_path: Path) -> None:
        cache = open_cache(tmp_path, memory=4, disk=6 * (PAGE + PAYLOAD))
        kept = prompt(1)
        answer(cache, kept, Outline((Boundary(BLOCK_SIZE, mark="1h"),)), Local())
        for turn in range(40):
            answer(cache, prompt(100 + turn), NO_OUTLINE, Local())
            cache.flush()
        assert cache.stats().evicted_from_disk > 0
        assert cache.match(kept, record=False).length == BLOCK_SIZE
        cache.close()

    def test_an_automatic_promise_may_have_a_lifetime(self) -> None:
        clock = ManualClock()
        cache, rules = open_cache(clock=clock), Local(lifetime=60.0)
        answer(cache, TOKENS[:40], NO_OUTLINE, rules)
        clock.advance(30)
        answer(cache, TOKENS, NO_OUTLINE, rules)
        assert [entry.position for entry in cache.entries] == [60]
        clock.advance(30)
        assert answer(cache, TOKENS[:30], NO_OUTLINE, rules).read == 30
        clock.advance(30)
        assert read(cache, TOKENS, NO_OUTLINE, rules) == 30, "the longer one was not used again"
        clock.advance(30)
        assert read(cache, TOKENS, NO_OUTLINE, rules) == 0


def test_an_entry_in_use_is_looked_at_once_in_a_lifetime() -> None:
    clock = ManualClock()
    cache = open_cache(clock=clock)
    answer(cache)
    for _ in range(1000):
        clock.advance(1)
        assert read(cache) == 37
    assert len(cache.entries._expiries) == len(cache.entries._next_look) == 2


STRETCH = 5


@pytest.mark.parametrize(
    "profile", [Local(), Anthropic(minimum=4, look_back=3), OpenAI(minimum=4)], ids=lambda p: p.name
)
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@settings(max_examples=100 if SOAK else 20, deadline=None)
@given(st.lists(st.tuples(requests(), st.booleans()), min_size=1, max_size=8))
def test_decisions_are_those_of_the_plain_account(
    profile: Profile, on_disk: bool, history: list[tuple[Asked, bool]]
) -> None:
    """With room for everything nothing else decides, restarts included."""
    clock, account = ManualClock(), Account()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) if on_disk else None
        cache = open_cache(place, memory=2000, clock=clock)
        for asked, restart in history:
            clock.advance(asked.wait)
            tokens = np.repeat(np.array(asked.tokens, np.int32), STRETCH)
            outline = stretched(asked.outline)
            view = account.view(tokens.tolist(), outline, clock.now())
            expected = profile.decide(outline, len(tokens), view, clock.now())
            decision = answer(cache, tokens, outline, profile)
            assert replace(decision, unread={}) == replace(expected, unread={})
            assert all(decision.read < end <= len(tokens) for end in decision.unread.values())
            account.apply(tokens.tolist(), expected)
            if isinstance(profile, Local):
                account.promises.append(Promise(tuple(tokens.tolist()), "", None, None))
            check_consistent(cache)
            if restart and on_disk:
                cache.close()
                cache = open_cache(place, memory=2000, clock=clock)
        cache.close()


def stretched(outline: Outline) -> Outline:
    return Outline(
        tuple(Boundary(STRETCH * b.position, b.kind, b.match, b.mark) for b in outline.boundaries),
        outline.implicit,
    )
