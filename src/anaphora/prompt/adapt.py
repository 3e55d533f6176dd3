"""What to do where a conversation asks for more than the model's template can show.

The same rules hold for every wire protocol:

- ``developer`` is another word for ``system``, ``function`` for ``tool``.
- A system message is shown where it stands. Where the template refuses it, drops it or would move
  it, system messages behind the first message (then the first one, too) become part of a user
  message in their place, inside ``<system>`` tags, with the user messages beside them.
- Tools, calls of them and their results are shown in the template's own form. Where it has none,
  they are shown in a generic one: tools as JSON lines in the system message, calls in
  ``<tool_call>`` and results in ``<tool_response>`` tags.
- A tool's result that doesn't say which tool it is from gets the name from the call.
- Arguments of a call that are a JSON text become the object they stand for.
- Calls and results are matched by id (:mod:`anaphora.prompt.calls`). Where the template wants ids
  of nine characters, or such that name the function, others are replaced by ones made of them.
- Reasoning is given to the template under the name it looks for. Where it refuses a call that has
  both reasoning and text, the reasoning is left out.
- A conversation that ends with an assistant message is continued from that message's text. One
  without text at the end is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from blake3 import blake3

from anaphora.cache.keys import Tokens
from anaphora.errors import PromptError, TemplateError
from anaphora.prompt import calls
from anaphora.prompt.boundaries import Boundaries
from anaphora.prompt.conversation import Conversation, Message, Plain, TextPart
from anaphora.prompt.template import Ids
from anaphora.prompt.tokens import Prompt, Renderer

_ROLES = {"developer": "system", "function": "tool"}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")
_NAMED_ID = re.compile(r"functions\..+:[0-9]+")
_GAP = TextPart("\n\n")
_STAND_IN = TextPart("A")
"""For a text that nobody knows yet."""
_NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class _Form:
    """A conversation in other words, and what became of its parts."""

    conversation: Conversation
    origins: tuple[tuple[int, ...], ...]
    """Which messages each message holds, by number."""
    tools: tuple[TextPart, ...] = ()
    """The tools, where they are shown as texts."""


def render(
    renderer: Renderer,
    conversation: Conversation,
    options: Mapping[str, Plain] | None = None,
    *,
    tool_ends: bool = False,
) -> Prompt:
    """The prompt that asks for the next answer in ``conversation``.

    Its boundaries are those of the messages of ``conversation``, whatever form they are shown in.

    :param options: further variables for the template.
    :param tool_ends: find out where each tool ends.
    :raises TemplateError: the template refuses the conversation in every form there is.
    :raises PromptError: there are no messages, the last one is a call of a tool, or calls and
        results don't match.
    """
    count = len(conversation.messages)
    conversation = _normal(renderer, conversation)
    while conversation.messages and _is_empty_answer(conversation.messages[-1]):
        conversation = replace(conversation, messages=conversation.messages[:-1])
    messages = conversation.messages
    if not messages:
        raise PromptError("there are no messages: give at least one")
    calls.check(conversation)
    continued = messages[-1].role == "assistant"
    if continued and "tool_calls" in messages[-1].fields:
        raise PromptError("the last message calls a tool: its result has to follow")
    prompt = _render(
        renderer,
        conversation,
        options,
        opened=not continued,
        continued=continued,
        tool_ends=tool_ends,
    )
    left_out = (Boundaries(None, ()),) * (count - len(messages))
    return replace(prompt, boundaries=(*prompt.boundaries, *left_out))


def answered(conversation: Conversation, answer: Message) -> Conversation:
    """``conversation`` with the answer to it, or with the rest of the one it ends with."""
    *before, last = conversation.messages
    if last.role != "assistant":
        return replace(conversation, messages=(*before, last, answer))
    whole = Message(last.role, (*last.content, *answer.content), {**last.fields, **answer.fields})
    return replace(conversation, messages=(*before, whole))


def following(
    renderer: Renderer, conversation: Conversation, options: Mapping[str, Plain] | None = None
) -> Tokens:
    """What prompts begin with that go on from ``conversation``, shape (n,).

    They do so with the result of the call that it ends with, or else with a user message. Whatever
    that says: the template's own opening of it is the end. Some templates show an answer in another
    way once a user message is behind it.

    Raises what :func:`render` does.
    """
    conversation = _normal(renderer, conversation)
    tokens = _before_stand_in(renderer, conversation, _next(conversation), options)
    if tokens is None:
        return _render(renderer, conversation, options, opened=False, continued=False).tokens
    return tokens


def _next(conversation: Conversation) -> Message:
    """A stand-in for the message that comes next."""
    match conversation.messages[-1].fields.get("tool_calls"):
        case [{"id": call_id, "function": {"name": name}}, *_]:
            return Message("tool", (_STAND_IN,), {"tool_call_id": call_id, "name": name})
    return Message("user", (_STAND_IN,))


def trunk(
    renderer: Renderer, conversation: Conversation, options: Mapping[str, Plain] | None = None
) -> Tokens:
    """What prompts with these tools and leading system messages begin with, shape (n,).

    It is taken from another conversation that has the same ones, so nothing of the other messages
    can be in it, wherever the template puts things. Empty where there are none of either, or where
    the template refuses such a conversation. A prompt may begin with a part of it only: templates
    can show the time, or make it depend on later messages.
    """
    conversation = _normal(renderer, conversation)
    head = takewhile(lambda message: message.role == "system", conversation.messages)
    instructions = replace(conversation, messages=tuple(head))
    if not instructions.messages and not instructions.tools:
        return _NO_TOKENS
    try:
        tokens = _before_stand_in(renderer, instructions, Message("user", (_STAND_IN,)), options)
    except (PromptError, TemplateError):
        return _NO_TOKENS
    return _NO_TOKENS if tokens is None else tokens


def _before_stand_in(
    renderer: Renderer,
    conversation: Conversation,
    stand_in: Message,
    options: Mapping[str, Plain] | None,
) -> Tokens | None:
    """The prompt of ``conversation`` with ``stand_in`` behind it, up to that one's text.

    ``None``: nobody knows where that begins.
    """
    longer = replace(conversation, messages=(*conversation.messages, stand_in))
    prompt = _render(renderer, longer, options, opened=True, continued=False)
    end = prompt.boundaries[-1].parts[-1]
    return None if end is None else prompt.tokens[: end - 1]  # without the stand-in's own token


def _render(
    renderer: Renderer,
    conversation: Conversation,
    options: Mapping[str, Plain] | None,
    *,
    opened: bool,
    continued: bool,
    tool_ends: bool = False,
) -> Prompt:
    """The prompt in the first form that the template shows."""
    refused: TemplateError | None = None
    for form in _forms(conversation, renderer.shows_tools, renderer.reasoning_field):
        try:
            prompt = renderer.render(
                form.conversation,
                add_generation_prompt=opened,
                continue_final=continued,
                options=options,
                tool_ends=tool_ends,
            )
        except TemplateError as error:
            refused = refused or error
        else:
            if _in_place(prompt, form.conversation.messages):
                return _as_given(prompt, form, conversation.messages)
    raise refused or TemplateError("the chat template doesn't show the system messages")


def _as_given(prompt: Prompt, form: _Form, messages: Sequence[Message]) -> Prompt:
    """``prompt``, shown in ``form``, with the boundaries of ``messages``.

    Where several are shown as one, each but the last ends with its text.
    """
    places = {
        id(part): place
        for message, shown in zip(form.conversation.messages, prompt.boundaries, strict=True)
        for part, place in zip(message.content, shown.parts, strict=True)
    }
    ends = {
        numbers[-1]: shown.end
        for numbers, shown in zip(form.origins, prompt.boundaries, strict=True)
        if numbers
    }
    boundaries = []
    for number, message in enumerate(messages):
        parts = tuple(places[id(part)] for part in message.content)
        last = parts[-1] if parts else None
        boundaries.append(Boundaries(ends.get(number, last), parts))
    tools = tuple(places[id(tool)] for tool in form.tools) or prompt.tools
    generic = bool(form.tools)
    return replace(prompt, boundaries=tuple(boundaries), tools=tools, generic_tools=generic)


def _normal(renderer: Renderer, conversation: Conversation) -> Conversation:
    names: dict[str, str] = {}
    ids = _CallIds(renderer.ids)
    messages = [
        _normal_message(message, names, ids, renderer.reasoning_field)
        for message in conversation.messages
    ]
    return replace(conversation, messages=tuple(messages))


class _CallIds:
    """Gives calls and results the ids that a template takes."""

    def __init__(self, wanted: Ids) -> None:
        self._wanted = wanted
        self._count = 0
        self._named: dict[str, str] = {}

    def call(self, made: Plain) -> Plain:
        """``made`` with its id."""
        match made:
            case {"id": str(given), "function": {"name": str(name)}}:
                if self._wanted == "named" and not _NAMED_ID.fullmatch(given):
                    self._named[given] = f"functions.{name}:{self._count}"
                self._count += 1
                return {**made, "id": self.of_result(given)}
        return made

    def of_result(self, given: Plain) -> Plain:
        """The id of the call that was ``given`` as this."""
        if not isinstance(given, str):
            return given
        if self._wanted == "short" and not _SHORT_ID.fullmatch(given):
            return blake3(given.encode()).hexdigest()[:9]
        return self._named.get(given, given)


def _normal_message(
    message: Message, names: dict[str, str], ids: _CallIds, reasoning_field: str
) -> Message:
    """``message``; ``names`` are those of the functions called so far, by the calls' ids."""
    role, fields = _ROLES.get(message.role, message.role), dict(message.fields)
    reasoning = [fields.pop(name) for name in _REASONING if name in fields]
    if reasoning and role == "assistant":
        fields[reasoning_field] = reasoning[0]
    if isinstance(made := fields.get("tool_calls"), list):
        made = [ids.call(_with_parsed_arguments(call)) for call in made]
        fields["tool_calls"] = made
        for call in made:
            match call:
                case {"id": str(call_id), "function": {"name": str(name)}}:
                    names[call_id] = name
    if "tool_call_id" in fields:
        fields["tool_call_id"] = ids.of_result(fields["tool_call_id"])
    of_call = str(fields.get("tool_call_id"))
    if role == "tool" and of_call in names:
        fields.setdefault("name", names[of_call])
    # Every part is an object of its own: it is found again by that in whatever it is shown in.
    return Message(role, tuple(TextPart(part.text) for part in message.content), fields)


def _is_empty_answer(message: Message) -> bool:
    called = "tool_calls" in message.fields
    return message.role == "assistant" and not called and not message.text.strip()


def _with_parsed_arguments(call: Plain) -> Plain:
    match call:
        case {"function": {"arguments": str(text)} as function}:
            try:
                arguments = json.loads(text)
            except (ValueError, RecursionError):
                return call
            if isinstance(arguments, dict):
                return {**call, "function": {**function, "arguments": arguments}}
    return call


def _forms(conversation: Conversation, shows_tools: bool, reasoning: str) -> Iterator[_Form]:
    """``conversation`` as it is and in other words, the most faithful form first."""
    with_tools = bool(conversation.tools) or any(
        message.role == "tool" or "tool_calls" in message.fields
        for message in conversation.messages
    )
    each = tuple((number,) for number in range(len(conversation.messages)))
    forms = []
    if shows_tools or not with_tools:
        forms = [_Form(form, each) for form in _with_less_reasoning(conversation, reasoning)]
    if with_tools:
        forms.append(_with_generic_tools(_Form(conversation, each)))
    yield from forms
    # A leading system message keeps its form as long as it can: what is cached begins with it.
    for start in (1, 0):
        for form in forms:
            if any(message.role == "system" for message in form.conversation.messages[start:]):
                yield _without_system_role(form, start)


def _with_less_reasoning(conversation: Conversation, reasoning: str) -> Iterator[Conversation]:
    """``conversation``, and without reasoning in calls with a text where there are any."""
    yield conversation
    messages = [
        replace(message, fields={k: v for k, v in message.fields.items() if k != reasoning})
        if message.content and "tool_calls" in message.fields
        else message
        for message in conversation.messages
    ]
    if messages != [*conversation.messages]:
        yield replace(conversation, messages=tuple(messages))


def _in_place(prompt: Prompt, messages: Sequence[Message]) -> bool:
    """Whether every system message is shown, behind what stands before it."""
    reached = 0
    for message, place in zip(messages, prompt.boundaries, strict=True):
        end = place.parts[-1] if place.parts else None
        text = message.text.strip()
        if message.role == "system" and text:
            # The end of a text cannot be told where the template changes what stands around it.
            shown = text in prompt.text if end is None else end > reached
            if not shown:
                return False
        reached = max(reached, end or 0, place.end or 0)
    return True


def _without_system_role(form: _Form, start: int) -> _Form:
    """``form`` without system messages from the one numbered ``start`` on."""
    messages = form.conversation.messages
    result, origins = list(messages[:start]), list(form.origins[:start])
    joins = False
    for message, origin in zip(messages[start:], form.origins[start:], strict=True):
        system = message.role == "system"
        if system:
            content = (TextPart("<system>\n"), *message.content, TextPart("\n</system>"))
            message = Message("user", content)
        behind_user = len(result) > start and result[-1].role == "user"
        if message.role == "user" and behind_user and (system or joins):
            before, origin = result.pop(), (*origins.pop(), *origin)
            fields = {**before.fields, **message.fields}
            message = Message("user", (*before.content, _GAP, *message.content), fields)
        result.append(message)
        origins.append(origin)
        joins = system
    conversation = replace(form.conversation, messages=tuple(result))
    return replace(form, conversation=conversation, origins=tuple(origins))


def _with_generic_tools(form: _Form) -> _Form:
    messages = [_with_generic_calls(message) for message in form.conversation.messages]
    origins = form.origins
    tools = tuple(TextPart(_json(_function(tool)) + "\n") for tool in form.conversation.tools)
    if tools:
        opening = TextPart("You may call the functions described here, one JSON object a line:\n")
        closing = TextPart(
            "To call one, write its name and arguments as JSON between tags:\n"
            '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
        )
        content = (opening, *tools, closing)
        if messages[0].role == "system":
            first = messages.pop(0)
            gap = (_GAP,) if first.content else ()
            content = (*first.content, *gap, *content)
        else:
            first, origins = Message("system"), ((), *origins)
        messages.insert(0, replace(first, content=content))
    return _Form(Conversation(tuple(messages)), origins, tools)


def _with_generic_calls(message: Message) -> Message:
    fields = {name: value for name, value in message.fields.items() if name != "tool_calls"}
    if message.role == "tool":
        opening, closing = TextPart("<tool_response>\n"), TextPart("\n</tool_response>")
        return Message("user", (opening, *message.content, closing))
    made = message.fields.get("tool_calls")
    if not isinstance(made, list):
        return message
    parts = list(message.content)
    for call in made:
        gap = "\n" if parts else ""
        parts.append(TextPart(f"{gap}<tool_call>\n{_json(_called(call))}\n</tool_call>"))
    return Message(message.role, tuple(parts), fields)


def _function(tool: Plain) -> Plain:
    return tool["function"] if isinstance(tool, dict) and "function" in tool else tool


def _called(call: Plain) -> Plain:
    function = _function(call)
    if isinstance(function, dict):
        return {name: function[name] for name in ("name", "arguments") if name in function}
    return function


def _json(value: Plain) -> str:
    return json.dumps(value, ensure_ascii=False)
