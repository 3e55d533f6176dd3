"""Which part of a request each stretch of its prompt is from."""

from __future__ import annotations

from collections.abc import Iterator

from anaphora.diagnose.prompts import Place, Span
from anaphora.prompt.conversation import Conversation, Plain
from anaphora.prompt.tokens import Prompt
from anaphora.vocabulary import Vocabulary

_INSTRUCTIONS = ("system", "developer")


def spans(conversation: Conversation, prompt: Prompt, vocabulary: Vocabulary) -> tuple[Span, ...]:
    """The stretches of ``prompt``, which is that of ``conversation``.

    Each begins where the one before ends, so what the template writes before a text belongs to it;
    the first one begins with its text. Parts whose end nobody knows belong to the next one.
    """
    found: list[Span] = []
    reached = _opening(conversation, prompt, vocabulary)
    for place, end in _ends(conversation, prompt):
        if end is not None and end > reached:
            found.append(Span(reached, end, place))
            reached = end
    return tuple(found)


def _ends(conversation: Conversation, prompt: Prompt) -> Iterator[tuple[Place, int | None]]:
    for number, (tool, end) in enumerate(
        zip(conversation.tools, prompt.tools, strict=True), start=1
    ):
        yield Place("tool", number, name=_name(tool)), end
    blocks = messages = 0
    for message, shown in zip(conversation.messages, prompt.boundaries, strict=True):
        instructions = message.role in _INSTRUCTIONS and not messages
        messages += not instructions
        several = len(message.content) > 1
        place = Place("system", blocks + 1)
        for part, end in enumerate(shown.parts, start=1):
            if instructions:
                blocks += 1
                place = Place("system", blocks)
            else:
                place = Place("message", messages, part if several else 0, message.role)
            yield place, end
        if not instructions and not shown.parts:
            place = Place("message", messages, name=message.role)
        yield place, shown.end


def _opening(conversation: Conversation, prompt: Prompt, vocabulary: Vocabulary) -> int:
    """Where the first text that is not the template's begins, in tokens; 0: nobody knows."""
    texts = [_name(tool) for tool in conversation.tools[:1]]
    texts += [part.text for message in conversation.messages for part in message.content]
    first = next((text.strip() for text in texts if text.strip()), "")
    start = prompt.text.find(first[:_ENOUGH]) if first else -1
    if start < 0:
        return 0
    control = {token: len(text.encode()) for text, token in vocabulary.control.items()}
    left = len(prompt.text[:start].encode())
    tokens = prompt.tokens[: left + 1].tolist()  # no text has more tokens than bytes
    position = 0
    if tokens and tokens[0] == vocabulary.bos and not _shows(prompt, vocabulary):
        position = 1  # one that was added does not show in the text
    while position < len(tokens):
        left -= len(vocabulary.piece(tokens[position])) or control.get(tokens[position], 0)
        if left < 0:
            break
        position += 1
    return position


_ENOUGH = 64
"""Characters of a text that tell where it begins."""


def _shows(prompt: Prompt, vocabulary: Vocabulary) -> bool:
    """Whether the template wrote the BOS token."""
    texts = (text for text, token in vocabulary.control.items() if token == vocabulary.bos)
    return any(prompt.text.startswith(text) for text in texts)


def _name(tool: Plain) -> str:
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    return ""
