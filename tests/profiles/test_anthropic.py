"""Anthropic's rules, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.profiles.anthropic import (
    Anthropic,
    Conditions,
    Level,
    Markable,
    refusal,
    top_level_target,
)
from anaphora.profiles.decision import Decision, View
from anaphora.profiles.outline import Boundary, Outline, Ttl
from tests.profiles.naive import Account

NOW = 1e9
TOOLS, SYSTEM, START = 500, 1200, 1400


def outline(*blocks: Boundary) -> Outline:
    return Outline(blocks)


def ask(
    account: Account,
    given: Outline,
    length: int,
    now: float = NOW,
    rules: Anthropic = Anthropic(),  # noqa: B008 - frozen
) -> Decision:
    """The request reads and then answers. All prompts here begin alike."""
    tokens = range(length)
    decision = rules.decide(given, length, account.view(tokens, given, now), now)
    account.apply(tokens, decision)
    return decision


def marked(position: int, ttl: Ttl = "5m") -> Boundary:
    return Boundary(position, mark=ttl)


def test_case_16_counters_add_up_on_every_request() -> None:
    account, given = Account(), outline(marked(2000))
    first, second = ask(account, given, 2010), ask(account, given, 2010)
    assert (first.read, first.written, first.uncached) == (0, {"5m": 2000}, 10)
    assert (second.read, second.written, second.uncached) == (2000, {}, 10)


def test_case_19_mixed_lifetimes_are_split_by_where_reading_ends() -> None:
    account = Account()
    given = outline(marked(1100, "1h"), marked(1500, "1h"), marked(2000, "5m"))
    first = ask(account, given, 2100)
    assert (first.read, first.written, first.uncached) == (0, {"1h": 1500, "5m": 500}, 100)
    later = ask(account, given, 2100, NOW + 300)  # only the last one is over
    assert (later.read, later.written, later.uncached) == (1500, {"5m": 500}, 100)
    longer = outline(*given.boundaries[:2], marked(1800, "1h"), marked(2000))
    third = ask(account, longer, 2100, NOW + 301)
    assert third.read == 2000, "what is read is not written again, whatever lifetime is asked for"


@pytest.mark.parametrize(("calls", "reads"), [(8, True), (9, True), (10, False), (12, False)])
def test_case_22_a_wide_fan_out_falls_out_of_the_look_back(calls: int, reads: bool) -> None:
    account = Account()
    ask(account, outline(marked(SYSTEM), marked(START)), START)
    blocks = [Boundary(START + 10 * n) for n in range(1, 2 * calls + 1)]
    end = blocks[-1].position
    given = outline(marked(SYSTEM), Boundary(START), *blocks[:-1], marked(end))
    decision = ask(account, given, end + 5)
    assert decision.read == (START if reads else SYSTEM)
    assert decision.written == {"5m": end - decision.read}
    assert decision.uncached == 5


def test_the_breakpoint_itself_is_the_first_of_the_twenty() -> None:
    blocks = [Boundary(2000 + n) for n in range(35)]
    for entry, found in ((34, True), (16, True), (15, True), (14, False)):
        account = Account()
        ask(account, outline(*blocks[:entry], marked(2000 + entry)), 3000)
        decision = ask(account, outline(*blocks[:-1], marked(2034)), 3000)
        assert (decision.read == 2000 + entry) is found, "positions 35 to 16, counted from 1"


def test_every_breakpoint_opens_its_own_window() -> None:
    account = Account()
    ask(account, outline(marked(2000)), 3000)
    blocks = [Boundary(2000 + n) for n in range(60)]
    without = outline(*blocks[:59], marked(2059))
    assert ask(Account(account.promises[:]), without, 3000).read == 0
    within = outline(*blocks[:19], marked(2019), *blocks[20:59], marked(2059))
    assert ask(account, within, 3000).read == 2000


def test_case_23_what_is_too_short_is_not_cached_and_no_error() -> None:
    account = Account()
    short = outline(marked(300))
    for _ in range(2):
        decision = ask(account, short, 310)
        assert (decision.read, decision.written, decision.uncached) == (0, {}, 310)
    two = outline(marked(600), marked(1500))
    assert ask(account, two, 1510).written == {"5m": 1500}
    assert [len(promise.prefix) for promise in account.promises] == [1500]
    assert ask(account, two, 1510).read == 1500
    account, lower = Account(), Anthropic(minimum=256)
    assert ask(account, short, 310, rules=lower).written == {"5m": 300}
    assert ask(account, short, 310).read == 0, "after the minimum was raised"
    assert ask(account, short, 310, rules=lower).read == 300


def test_without_a_breakpoint_nothing_is_read_or_written() -> None:
    account = Account()
    ask(account, outline(marked(2000)), 2010)
    decision = ask(account, outline(Boundary(2000)), 2010)
    assert (decision.read, decision.written, decision.uncached) == (0, {}, 2010)


def test_a_read_refreshes_all_entries_on_the_way() -> None:
    account = Account()
    given = outline(marked(SYSTEM), marked(START))
    ask(account, given, START)
    for minute in (4, 8, 12):
        assert ask(account, given, START, NOW + 60 * minute).read == START
    only_system = outline(marked(SYSTEM))
    assert ask(account, only_system, START, NOW + 60 * 16).read == SYSTEM
    assert ask(account, given, START, NOW + 60 * 17).read == SYSTEM, "not on the way of the last"


def test_a_lifetime_ends_on_the_second() -> None:
    for ttl, seconds in (("5m", 300), ("1h", 3600)):
        account, given = Account(), outline(Boundary(2000, mark=ttl))  # type: ignore[arg-type]
        ask(account, given, 2010)
        copy = Account([replace(promise) for promise in account.promises])
        assert ask(copy, given, 2010, NOW + seconds - 0.001).read == 2000
        assert ask(account, given, 2010, NOW + seconds).read == 0


def test_a_breakpoint_before_the_end_of_what_is_read_is_written_for_nothing() -> None:
    account = Account()
    ask(account, outline(Boundary(SYSTEM), marked(START)), START)
    decision = ask(account, outline(marked(SYSTEM), marked(START)), START)
    assert (decision.read, decision.written) == (START, {})
    assert ask(account, outline(marked(SYSTEM)), SYSTEM + 9).read == SYSTEM


def test_blocks_that_end_at_the_same_place_still_count_one_by_one() -> None:
    account = Account()
    ask(account, outline(marked(2000)), 2010)
    hidden = [Boundary(2000)] * 19
    assert ask(account, outline(Boundary(2000), *hidden[:-1], marked(2005)), 2010).read == 2000
    wide = outline(Boundary(1900), *[Boundary(1950)] * 20, marked(2005))
    account = Account()
    ask(account, outline(marked(1900)), 2010)
    assert ask(account, wide, 2010).read == 0


def test_boundaries_behind_the_prompt_do_not_count() -> None:
    decision = Anthropic().decide(outline(marked(2000), marked(9000)), 3000, View(), NOW)
    assert decision.written == {"5m": 2000}


LEVELS: tuple[Level, ...] = ("tools", "system", "messages")


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (Conditions(speed="fast"), TOOLS),
        (Conditions(citations=True), TOOLS),
        (Conditions(web=True), TOOLS),
        (Conditions(tool_choice="any"), SYSTEM),
        (Conditions(tool_choice="none"), SYSTEM),
        (Conditions(disable_parallel_tool_use=True), SYSTEM),
        (Conditions(images=True), SYSTEM),
        (Conditions(thinking="enabled 2048"), SYSTEM),
        (Conditions(effort="low"), SYSTEM),
        (Conditions(), START),
        (Conditions(speed="standard", tool_choice="auto", effort="high"), START),
    ],
)
def test_a_change_invalidates_its_level_and_those_after_it(change: Conditions, kept: int) -> None:
    rules, account = Anthropic(minimum=100), Account()

    def given(conditions: Conditions) -> Outline:
        places = zip((TOOLS, SYSTEM, START), LEVELS, strict=True)
        return Outline(
            tuple(Boundary(p, match=conditions.match(level), mark="5m") for p, level in places)
        )

    ask(account, given(Conditions()), START, rules=rules)
    assert ask(account, given(change), START, rules=rules).read == kept
    assert ask(account, given(Conditions()), START, rules=rules).read == START


def test_conditions_that_differ_never_match() -> None:
    several = [
        Conditions(),
        Conditions(tool_choice="any"),
        Conditions(tool_choice="tool a"),
        Conditions(thinking="enabled 1024"),
        Conditions(thinking="enabled 2048"),
        Conditions(images=True),
        Conditions(effort="low"),
        Conditions(images=True, effort="low"),
    ]
    assert len({conditions.match("messages") for conditions in several}) == len(several)
    assert {conditions.match("system") for conditions in several} == {""}
    assert Conditions(speed="fast").match("tools") == ""


# Where breakpoints may stand

ORDER = (
    "{}.cache_control.ttl: a ttl='1h' cache_control block must not come after a ttl='5m' "
    "cache_control block. Note that blocks are processed in the following order: `tools`, "
    "`system`, `messages`."
)


def blocks(**ttls: Ttl | None) -> list[Markable]:
    """Blocks at ``tools.1``, ``system.0``, ..., named ``tools_1``, ``system_0``, ..."""
    return [Markable(path.replace("_", "."), ttl) for path, ttl in ttls.items()]


@pytest.mark.parametrize(
    ("given", "top_level", "path", "earlier"),
    [
        (blocks(tools_1="5m", system_0="1h"), None, "system.0", "tools.1"),
        (
            blocks(system_0="5m", messages_0_content_0="1h"),
            None,
            "messages.0.content.0",
            "system.0",
        ),
        (
            blocks(system_0="5m", messages_0_content_0=None),
            "1h",
            "messages.0.content.0",
            "system.0",
        ),
    ],
)
def test_case_19_a_long_lifetime_after_a_short_one_is_refused_with_both_places(
    given: list[Markable], top_level: Ttl | None, path: str, earlier: str
) -> None:
    complaint = refusal(given, top_level)
    assert complaint == f"{ORDER.format(path)} The earlier block is {earlier}."


def test_case_19_a_long_lifetime_before_a_short_one_is_taken() -> None:
    assert refusal(blocks(tools_0="1h", system_0="1h", messages_0_content_0="5m")) is None


def test_case_19_top_level_and_its_target_have_to_agree() -> None:
    given = blocks(system_0="1h", messages_0_content_0="1h")
    complaint = refusal(given, "5m")
    assert complaint is not None
    assert complaint.startswith(
        "Top-level cache_control has ttl='5m' but the target block already has cache_control "
        "with ttl='1h'"
    )
    assert "messages.0.content.0" in complaint
    assert refusal(given, "1h") is None


def test_four_breakpoints_at_most_the_top_level_included() -> None:
    four = blocks(tools_0="5m", system_0="5m", system_1="5m", messages_0_content_0="5m")
    last = Markable("messages.1.content.0")
    five = [*four, replace(last, ttl="5m")]
    complaint = "A maximum of 4 blocks with cache_control may be provided. Found 5."
    assert refusal(four) is None
    assert refusal(five) == complaint
    assert refusal([*four, last], "5m") == complaint
    assert refusal(four, "5m") is None, "already marked"
    assert refusal([*four, replace(last, cacheable=False)], "5m") is None
    assert refusal(five, most=5) is None


@given(st.lists(st.booleans()), st.sampled_from([None, "5m", "1h"]))
def test_the_top_level_marks_the_last_block_that_can_be(
    cacheable: list[bool], top_level: Ttl | None
) -> None:
    several = [Markable(f"system.{n}", None, can) for n, can in enumerate(cacheable)]
    target = top_level_target(several)
    if target is None:
        assert not any(cacheable)
    else:
        assert cacheable[target]
        assert not any(cacheable[target + 1 :])
    assert refusal(several, top_level) is None
