"""Causes: each of them from the smallest case that shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.diagnose.difference import shared
from anaphora.diagnose.explain import CAUSES, Explanation, explain
from anaphora.diagnose.prompts import Decision, Place, Remembered, Span
from tests.diagnose.support import FILLER, SYSTEM, VOCAB, message, remembered, tool

QUESTION = (message(1), "What is it about?")
SHOWN = set[str]()


def cause(earlier: list[Remembered] | Remembered, now: Remembered) -> Explanation:
    before = [earlier] if isinstance(earlier, Remembered) else earlier
    found = explain(now, before, VOCAB)
    SHOWN.add(found.cause)
    assert found.sentence
    assert "{" not in found.sentence
    assert Explanation.from_json(json_of(found)) == found
    return found


def json_of(explanation: Explanation) -> str:
    return json.dumps(explanation.as_json())


def reading(earlier: Remembered, now: Remembered) -> Remembered:
    """``now``, as it is when it read all that it shares with ``earlier``."""
    return replace(now, decision=Decision(shared(earlier.tokens, now.tokens)))


def systems(one: str, other: str) -> tuple[Remembered, Remembered]:
    """Two requests that differ in the system prompt only."""
    earlier = remembered([(SYSTEM, one), QUESTION], "earlier", time=90)
    return earlier, reading(earlier, remembered([(SYSTEM, other), QUESTION]))


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("timestamp", "Time 12:34:56.", "Time 12:34:57."),
        ("timestamp", "Time 09:59.", "Time 10:00."),
        ("timestamp", "It is 9:59 AM now.", "It is 9:59 PM now."),
        ("timestamp", "It is 9:59 a.m. now.", "It is 10:01 a.m. now."),
        ("timestamp", "Now: 2026-11-30T10:15:00Z", "Now: 2026-11-30T10:15:01Z"),
        ("timestamp", "Now: 2026-11-30 10:15:00.123", "Now: 2026-11-30 10:15:00.124"),
        ("timestamp", "Now: 2026-11-30T10:15:00+01:00", "Now: 2026-12-01T08:00:00+01:00"),
        ("timestamp", "Now: Nov 30, 2026 10:15", "Now: Dec 1, 2026 10:15"),
        ("timestamp", "at 1800000000", "at 1800000001"),
        ("timestamp", "at 1800000000123", "at 1800000007999"),
        ("date", "Today is 2026-11-30.", "Today is 2026-12-01."),
        ("date", "Today is 30.11.2026.", "Today is 1.12.2026."),
        ("date", "Today is 11/30/2026.", "Today is 12/01/2026."),
        ("date", "Today is November 30, 2026.", "Today is December 1, 2026."),
        ("date", "Today is 30 Nov 2026.", "Today is 1 Dec 2026."),
        ("date", "Today is Monday.", "Today is Tuesday."),
        ("date", "Today is Mon, Nov 30.", "Today is Tue, Dec 1."),
        ("date", "Today Date: 26 Jul 2026", "Today Date: 27 Jul 2026"),
        (
            "uuid",
            "Session 0d1e2f3a-1111-4222-8333-444455556666.",
            "Session 99aa2f3a-1111-4222-8333-444455556666.",
        ),
        (
            "uuid",
            "Session 0d1e2f3a-1111-4222-8333-444455556666.",
            "Session 0d1e2f3a-1111-4222-8333-444455556667.",
        ),
        ("hash", "x-billing: cch=0d1e2;", "x-billing: cch=f3a47;"),
        ("hash", "commit 1a2b3c4d5e6f7a8b", "commit 1a2b3c4d5e6f7a8c"),
        ("hash", "etag 12345", "etag f3a47"),
        ("id", "request req_8fk2lq91 of", "request req_9zz1pb02 of"),
        ("id", "trace zx81-u772-k of", "trace zx81-u773-k of"),
        ("counter", "You have 12 messages.", "You have 13 messages."),
        ("counter", "Turn 9.", "Turn 10."),
        ("counter", "Build 1.", "Build 12."),
        ("system_changed", "You are kind.", "You are strict."),
        ("system_changed", "You are kind.", "You are kind and brief."),
        ("system_changed", "Answer in May.", "Answer in full."),
        ("system_changed", "You", "You are kind."),
        ("keys_reordered", '{"a": 1, "b": [2, 3]}', '{"b": [2, 3], "a": 1}'),
    ],
)
@pytest.mark.parametrize("long", [True, False])
def test_what_changed_in_a_system_prompt(kind: str, one: str, other: str, long: bool) -> None:
    around = ("Rules. " + FILLER, " " + FILLER) if long else ("", "")
    earlier, now = systems(*(text.join(around) for text in (one, other)))
    found = cause(earlier, now)
    assert found.cause == kind
    assert found.difference is not None
    assert found.difference.place.kind in ("system", "template")
    assert found.nearest is not None
    assert found.nearest.request_id == "earlier"
    assert found.nearest.seconds_before == 10
    assert found.advice


TOOLS = [
    (tool(1, "weather"), '{"name": "weather", "parameters": {"city": 1, "day": 2}}'),
    (tool(2, "time"), '{"name": "time", "parameters": {}}'),
    (tool(3, "post"), '{"name": "post", "parameters": {"to": 3}}'),
]
REST = [(SYSTEM, FILLER), QUESTION]


@pytest.mark.parametrize(
    ("kind", "tools", "says"),
    [
        ("tools_reordered", [TOOLS[1], TOOLS[2], TOOLS[0]], "another order"),
        ("tools_reordered", [TOOLS[0], TOOLS[2], TOOLS[1]], "another order"),
        ("tools_changed", [*TOOLS, (tool(4, "call"), '{"name": "call"}')], "call is new"),
        ("tools_changed", TOOLS[:2], "post is gone"),
        ("tools_changed", TOOLS[1:], "weather is gone"),
        ("tools_changed", [], "weather is gone, time is gone, post is gone"),
        (
            "keys_reordered",
            [(TOOLS[0][0], '{"name": "weather", "parameters": {"day": 2, "city": 1}}'), *TOOLS[1:]],
            "in tool 1 (weather)",
        ),
        (
            "tool_changed",
            [(TOOLS[0][0], '{"name": "weather", "parameters": {"place": 1}}'), *TOOLS[1:]],
            "tool 1 (weather)",
        ),
    ],
)
def test_what_changed_in_the_tools(kind: str, tools: list[tuple[Place, str]], says: str) -> None:
    earlier, now = remembered([*TOOLS, *REST], "earlier"), remembered([*tools, *REST])
    found = cause(earlier, reading(earlier, now))
    assert found.cause == kind
    assert says in found.sentence


def test_what_changed_in_the_messages() -> None:
    turns = [
        (message(1), "Who are you?"),
        (message(2, "assistant"), "Nobody."),
        (message(3), "And who am I?"),
    ]
    first = remembered([(SYSTEM, FILLER), turns[0]], "first")
    longer = remembered([(SYSTEM, FILLER), *turns], "longer")
    assert cause(first, reading(first, longer)).cause == "appended"
    edited = remembered([(SYSTEM, FILLER), turns[0], (turns[1][0], "Somebody."), turns[2]])
    found = cause(longer, reading(longer, edited))
    assert found.cause == "message_changed"
    assert "message 2 (assistant)" in found.sentence
    other = remembered([(SYSTEM, FILLER), (message(1), "Where are you?")])
    found = cause(longer, reading(longer, other))
    assert (found.cause, found.advice) == ("new_message", ""), "as it should be"
    template = remembered([(SYSTEM, FILLER), (None, "\n[another template]"), turns[0]])
    assert cause(first, reading(first, template)).cause == "template_changed"


def test_the_same_text_of_other_tokens() -> None:
    earlier = remembered([(SYSTEM, "1ab1 " + FILLER * 9), QUESTION], "earlier")
    joined = int(VOCAB.encode("ab")[0])
    place = int(np.flatnonzero(earlier.tokens == joined)[0])
    letters = [int(token) for letter in "ab" for token in VOCAB.encode(letter)]
    tokens = np.array(
        [*earlier.tokens[:place], *letters, *earlier.tokens[place + 1 :]], dtype=np.int32
    )
    spans = tuple(
        Span(span.start + (span.start > place), span.end + 1, span.place) for span in earlier.spans
    )
    now = Remembered("now", 5.0, tokens, spans, earlier.match, Decision(0))
    found = cause(earlier, now)
    assert found.cause == "other_tokens"
    assert found.difference is not None
    assert found.difference.position == place


def test_nothing_is_missed_where_everything_was_read() -> None:
    earlier, now = systems(FILLER, FILLER)
    read = remembered([(SYSTEM, FILLER), QUESTION], decision=Decision(read=len(now.tokens)))
    found = cause(earlier, read)
    assert (found.cause, found.difference, found.advice) == ("nothing_missed", None, "")
    alone = cause([], read)
    assert alone.cause == "nothing_missed", "what it was read from is forgotten already"


def test_without_anything_alike_it_is_the_first() -> None:
    now = remembered([(SYSTEM, FILLER), QUESTION])
    assert cause([], now).cause == "first_request"
    other = remembered([(None, "Quite another prompt")], "other")
    found = cause(other, now)
    assert (found.cause, found.nearest) == ("first_request", None)
    found = cause(*systems("Be kind.", "You are strict."))
    assert (found.cause, found.nearest) == ("first_request", None), "the template's opening is no"
    assert cause(*systems("12:34:56 Be kind.", "21:34:56 Be kind.")).cause == "timestamp"


def decided(parts: list[tuple[Place | None, str]], **decision: object) -> Remembered:
    return remembered(parts, decision=Decision(**{"read": 0, **decision}))  # type: ignore[arg-type]


def test_reasons_of_the_cache_go_before_those_of_the_text() -> None:
    parts: list[tuple[Place | None, str]] = [(SYSTEM, FILLER), QUESTION]
    changed: list[tuple[Place | None, str]] = [(SYSTEM, FILLER), (message(1), "Why?")]
    earlier = remembered(parts, "earlier")
    for name in ("expired", "evicted", "lost", "out_of_reach"):
        found = cause(earlier, decided(changed, unread={name: 200}))
        assert found.cause == name
        assert "200" in found.sentence
        assert found.difference is not None, "where they part is told all the same"
        found = cause([], decided(changed, unread={name: 200}))
        assert (found.cause, found.nearest) == (name, None), "its request is remembered no more"
    found = cause(earlier, decided(changed, unread={"expired": 100, "evicted": 150}))
    assert found.cause == "evicted", "the one that would have reached furthest"


def test_another_key_is_named_where_the_prompt_is_alike() -> None:
    parts: list[tuple[Place | None, str]] = [(SYSTEM, FILLER), QUESTION]
    earlier = remembered(parts, "earlier", cache_key="b")
    assert cause(earlier, remembered([(SYSTEM, "Other")], cache_key="a")).cause == "first_request"
    earlier = remembered(parts, "earlier", cache_key="a")
    assert cause(earlier, remembered(parts, cache_key="b")).cause == "other_cache_key"
    assert cause(earlier, remembered(parts)).cause == "other_cache_key"
    found = cause(earlier, remembered(parts, cache_key="a", effort="high"))
    assert (found.cause, "effort" in found.sentence) == ("other_setting", True)
    same_key = remembered(parts, "same key", cache_key="b")
    other_key = remembered(parts, "other key", cache_key="c")
    now = remembered(parts, cache_key="b", decision=Decision(read=10))
    found = cause([same_key, other_key], now)
    assert found.nearest is not None
    assert found.nearest.request_id == "same key", "of two that share as much"


def test_what_is_too_short_or_has_no_mark_is_not_cached() -> None:
    short: list[tuple[Place | None, str]] = [(SYSTEM, "Be kind."), QUESTION]
    earlier = remembered(short, "earlier", decision=Decision(0, (), minimum=1024))
    assert cause(earlier, decided(short, minimum=1024, breakpoints=(5,))).cause == "below_minimum"
    longer = [*short, (message(2), FILLER * 10)]
    assert cause(earlier, decided(longer, minimum=1024, breakpoints=(5,))).cause == "below_minimum"
    unmarked = remembered(longer, "unmarked", decision=Decision(0, ()))
    assert cause(unmarked, decided(longer, breakpoints=(50,))).cause == "no_breakpoint"
    marked = remembered(longer, "marked", decision=Decision(0, (50,)))
    assert cause(marked, decided(longer, breakpoints=())).cause == "no_breakpoint"
    assert cause(marked, decided(longer, read=0, breakpoints=(50,))).cause == "not_held"
    assert cause(marked, decided(longer, read=50, breakpoints=(50,))).cause == "no_breakpoint"
    assert cause(marked, decided(longer, breakpoints=(60,))).cause == "no_breakpoint"
    longest = [*longer, (message(3), "Why?")]
    assert cause(marked, decided(longest, read=50, breakpoints=(50, 90))).cause == "appended"


def test_what_the_cache_should_have_had_is_told() -> None:
    parts: list[tuple[Place | None, str]] = [(SYSTEM, FILLER * 2), QUESTION]
    earlier = remembered(parts, "earlier")
    changed: list[tuple[Place | None, str]] = [(SYSTEM, FILLER * 2), (message(1), "Why?")]
    assert cause(earlier, decided(changed)).cause == "not_held"
    nearly = len(earlier.tokens) - 100
    assert cause(earlier, decided(changed, read=nearly)).cause == "new_message"


def test_rules_that_were_applied_are_told() -> None:
    earlier, now = systems("Be kind.", "Be strict.")
    assert cause(earlier, replace(now, rules=("clock",))).rules == ("clock",)


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=12).map("".join), max_size=6))
def test_the_nearest_is_the_one_that_shares_most(texts: list[str]) -> None:
    earlier = [remembered([(None, text)], str(n)) for n, text in enumerate(texts)]
    now = remembered([(None, "abcabcabcabc")])
    found = explain(now, earlier, VOCAB)

    def alike(prompt: Remembered) -> int:
        pairs = zip(prompt.tokens, now.tokens, strict=False)
        return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

    most = max(map(alike, earlier), default=0)
    if most == 0:
        assert found.nearest is None
    else:
        assert found.nearest is not None
        latest = max(n for n, prompt in enumerate(earlier) if alike(prompt) == most)
        assert (found.nearest.shared_tokens, found.nearest.request_id) == (most, str(latest))


def test_every_cause_was_seen() -> None:
    assert set(CAUSES) == SHOWN, "tests above show each of them"
