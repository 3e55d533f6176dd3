"""From a conversation to tokens, and where each message and content part ends among them.

The rendered text is tokenized whole, as the reference pipeline does it: it is cut only at the
template's own control tokens, never at the edges of messages or parts, so the tokens do not depend
on where somebody wants to know a position. Text from the conversation never becomes a control
token (:mod:`anaphora.prompt.guard`). What a vocabulary calls a *user-defined* token (``<think>``
in some models) is text by that measure and is recognized wherever it stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from anaphora.answer.forms import Form
from anaphora.cache.keys import Tokens
from anaphora.clock import Clock
from anaphora.errors import TemplateError
from anaphora.prompt.boundaries import Boundaries, Places
from anaphora.prompt.conversation import Conversation, Plain, plain, well_formed
from anaphora.prompt.guard import ControlTokens, Guard, strings, unused_characters
from anaphora.prompt.layout import Layout, PieceCache
from anaphora.prompt.marks import (
    ALPHABET,
    CallEdge,
    Edge,
    Marks,
    ToolEdge,
    behind,
    called_name,
    edges,
    with_called_name,
    with_mark,
)
from anaphora.prompt.template import CHATML, ChatTemplate, Ids
from anaphora.vocabulary import Vocabulary

_MARKED_RENDERINGS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    tokens: Tokens
    text: str
    """What the template wrote; a BOS token that was added does not show in it."""
    boundaries: tuple[Boundaries, ...]
    """One for each message. Positions never decrease."""
    tools: tuple[int | None, ...] = ()
    """Where each tool ends in the prompt, in tokens from its start, where that was asked for.
    ``None``: the template doesn't show. It is the last token boundary not after the end of the
    tool's JSON, or of its description where the template has another form for the rest."""
    generic_tools: bool = False
    """Whether tools are shown in the generic form of :mod:`anaphora.prompt.adapt`."""


def encode_text(vocabulary: Vocabulary, text: str) -> Tokens:
    """Tokens of a raw prompt: BOS where the model wants one; control tokens are not parsed."""
    tokens = vocabulary.encode(well_formed(text))
    if vocabulary.add_bos and vocabulary.bos is not None:
        tokens.insert(0, vocabulary.bos)
    return np.array(tokens, dtype=np.int32)


class Renderer:
    """Turns conversations into prompts for one model. Safe to use from several threads.

    :param template: source of the chat template; ``None``: ChatML.
    :raises TemplateError: the template does not compile.
    """

    def __init__(
        self, vocabulary: Vocabulary, template: str | None = None, *, clock: Clock | None = None
    ) -> None:
        texts = {token: text for text, token in vocabulary.control.items()}
        self._vocabulary = vocabulary
        self._control = ControlTokens(vocabulary.control)
        self._pieces = PieceCache(vocabulary)
        self._template = ChatTemplate(
            CHATML if template is None else template,
            bos="" if vocabulary.bos is None else texts.get(vocabulary.bos, ""),
            eos="" if vocabulary.eos is None else texts.get(vocabulary.eos, ""),
            clock=clock,
        )

    @property
    def shows_tools(self) -> bool:
        """Whether the template has a form of its own for tools, calls of them and results."""
        return self._template.example is not None

    @property
    def ids(self) -> Ids:
        """Which ids of calls the template takes."""
        return self._template.ids

    @property
    def reasoning_field(self) -> str:
        """The member of a message in which the template looks for reasoning."""
        return self._template.reasoning_field

    @cached_property
    def form(self) -> Form:
        """How the model writes answers."""
        return Form.of(self._template.source, self._template.example)

    def render(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        options: Mapping[str, Plain] | None = None,
        tool_ends: bool = False,
    ) -> Prompt:
        """The prompt of ``conversation``.

        :param add_generation_prompt: end with the opening of the model's next answer.
        :param continue_final: end with the text of the last message, so that the model goes on
            with it. White space at its end stays where the template leaves it.
        :param options: further variables for the template (``enable_thinking``, ...).
        :param tool_ends: find out where each tool ends.
        :raises TemplateError: see :meth:`anaphora.prompt.template.ChatTemplate.render`; or the
            end of the last message's text cannot be told.
        :raises PromptError: the conversation leaves no character to guard it with.
        """
        request = _Request(
            self._template,
            self._control,
            conversation,
            add_generation_prompt,
            plain(options or {}),
            tool_ends=tool_ends,
        )
        guarded = request.render()
        positions = request.positions(guarded)
        tools = request.tool_ends(guarded, positions) if tool_ends else []
        if continue_final:
            guarded = guarded[: request.final_end(guarded, positions)]
        layout = Layout(
            self._vocabulary, self._control, self._pieces, guarded, request.guard.character
        )
        of_messages = {
            edge: place for edge, place in positions.items() if not isinstance(edge, ToolEdge)
        }
        places = Places(guarded, conversation.messages, of_messages)
        found = places.boundaries(layout, self._vocabulary.end_of_generation)
        ends = (None if place is None else layout.token_at(place) for place in tools)
        return Prompt(layout.tokens, layout.text, found, tuple(ends))


class _Request:
    """One conversation on its way through the template, guarded."""

    def __init__(
        self,
        template: ChatTemplate,
        control: ControlTokens,
        conversation: Conversation,
        add_generation_prompt: bool,
        options: Mapping[str, Plain],
        *,
        tool_ends: bool,
    ) -> None:
        self._template = template
        self._messages = conversation.messages
        self._add_generation_prompt = add_generation_prompt
        # Every rendering of one request shows the same time.
        self._now = template.clock.now()
        texts = [template.source, *strings([conversation.tools, options])]
        for message in self._messages:
            texts += [message.role, *(part.text for part in message.content)]
            texts += strings(message.fields)
        guard, *alphabet = unused_characters(texts, 1 + ALPHABET)
        self.guard = Guard(control, guard)
        self._tools = self.guard.value(conversation.tools)
        self._options = self.guard.value(options)
        self._fields = [self.guard.value(message.fields) for message in self._messages]
        self._edges: list[Edge | CallEdge | ToolEdge] = [
            *edges(self._messages, joined=not template.wants_parts)
        ]
        if tool_ends:
            self._edges += [ToolEdge(number) for number in range(len(conversation.tools))]
        self._marks = Marks(alphabet, len(self._edges))

    def render(self, marked: Sequence[int] = ()) -> str:
        """The guarded text, with a mark at each of the edges given by number."""
        of_message: dict[int, list[int]] = {}
        tools = list(self._tools)
        for number in marked:
            edge = self._edges[number]
            if isinstance(edge, ToolEdge):
                tools[edge.tool] = with_mark(tools[edge.tool], self._marks.write(number))
            else:
                of_message.setdefault(edge.message, []).append(number)
        return self._template.render(
            [self._render_input(i, of_message.get(i, ())) for i in range(len(self._messages))],
            tools=tools,
            add_generation_prompt=self._add_generation_prompt,
            options=self._options,
            now=self._now,
        )

    def positions(self, guarded: str) -> dict[Edge | CallEdge | ToolEdge, int | None]:
        """Where in ``guarded`` the edges lie; ``None`` where the template dropped the mark.

        Some templates compare or cut content, so that a mark changes what they do. Then the
        edges are tried in halves, and those that cannot be marked are missing from the result.
        """
        accepted: list[int] = []
        found: dict[int, int] = {}
        waiting = [list(range(len(self._edges)))] if self._edges else []
        for _ in range(_MARKED_RENDERINGS):
            if not waiting:
                break
            group = waiting.pop(0)
            try:
                bare, places = self._marks.take_out(self.render([*accepted, *group]))
            except TemplateError:
                bare, places = "", {}
            if bare == guarded:
                accepted += group
                found = places
            elif len(group) > 1:
                middle = len(group) // 2
                waiting += [group[:middle], group[middle:]]
        return {self._edges[number]: found.get(number) for number in accepted}

    def tool_ends(
        self, guarded: str, positions: Mapping[Edge | CallEdge | ToolEdge, int | None]
    ) -> list[int | None]:
        """Where each tool ends in ``guarded``; ``None``: that cannot be told."""
        ends: list[int | None] = []
        for number, tool in enumerate(self._tools):
            place = positions.get(ToolEdge(number))
            if place is not None:
                mark = self._marks.write(0)
                written = json.dumps(with_mark(tool, mark), ensure_ascii=False)
                place = behind(guarded, place, written.partition(mark)[2])
            ends.append(place)
        return ends

    def final_end(
        self, guarded: str, positions: Mapping[Edge | CallEdge | ToolEdge, int | None]
    ) -> int:
        """Where the text of the last message ends in ``guarded``."""
        of_messages = [edge for edge in self._edges if not isinstance(edge, ToolEdge)]
        last = of_messages[-1] if of_messages else None
        if isinstance(last, Edge) and last.message == len(self._messages) - 1:
            place = positions.get(last)
            if place is not None:
                kept = guarded.startswith(last.space, place)
                return place + len(last.space) if kept else place
        raise TemplateError("the chat template shows the last message so that it can't go on")

    def _render_input(self, index: int, marked: Sequence[int]) -> dict[str, Any]:
        message, fields = self._messages[index], self._fields[index]
        marks: dict[int, list[tuple[int, str]]] = {}
        for number in marked:
            edge, mark = self._edges[number], self._marks.write(number)
            if isinstance(edge, Edge):
                part = edge.part if self._template.wants_parts else 0
                marks.setdefault(part, []).append((edge.offset, mark))
            else:
                fields = with_called_name(fields, (called_name(fields) or "") + mark)
        content: str | list[dict[str, str]]
        if self._template.wants_parts:
            content = [
                {"type": "text", "text": self.guard.text(part.text, marks.get(number, ()))}
                for number, part in enumerate(message.content)
            ]
        else:
            content = self.guard.text(message.text, marks.get(0, ()))
        return {**fields, "role": self.guard.role(message.role), "content": content}
