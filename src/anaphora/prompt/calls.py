"""Calls of tools and their results, matched by id.

The same rules hold for every wire protocol:

- Tools have different names, and the calls of one message different ids.
- Every call has one result, in any order, before the next assistant message. A result without an id
  is that of the first call that has none yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from anaphora.errors import PromptError
from anaphora.prompt.conversation import Conversation, Plain


def check(conversation: Conversation) -> None:
    """Raises :class:`~anaphora.errors.PromptError` where ``conversation`` breaks a rule.

    That the last message calls a tool is no matter of these.
    """
    names = [name for tool in conversation.tools if (name := _name(tool)) is not None]
    if (name := _repeated(names)) is not None:
        raise PromptError(f"two tools are called {name!r}: give each tool a name of its own")
    *_, last = conversation.messages
    waiting: list[str | None] = []
    for message in conversation.messages:
        if message.role == "assistant":
            _refuse_without_result(waiting)
            calls = message.fields.get("tool_calls")
            waiting = [_id(call) for call in calls] if isinstance(calls, list) else []
            if (name := _repeated(call for call in waiting if call is not None)) is not None:
                raise PromptError(f"two calls have the id {name!r}: give each an id of its own")
        elif message.role == "tool":
            call = message.fields.get("tool_call_id")
            match = call if call in waiting else None
            if not waiting or (match is None and call is not None and None not in waiting):
                raise PromptError(
                    f"there is a result of the call {call!r}, and no call of that id without "
                    "a result in the assistant message before it"
                )
            waiting.remove(match if call is not None else waiting[0])
    if last.role != "assistant":
        _refuse_without_result(waiting)


def _refuse_without_result(waiting: list[str | None]) -> None:
    if waiting:
        raise PromptError(
            f"the call {waiting[0]!r} has no result: send one before the next assistant message"
        )


def _repeated(values: Iterable[str]) -> str | None:
    return next((value for value, count in Counter(values).items() if count > 1), None)


def _id(call: Plain) -> str | None:
    given = call.get("id") if isinstance(call, dict) else None
    return given if isinstance(given, str) else None


def _name(tool: Plain) -> str | None:
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    return None
