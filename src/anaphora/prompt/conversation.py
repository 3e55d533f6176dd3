"""Conversations as plain data.

Two rules for odd input hold for every string of a conversation, keys included:

- A lone UTF-16 surrogate becomes U+FFFD and a surrogate pair becomes the character it stands for,
  so that an escaped emoji and a raw one are the same prompt.
- Content that is missing, ``None``, ``""`` or an empty list is the same: a message without text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anaphora.errors import PromptError

Plain = Any
"""What JSON can hold: strings, numbers, booleans, ``None``, lists and dicts of them."""


def well_formed(text: str) -> str:
    """``text`` without surrogates: pairs joined, lone ones replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", well_formed(self.text))


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. ``fields`` holds what else the template may look at, by the names it uses:
    ``tool_calls``, ``tool_call_id``, ``name``, ``reasoning_content``, ...
    """

    role: str
    content: tuple[TextPart, ...] = ()
    fields: Mapping[str, Plain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", well_formed(self.role))
        object.__setattr__(self, "fields", plain(self.fields))

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)

    @classmethod
    def parse(cls, data: Mapping[str, Plain]) -> Message:
        """A message from a dict in the common wire form.

        ``content`` is a string, ``None``, missing, or a list of strings and
        ``{"type": "text", "text": ...}``. Further members that are ``None`` or an empty list are
        left out, because templates only ask whether they exist.

        :raises PromptError: no role, a content part that is not text, or a value JSON cannot hold.
        """
        members = dict(data) if isinstance(data, Mapping) else {}
        if not isinstance(members.get("role"), str):
            raise PromptError("a message must be an object with a role")
        role, content = members.pop("role"), members.pop("content", None)
        present = {name: value for name, value in members.items() if value not in (None, [])}
        return cls(role, tuple(_parts(role, content)), present)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template renders: messages and, as the template expects them, tools."""

    messages: tuple[Message, ...]
    tools: tuple[Plain, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", tuple(plain(self.tools)))

    @classmethod
    def parse(
        cls,
        messages: Iterable[Message | Mapping[str, Plain]],
        tools: Iterable[Plain] | None = None,
    ) -> Conversation:
        """A conversation from messages and dicts; see :meth:`Message.parse`.

        :raises PromptError: as :meth:`Message.parse`.
        """
        return cls(
            tuple(m if isinstance(m, Message) else Message.parse(m) for m in messages),
            tuple(tools or ()),
        )


def _parts(role: str, content: Plain) -> Iterable[TextPart]:
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list | None):
        raise PromptError(f"the content of a {role} message must be a string or a list of parts")
    for number, part in enumerate(content or (), start=1):
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise PromptError(f"content part {number} of a {role} message is not text: {kind}")
        if text:
            yield TextPart(text)


def plain(value: Plain, depth: int = 0) -> Plain:
    """A copy in lists and dicts, with the rule for surrogates applied to every string.

    :raises PromptError: a value JSON cannot hold, or more than 100 levels of nesting.
    """
    if isinstance(value, str):
        return well_formed(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth > 100:
        raise PromptError("the conversation holds data nested more than 100 levels deep")
    if isinstance(value, Mapping):
        return {plain(k, depth + 1): plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    raise PromptError(f"the conversation holds a {type(value).__name__}, which is no JSON value")
