"""Rules for text at the top of a prompt that changes from request to request.

A time stamp or a checksum in the system prompt ends the shared beginning there, and everything
behind it is computed again. A rule takes such text out, writes something constant in its place, or
moves it behind everything else, before the conversation is rendered.

Patterns are RE2's, which needs time in proportion to the text whatever the pattern, so that no
request can stall the server by its text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal, get_args

import re2

from anaphora.errors import ConfigError
from anaphora.prompt.conversation import Conversation, Message, TextPart

Action = Literal["remove", "replace", "move", "keep"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MEMBERS = ("name", "where", "pattern", "action", "text")


@dataclass(frozen=True, slots=True)
class Rule:
    """What to do with the text of a pattern, wherever it stands in a block.

    ``remove`` takes it out, ``replace`` writes ``text`` in its place, ``move`` puts it at the end
    of the last user message, and ``keep`` leaves it alone: to switch off a rule that is built in.
    """

    name: str
    """Letters, digits and ``._-``: it is shown in a response header."""
    pattern: str = ""
    action: Action = "remove"
    text: str = ""
    where: Literal["system"] = "system"
    """The system blocks before the first other message."""


BUILT_IN = (Rule("x-anthropic-billing-header", r"\Ax-anthropic-billing-header:[^\n]*\n*"),)
"""The line with version and checksum that coding agents put before their system prompt."""


@dataclass(frozen=True, slots=True)
class Applied:
    """A conversation after the rules."""

    conversation: Conversation
    rules: tuple[str, ...]
    """Names of the rules that found something, in their order."""


class VolatileRules:
    """The rules in force: those given, before them those built in that no given one is named like.

    :raises ConfigError: a rule has a bad name or pattern, or the name of another.
    """

    def __init__(self, rules: Iterable[Rule] = (), built_in: Iterable[Rule] = BUILT_IN) -> None:
        given = tuple(rules)
        names = [rule.name for rule in given]
        for name in names:
            if not _NAME.fullmatch(name):
                raise ConfigError(f"a rule can't be called {name!r}: use letters, digits and ._-")
            if names.count(name) > 1:
                raise ConfigError(f"two rules are called {name}: rename one")
        every = (*(rule for rule in built_in if rule.name not in names), *given)
        self._rules = [(rule, _compiled(rule)) for rule in every if rule.action != "keep"]

    @staticmethod
    def parse(data: object) -> VolatileRules:
        """The rules of a configuration file: a list of tables with the members of :class:`Rule`.

        :raises ConfigError: it is no such list; and as above.
        """
        if not isinstance(data, list) or not all(isinstance(item, Mapping) for item in data):
            raise ConfigError("volatile: write each rule under [[volatile]]")
        return VolatileRules(_rule(item, number) for number, item in enumerate(data, start=1))

    def apply(self, conversation: Conversation) -> Applied:
        """``conversation`` as the rules have it.

        No message and no content part is taken away, though one may be empty afterwards: numbers
        of blocks stay what they were. Moved text is one part more. Without a user message nothing
        is moved.
        """
        messages = list(conversation.messages)
        top = sum(1 for _ in takewhile(_is_system, messages))
        last_user = max((n for n, m in enumerate(messages) if m.role == "user"), default=None)
        applied: list[str] = []
        for rule, pattern in self._rules:
            if rule.action == "move" and last_user is None:
                continue
            found: list[str] = []
            for number in range(top):
                parts = tuple(
                    TextPart("".join(_rewritten(part.text, pattern, rule.text, found)))
                    for part in messages[number].content
                )
                messages[number] = replace(messages[number], content=parts)
            if found:
                applied.append(rule.name)
            if found and rule.action == "move" and last_user is not None:
                moved = TextPart("\n\n" + "\n".join(text.strip() for text in found))
                user = messages[last_user]
                messages[last_user] = replace(user, content=(*user.content, moved))
        if not applied:
            return Applied(conversation, ())
        return Applied(replace(conversation, messages=tuple(messages)), tuple(applied))


def _is_system(message: Message) -> bool:
    return message.role in ("system", "developer")


def _rewritten(text: str, pattern: Any, instead: str, found: list[str]) -> Iterator[str]:
    """The pieces of ``text`` with ``instead`` for each match; matches are added to ``found``."""
    done = 0
    for match in pattern.finditer(text):
        if match[0]:
            found.append(match[0])
            yield text[done : match.start()]
            yield instead
            done = match.end()
    yield text[done:]


def _compiled(rule: Rule) -> Any:
    options = re2.Options()
    options.log_errors = False
    if not rule.pattern:
        raise ConfigError(f"the rule {rule.name} has no pattern: give one")
    try:
        return re2.compile(rule.pattern, options)
    except re2.error as error:
        why = error.args[0].decode(errors="replace")
        raise ConfigError(
            f"the pattern of the rule {rule.name} can't be used ({why}): see RE2's syntax"
        ) from error


def _rule(data: Mapping[str, Any], number: int) -> Rule:
    place = f"volatile rule {number}"
    for key, value in data.items():
        if key not in _MEMBERS:
            near = difflib.get_close_matches(key, _MEMBERS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_MEMBERS)}"
            raise ConfigError(f"{place}: {key!r} means nothing here: {hint}")
        if not isinstance(value, str):
            raise ConfigError(f"{place}: {key} is {value!r}: use a text")
    if "name" not in data:
        raise ConfigError(f"{place}: name is missing")
    for key, choices in (("action", get_args(Action)), ("where", ("system",))):
        if data.get(key, choices[0]) not in choices:
            raise ConfigError(f"{place}: {key} is {data[key]!r}: use {', '.join(choices)}")
    if "text" in data and data.get("action") != "replace":
        raise ConfigError(f"{place}: text is for the action replace only: leave it out")
    return Rule(**data)
