"""OpenAI's rules, one by one."""

from __future__ import annotations

import pytest

from anaphora.profiles.decision import Decision
from anaphora.profiles.openai import Conditions, OpenAI
from anaphora.profiles.outline import Boundary, Kind, Outline, Ttl
from tests.profiles.naive import Account

NOW = 1e9


def ask(
    account: Account,
    *boundaries: Boundary,
    implicit: Ttl | None = "30m",
    length: int = 9000,
    now: float = NOW,
    rules: OpenAI = OpenAI(),  # noqa: B008 - frozen
) -> Decision:
    """The request reads and then answers. All prompts here begin alike."""
    given = Outline(boundaries, implicit)
    decision = rules.decide(given, length, account.view(range(length), given, now), now)
    account.apply(range(length), decision)
    return decision


def message(position: int, kind: Kind = "message") -> Boundary:
    return Boundary(position, kind)


def marked(position: int, ttl: Ttl = "30m") -> Boundary:
    return Boundary(position, mark=ttl)


def test_a_conversation_reads_what_the_turn_before_wrote() -> None:
    account = Account()
    first = ask(account, message(1500), length=1510)
    assert (first.read, first.written, first.uncached) == (0, {"30m": 1500}, 10)
    second = ask(account, message(1500), message(1700), length=1710)
    assert (second.read, second.written, second.uncached) == (1500, {"30m": 200}, 10)
    again = ask(account, message(1500), message(1700), length=1710)
    assert (again.read, again.written, again.uncached) == (1700, {}, 10)


def test_nothing_is_looked_for_between_boundaries() -> None:
    account = Account()
    ask(account, message(1500))
    assert ask(Account(account.promises[:]), Boundary(1500), message(1600)).read == 0
    assert ask(account, message(1500), message(1600)).read == 1500


def test_less_than_the_minimum_is_neither_read_nor_written() -> None:
    account = Account()
    for _ in range(2):
        decision = ask(account, message(1023), length=1030)
        assert (decision.read, decision.written, decision.uncached) == (0, {}, 1030)
    ask(account, message(1024), length=1030)
    assert ask(account, message(1024), length=1030).read == 1024


@pytest.mark.parametrize(
    ("implicit", "positions"), [("30m", [3000, 4000, 5000, 6000]), (None, [2000, 3000, 4000, 5000])]
)
def test_four_are_written_the_implicit_one_among_them(
    implicit: Ttl | None, positions: list[int]
) -> None:
    account = Account()
    marks = [marked(1000 * n) for n in range(1, 6)]
    decision = ask(account, *marks, message(6000), implicit=implicit)
    assert [write.position for write in decision.writes] == positions
    assert decision.written == {"30m": positions[-1]}


def test_explicit_mode_without_a_breakpoint_turns_caching_off() -> None:
    account = Account()
    ask(account, message(2000))
    decision = ask(account, message(2000), implicit=None)
    assert (decision.read, decision.written, decision.writes) == (0, {}, ())


def test_explicit_mode_reads_at_explicit_breakpoints_only() -> None:
    account = Account()
    ask(account, message(2000), message(3000))
    assert ask(account, message(2000), message(3000), marked(4000), implicit=None).read == 0
    assert ask(account, message(2000), message(3000), marked(4000), implicit=None).read == 4000


def test_the_latest_eighty_explicit_breakpoints_are_read() -> None:
    marks = [marked(2000 + n) for n in range(81)]
    for which, found in ((0, False), (1, True)):
        account = Account()
        ask(account, marks[which], implicit=None)
        assert ask(account, *marks, implicit=None).read == (2000 + which if found else 0)


def test_twenty_messages_before_the_latest_are_read_and_the_developer_block_always() -> None:
    ends = [message(2000 + n) for n in range(22)]
    for which, found in ((0, False), (1, True)):
        account = Account()
        ask(account, ends[which])
        assert ask(account, *ends).read == (2000 + which if found else 0)
    account = Account()
    ask(account, message(1100, "developer"))
    assert ask(account, message(1100, "developer"), *ends).read == 1100


def test_lifetimes_are_split_like_the_places_they_reach() -> None:
    account = Account()
    given = marked(1500, "12h"), marked(2000), message(3000)
    decision = ask(account, *given, length=3005)
    assert decision.written == {"12h": 1500, "30m": 1500}
    assert ask(account, *given, length=3005, now=NOW + 1799).read == 3000
    assert ask(account, *given, length=3005, now=NOW + 1799 + 1800).read == 1500


def test_the_longest_lifetime_counts_where_breakpoints_fall_together() -> None:
    decision = ask(Account(), marked(2000, "12h"), message(2000))
    assert [(write.position, write.ttl) for write in decision.writes] == [(2000, "12h")]
    assert decision.written == {"12h": 2000}


def test_older_models_count_in_steps() -> None:
    account, rules = Account(), OpenAI(rounding=128)
    ask(account, message(1500), length=1510, rules=rules)
    decision = ask(account, message(1500), length=1510, rules=rules)
    assert (decision.read, decision.written, decision.uncached) == (1408, {}, 102)
    decision = ask(account, message(1500), message(1700), length=1710, rules=rules)
    assert (decision.read, decision.written, decision.uncached) == (1408, {"30m": 200}, 102)


def keyed(conditions: Conditions) -> Boundary:
    return Boundary(2000, "message", conditions.match)


def test_case_25_cache_keys_that_differ_at_the_end_do_not_share() -> None:
    account = Account()
    one, other = (Conditions("k" * 63 + last) for last in "ab")
    for conditions in one, other:
        assert ask(account, keyed(conditions)).read == 0
        assert ask(account, keyed(conditions)).read == 2000


def test_case_25_a_prompt_without_a_key_does_not_read_one_with_a_key() -> None:
    account = Account()
    ask(account, keyed(Conditions("project \N{ROCKET}")))
    assert ask(account, keyed(Conditions())).read == 0
    assert ask(account, keyed(Conditions("project \N{ROCKET}"))).read == 2000


def test_case_25_an_empty_key_is_no_key() -> None:
    account = Account()
    ask(account, keyed(Conditions()))
    assert ask(account, keyed(Conditions(""))).read == 2000


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (Conditions(), True),
        (Conditions(parallel_tool_calls=True, verbosity="medium", text_format="text"), True),
        (Conditions(parallel_tool_calls=False), False),
        (Conditions(text_format='{"type": "json_object"}'), False),
        (Conditions(reasoning_effort="low"), False),
        (Conditions(verbosity="low"), False),
        (Conditions(context_management="compact"), False),
    ],
)
def test_what_changes_the_prefix(change: Conditions, kept: bool) -> None:
    account = Account()
    ask(account, keyed(Conditions()))
    assert (ask(account, keyed(change)).read == 2000) is kept
