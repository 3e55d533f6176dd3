"""Rules for volatile text: what they take out, leave, and move; and what they never touch."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.errors import ConfigError
from anaphora.prompt import adapt
from anaphora.prompt.conversation import Conversation, Message, TextPart
from anaphora.prompt.tokens import Renderer
from anaphora.prompt.volatile import BUILT_IN, Rule, VolatileRules
from tests.prompt.families import Loaded

BILLING = "x-anthropic-billing-header: cc_version=9.9.9; cc_entrypoint=cli; cch={};"
CLOCK = Rule("clock", r"Time \d\d:\d\d:\d\d\. ?", "move")


def conversation(*system: str, user: str = "Hi") -> Conversation:
    return Conversation(
        (
            Message("system", tuple(TextPart(text) for text in system)),
            Message("user", (TextPart(user),)),
        )
    )


def texts(of: Conversation) -> list[list[str]]:
    return [[part.text for part in message.content] for message in of.messages]


def test_a_bookkeeping_line_at_the_top_does_not_end_the_shared_prompt(smol: Loaded) -> None:
    renderer = Renderer(smol.vocabulary, smol.template)
    document = "Desks are on the second floor, by the window. " * 60

    def tokens(of: Conversation) -> list[int]:
        return [int(token) for token in adapt.render(renderer, of).tokens]

    def rendered(rules: VolatileRules, checksum: str) -> list[int]:
        applied = rules.apply(conversation(BILLING.format(checksum), document))
        assert applied.rules == (("x-anthropic-billing-header",) if rules is on else ())
        return tokens(applied.conversation)

    on = VolatileRules()
    off = VolatileRules([Rule("x-anthropic-billing-header", action="keep")])
    assert rendered(on, "0d1e2") == rendered(on, "f3a47")
    assert rendered(on, "0d1e2") == tokens(conversation("", document))
    assert rendered(off, "0d1e2") != rendered(off, "f3a47")
    assert rendered(off, "0d1e2") == rendered(off, "0d1e2")


def test_the_line_goes_and_the_rest_of_its_block_stays() -> None:
    rules = VolatileRules()
    line = BILLING.format("0d1e2")
    assert texts(rules.apply(conversation(line + "\n\nBe kind.", "x")).conversation) == [
        ["Be kind.", "x"],
        ["Hi"],
    ]
    for untouched in ("Say " + line, "\n" + line, "X-anthropic-billing-header: y", ""):
        before = conversation(untouched)
        applied = rules.apply(before)
        assert applied.conversation is before
        assert applied.rules == ()


def test_blocks_keep_their_numbers() -> None:
    applied = VolatileRules().apply(conversation(BILLING.format("1"), "Be kind."))
    assert texts(applied.conversation) == [["", "Be kind."], ["Hi"]]


def test_only_the_system_blocks_at_the_top_are_looked_at() -> None:
    line = BILLING.format("1")
    before = Conversation(
        (
            Message("developer", (TextPart(line),)),
            Message("system", (TextPart(line),)),
            Message("user", (TextPart(line),)),
            Message("system", (TextPart(line),)),
        ),
        ({"type": "function", "function": {"name": line}},),
    )
    applied = VolatileRules().apply(before)
    assert texts(applied.conversation) == [[""], [""], [line], [line]]
    assert applied.conversation.tools == before.tools


def test_text_is_replaced_wherever_it_stands() -> None:
    rules = VolatileRules([Rule("day", r"\d{4}-\d\d-\d\d", "replace", r"\1 a day")])
    applied = rules.apply(conversation("From 2026-11-29 to 2026-11-30."))
    assert texts(applied.conversation) == [[r"From \1 a day to \1 a day."], ["Hi"]]
    assert applied.rules == ("day",)


def test_text_is_moved_to_the_end_of_the_last_user_message() -> None:
    before = Conversation(
        (
            Message("system", (TextPart("Time 12:34:56. Be kind."),)),
            Message("user", (TextPart("Hi"),)),
            Message("assistant", (TextPart("Ho"),)),
            Message("user", (TextPart("Hm"),)),
            Message("assistant", (TextPart("So"),)),
        )
    )
    applied = VolatileRules([CLOCK]).apply(before)
    assert texts(applied.conversation) == [
        ["Be kind."],
        ["Hi"],
        ["Ho"],
        ["Hm", "\n\nTime 12:34:56."],
        ["So"],
    ]
    assert texts(before)[0] == ["Time 12:34:56. Be kind."], "the one that came is left as it was"
    alone = Conversation(before.messages[:1])
    assert VolatileRules([CLOCK]).apply(alone).conversation is alone, "there is nowhere to move it"


def test_rules_apply_in_their_order_those_built_in_first() -> None:
    rules = VolatileRules([CLOCK, Rule("rest", "kind", "replace", "strict")])
    applied = rules.apply(conversation(BILLING.format("1"), "Time 12:34:56. Be kind."))
    assert texts(applied.conversation) == [["", "Be strict."], ["Hi", "\n\nTime 12:34:56."]]
    assert applied.rules == (BUILT_IN[0].name, "clock", "rest")


def test_a_pattern_that_matches_nothing_at_all_changes_nothing() -> None:
    before = conversation("Be kind.")
    for pattern in ("x*", r"\b", "(?m)^", "$"):
        rules = VolatileRules([Rule("odd", pattern, "replace", "!")])
        assert rules.apply(before).conversation is before


def test_no_text_makes_a_pattern_slow() -> None:
    rules = VolatileRules([Rule("greedy", r"(a+)+$"), Rule("nested", r"(?:(?:x|xx)*)*y")])
    before = conversation("a" * 100_000 + "b" + "x" * 100_000)
    # A backtracking engine would never come back from this.
    assert rules.apply(before).conversation is before


@given(st.lists(st.text(alphabet="ab\nTime 0123456789:.é\U0001f600"), max_size=4))
def test_what_is_not_found_stays_as_it_is(blocks: list[str]) -> None:
    pattern = r"[0-9]+"
    rules = VolatileRules([Rule("digits", pattern)])
    applied = rules.apply(conversation(*blocks)).conversation
    expected = ["".join(c for c in block if c not in "0123456789") for block in blocks]
    assert texts(applied) == [expected, ["Hi"]]


def test_rules_are_read_from_toml() -> None:
    data = tomllib.loads(
        r"""
        [[volatile]]
        name = "clock"
        pattern = 'Time \d\d:\d\d:\d\d\. ?'
        action = "move"

        [[volatile]]
        name = "x-anthropic-billing-header"
        action = "keep"
        """
    )
    applied = VolatileRules.parse(data["volatile"]).apply(
        conversation(BILLING.format("1"), "Time 12:34:56. Be kind.")
    )
    assert applied.rules == ("clock",)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("volatile = 5", "under \\[\\[volatile\\]\\]"),
        ("volatile = [5]", "under \\[\\[volatile\\]\\]"),
        ("[[volatile]]\npattern = 'x'", "name is missing"),
        ("[[volatile]]\nname = 'a b'\npattern = 'x'", "can't be called"),
        ("[[volatile]]\nname = ''\npattern = 'x'", "can't be called"),
        ("[[volatile]]\nname = 5\npattern = 'x'", "use a text"),
        ("[[volatile]]\nname = 'a'", "no pattern"),
        ("[[volatile]]\nname = 'a'\npattern = '('", "missing \\)"),
        ("[[volatile]]\nname = 'a'\npattern = '(?=x)'", "RE2"),
        ("[[volatile]]\nname = 'a'\npatern = 'x'", "did you mean pattern"),
        ("[[volatile]]\nname = 'a'\npattern = 'x'\naction = 'drop'", "use remove, replace"),
        ("[[volatile]]\nname = 'a'\npattern = 'x'\nwhere = 'tools'", "use system"),
        ("[[volatile]]\nname = 'a'\npattern = 'x'\ntext = 'y'", "leave it out"),
        (
            "[[volatile]]\nname = 'a'\npattern = 'x'\n[[volatile]]\nname = 'a'\npattern = 'y'",
            "two rules",
        ),
    ],
)
def test_a_rule_that_cannot_work_is_one_line(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong) as caught:
        VolatileRules.parse(tomllib.loads(text)["volatile"])
    assert "\n" not in str(caught.value)
