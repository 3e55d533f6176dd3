"""From what a request says of its conversation to where prefixes of its prompt may end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile

from anaphora.profiles.outline import Boundary, Kind, Outline, Ttl
from anaphora.prompt.conversation import Message
from anaphora.prompt.tokens import Prompt


@dataclass(frozen=True, slots=True)
class Ending:
    """Something in a conversation that a reusable prefix may end with; nobody knows its tokens yet.

    A tool, where ``message`` is ``None``; else a part of that message, or the message itself.
    """

    number: int | None = None
    """Of the tool or of the part of the message's content; ``None``: the message's own end."""
    message: int | None = None
    hidden: bool = False
    """Whether its own end can't be told from what else is in the message."""
    kind: Kind = "block"
    match: str = ""
    mark: Ttl | None = None


def with_message_ends(
    blocks: Iterable[Ending], messages: Sequence[Message], match: str = ""
) -> tuple[Ending, ...]:
    """``blocks``, and behind those of each message its own end where OpenAI's rules need it."""
    ends = [
        Ending(message=number, kind=kind, match=match) for number, kind in _message_ends(messages)
    ]
    # Stable: what is in a message stays before its end.
    return tuple(sorted([*blocks, *ends], key=lambda e: -1 if e.message is None else e.message))


def outline(
    endings: Iterable[Ending],
    messages: Sequence[Message],
    prompt: Prompt,
    implicit: Ttl | None = None,
) -> Outline:
    """Where ``endings`` lie in ``prompt``, which is that of ``messages``.

    What the template doesn't show, and tools that it shows among the messages, lie where the last
    one before them does. Nothing is read there unless it is marked: it counts as a place to look
    at, but what lies there is another's.
    """
    boundaries: list[Boundary] = []
    reached, dialogue = 0, _dialogue(messages, prompt)
    for ending in endings:
        position = _position(ending, prompt)
        if ending.message is None and position is not None and position > dialogue:
            position = None
        reached = max(reached, position or 0)
        unread = position is None and ending.mark is None
        match = _UNREAD if unread else ending.match
        boundaries.append(Boundary(reached, ending.kind, match, ending.mark))
    return Outline(tuple(boundaries), implicit)


def _position(ending: Ending, prompt: Prompt) -> int | None:
    if ending.hidden:
        return None
    if ending.message is None:
        assert ending.number is not None
        return prompt.tools[ending.number]
    shown = prompt.boundaries[ending.message]
    if ending.number is None:
        return shown.end
    return shown.parts[ending.number] if ending.number < len(shown.parts) else None


def _dialogue(messages: Sequence[Message], prompt: Prompt) -> int:
    """Where the first known end behind the leading instructions lies; the prompt's, if none."""
    shown = dropwhile(
        lambda pair: pair[0].role in _INSTRUCTIONS, zip(messages, prompt.boundaries, strict=True)
    )
    ends = (end for _, place in shown for end in (*place.parts, place.end) if end is not None)
    return next(ends, len(prompt.tokens))


def _message_ends(messages: Sequence[Message]) -> Iterator[tuple[int, Kind]]:
    """User messages, the last tool message of a group, the last of the initial developer block."""
    opening = True
    for number, message in enumerate(messages):
        following = messages[number + 1].role if number + 1 < len(messages) else ""
        if message.role not in _INSTRUCTIONS:
            opening = False
        if message.role == "user" or (message.role in _RESULTS and following not in _RESULTS):
            yield number, "message"
        elif opening and following not in _INSTRUCTIONS:
            yield number, "developer"


_UNREAD = "-"
"""A match key that no entry has."""
_INSTRUCTIONS = ("system", "developer")
_RESULTS = ("tool", "function")
