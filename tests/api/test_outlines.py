"""Where in a prompt tools, blocks and messages end."""

from __future__ import annotations

import numpy as np

from anaphora.api.outlines import Ending, outline, with_message_ends
from anaphora.prompt.boundaries import Boundaries
from anaphora.prompt.conversation import Message, TextPart
from anaphora.prompt.tokens import Prompt

SYSTEM, USER, ASSISTANT, TOOL = (
    Message(role, (TextPart(role),)) for role in ("system", "user", "assistant", "tool")
)


def prompt(*ends: tuple[int | None, ...], tools: tuple[int | None, ...] = ()) -> Prompt:
    """With parts that end there, the last one one token before its message."""
    boundaries = tuple(Boundaries(end[-1] + 1 if end and end[-1] else None, end) for end in ends)
    return Prompt(np.zeros(100, dtype=np.int32), "", boundaries, tools)


def test_messages_end_where_openais_rules_look() -> None:
    messages = [SYSTEM, Message("developer"), USER, ASSISTANT, TOOL, TOOL, ASSISTANT, SYSTEM, USER]
    blocks = [Ending(0), Ending(0, message=2, mark="30m")]
    endings = with_message_ends(blocks, messages, "key")
    assert [(e.message, e.number, e.kind) for e in endings] == [
        (None, 0, "block"),
        (1, None, "developer"),
        (2, 0, "block"),
        (2, None, "message"),
        (5, None, "message"),
        (8, None, "message"),
    ]
    assert {e.match for e in endings if e.kind != "block"} == {"key"}


def test_what_is_hidden_lies_where_the_last_known_one_does_and_reads_nothing() -> None:
    endings = [
        Ending(0, message=0),
        Ending(message=1, hidden=True),
        Ending(message=1, hidden=True, mark="5m"),
        Ending(1, message=1),
        Ending(0, message=1),
        Ending(5, message=1),
    ]
    found = outline(endings, [USER, ASSISTANT], prompt((10,), (20, 30))).boundaries
    assert [b.position for b in found] == [10, 10, 10, 30, 30, 30]
    assert [b.match for b in found] == ["", "-", "", "", "", "-"]


def test_tools_among_the_messages_have_no_place() -> None:
    endings = [Ending(0), Ending(0, message=0), Ending(0, message=1)]
    messages = [SYSTEM, USER]
    before = outline(endings, messages, prompt((10,), (30,), tools=(5,))).boundaries
    within = outline(endings, messages, prompt((10,), (30,), tools=(15,))).boundaries
    behind = outline(endings, messages, prompt((10,), (30,), tools=(40,))).boundaries
    assert [b.position for b in before] == [5, 10, 30]
    # A change of tools invalidates what the protocol has behind them.
    assert [b.position for b in within] == [15, 15, 30]
    assert [b.position for b in behind] == [0, 10, 30]
