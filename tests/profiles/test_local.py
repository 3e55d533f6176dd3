"""The default profile's rules, and what an operator may set in any."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anaphora.errors import SettingsError
from anaphora.profiles import Anthropic, Local, OpenAI
from anaphora.profiles.decision import View, Write
from anaphora.profiles.outline import Boundary, Outline, match_key


def test_what_is_not_read_is_written() -> None:
    decision = Local().decide(Outline(), 100, View(70), 0.0)
    assert (decision.read, decision.written, decision.uncached) == (70, {"unlimited": 30}, 0)
    assert Local().decide(Outline(), 100, View(100), 0.0).written == {}


def test_case_22_a_wide_fan_out_is_read_whole() -> None:
    blocks = [Boundary(10 * n) for n in range(1, 100)]
    assert Local().decide(Outline(tuple(blocks)), 1000, View(990), 0.0).read == 990


def test_breakpoints_are_promises_on_top_even_where_the_text_is_read() -> None:
    outline = Outline((Boundary(40, mark="1h"), Boundary(50), Boundary(80, mark="5m")))
    decision = Local(lifetimes={"5m": 60.0}).decide(outline, 100, View(50), 0.0)
    assert decision.writes == (Write(40, "1h", "1h", 3600.0), Write(80, "5m", "5m", 60.0))
    assert decision.written == {"5m": 30, "unlimited": 20}
    assert decision.uncached == 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Local(lifetime=0),
        lambda: Local(lifetime=float("nan")),
        lambda: Local(lifetimes={"5m": -1.0}),
        lambda: Local(lifetimes={"5m": True}),
        lambda: Local(lifetimes={"2h": 7200.0}),  # type: ignore[dict-item]
        lambda: Anthropic(minimum=0),
        lambda: Anthropic(look_back=True),
        lambda: OpenAI(rounding=1.5),  # type: ignore[arg-type]
        lambda: OpenAI(most_writes=0),
        lambda: Outline((Boundary(5), Boundary(4))),
        lambda: Outline((Boundary(-1),)),
        lambda: Outline((5,)),  # type: ignore[arg-type]
        lambda: Outline((Boundary(5, mark="2h"),)),  # type: ignore[arg-type]
        lambda: Outline(implicit="2h"),  # type: ignore[arg-type]
    ],
)
def test_impossible_values_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(SettingsError, match=r"use|have"):
        wrong()


def test_match_keys_are_the_same_exactly_for_the_same_conditions() -> None:
    assert match_key({}) == ""
    assert match_key({"a": 1, "b": "x"}) == match_key({"b": "x", "a": 1})
    several: list[dict[str, object]] = [
        {"a": 1},
        {"a": "1"},
        {"a": True},
        {"b": 1},
        {"a": 1, "b": 1},
        {"a": "\ud83d"},
    ]
    assert len({match_key(conditions) for conditions in several}) == len(several)
