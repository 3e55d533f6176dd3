"""Every profile over random histories, against the plain rules; and what holds for all of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.profiles import Anthropic, Local, OpenAI, Profile
from anaphora.profiles.decision import Decision, View
from anaphora.profiles.outline import Boundary, Outline
from tests.conftest import SOAK
from tests.profiles import naive
from tests.profiles.naive import Account, Counters
from tests.profiles.requests import Asked, requests

PROFILES: list[tuple[Profile, Callable[..., Counters]]] = [
    (Local(), naive.local),
    (Anthropic(minimum=4, look_back=3), naive.anthropic),
    (Anthropic(minimum=1, look_back=1, lifetimes={"5m": 4000.0}), naive.anthropic),
    (OpenAI(minimum=4, most_explicit=3, most_messages=2, most_writes=3), naive.openai),
    (OpenAI(minimum=2, rounding=3, most_writes=1, most_explicit=1, most_messages=1), naive.openai),
]
NAMES = [f"{profile.name}{number}" for number, (profile, _) in enumerate(PROFILES)]
every_profile = pytest.mark.parametrize("profile", [p for p, _ in PROFILES], ids=NAMES)


histories = st.lists(requests(), min_size=1, max_size=8)


def decide(profile: Profile, account: Account, asked: Asked, now: float) -> Decision:
    view = account.view(asked.tokens, asked.outline, now)
    return profile.decide(asked.outline, len(asked.tokens), view, now)


@pytest.mark.parametrize(("profile", "plainly"), PROFILES, ids=NAMES)
@settings(max_examples=300 if SOAK else 60, deadline=None)
@given(history=histories)
def test_counters_are_what_the_plain_rules_say(
    profile: Profile, plainly: Callable[..., Counters], history: list[Asked]
) -> None:
    account, now = Account(), 1e9
    for asked in history:
        now += asked.wait
        decision = decide(profile, account, asked, now)
        counters = decision.read, dict(decision.written)
        assert counters == plainly(profile, account, asked.tokens, asked.outline, now)
        assert decision.read + sum(decision.written.values()) + decision.uncached == len(
            asked.tokens
        )
        assert min(decision.read, decision.uncached, *decision.written.values(), 0) == 0
        assert 0 not in decision.written.values()
        account.apply(asked.tokens, decision)


@every_profile
@settings(max_examples=100 if SOAK else 25, deadline=None)
@given(history=histories, later=st.floats(0, 50_000))
def test_time_alone_never_makes_more_of_a_prompt_cached(
    profile: Profile, history: list[Asked], later: float
) -> None:
    account, now = Account(), 1e9
    for asked in history:
        now += asked.wait
        account.apply(asked.tokens, decide(profile, account, asked, now))
    for asked in history:
        view = account.view(asked.tokens, asked.outline, now)
        soon = profile.decide(asked.outline, len(asked.tokens), view, now)
        view = account.view(asked.tokens, asked.outline, now + later)
        then = profile.decide(asked.outline, len(asked.tokens), view, now + later)
        assert then.read <= soon.read


@every_profile
@settings(max_examples=100 if SOAK else 25, deadline=None)
@given(history=histories)
def test_asked_again_at_once_a_prompt_reads_all_that_was_written(
    profile: Profile, history: list[Asked]
) -> None:
    account, now = Account(), 1e9
    for asked in history:
        now += asked.wait
        first = decide(profile, account, asked, now)
        account.apply(asked.tokens, first)
        again = decide(profile, account, asked, now)
        kept = max((write.position for write in first.writes), default=0)
        rounding = profile.rounding if isinstance(profile, OpenAI) else 1
        assert again.read >= max(first.read, kept // rounding * rounding)
        if not isinstance(profile, Local):
            assert again.written == {}
            assert again.writes == ()


@every_profile
@settings(max_examples=100 if SOAK else 25, deadline=None)
@given(history=histories)
def test_what_is_used_stays_until_its_lifetime_has_passed_unused(
    profile: Profile, history: list[Asked]
) -> None:
    if isinstance(profile, Local):
        return  # nothing that was asked for decides what is read
    for asked in history:
        account, now = Account(), 1e9
        first = decide(profile, account, asked, now)
        if not first.writes:
            continue
        account.apply(asked.tokens, first)
        shortest = min(write.lifetime for write in first.writes)
        for _ in range(5):
            now += shortest - 1
            again = decide(profile, account, asked, now)
            assert again.written == {}
            account.apply(asked.tokens, again)
        longest = max(write.lifetime for write in first.writes)
        assert decide(profile, account, asked, now + longest).read == 0


@settings(max_examples=100 if SOAK else 25, deadline=None)
@given(requests(), st.sampled_from([profile for profile, _ in PROFILES]))
def test_requests_and_rules_survive_pickling(asked: Asked, profile: Profile) -> None:
    copies: Any = pickle.loads(pickle.dumps((asked.outline, profile)))
    assert copies == (asked.outline, profile)


def test_nothing_promised_is_nothing_read() -> None:
    outline = Outline((Boundary(2000, "message", mark="5m"), Boundary(2100)), implicit="30m")
    for profile in Local(), Anthropic(), OpenAI():
        assert profile.decide(outline, 2200, View(), 0.0).read == 0
