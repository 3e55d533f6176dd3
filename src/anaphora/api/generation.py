"""What every wire protocol comes down to: a request to the engine, made from a conversation."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np

from anaphora.answer.forced import forced
from anaphora.answer.forms import Form
from anaphora.answer.pieces import Call, Piece, Reasoning, Text
from anaphora.answer.reader import Reader
from anaphora.api.errors import ApiError
from anaphora.api.outlines import Ending, outline
from anaphora.cache.index import common_prefix
from anaphora.cache.keys import Tokens
from anaphora.diagnose.prompts import Place, Span
from anaphora.diagnose.spans import spans
from anaphora.engine.constraint import check
from anaphora.engine.protocol import CacheHints, Grammar, Request, Sampling
from anaphora.errors import PromptTooLongError
from anaphora.keys import Tenant
from anaphora.model import Model
from anaphora.profiles import Local, Profile
from anaphora.profiles.outline import NO_OUTLINE, Outline, Ttl
from anaphora.prompt import adapt
from anaphora.prompt.conversation import Conversation, Message, Plain, TextPart
from anaphora.prompt.tokens import Prompt


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer wanted by somebody, still in words."""

    prompt: Conversation | Tokens | str
    """A conversation for the chat template, or a raw prompt."""
    max_tokens: int | None
    """``None``: as many as there is room for."""
    sampling: Sampling
    grammar: Grammar | None = None
    """What the answer has to be."""
    options: Mapping[str, Plain] = field(default_factory=dict)
    """Further variables for the chat template."""
    endings: tuple[Ending, ...] = ()
    """What prefixes of the prompt may end with, in the order of the prompt."""
    implicit: Ttl | None = None
    """Lifetime of the breakpoint that OpenAI's rules manage; ``None``: only explicit ones."""
    rules: tuple[str, ...] = ()
    """Names of the rules for volatile text that were applied to the prompt."""
    conditions: Mapping[str, Plain] = field(default_factory=dict)
    """What prefixes have to match on besides tokens, without defaults."""
    calls: Literal["none", "one", "any"] = "any"
    """How many calls of tools the answer may have. With ``none`` they are text; with ``one`` a call
    is the end."""
    forced: tuple[str, ...] = ()
    """Names of tools: the answer has to be calls of these. None: it may be anything."""
    logprobs: int | None = None
    """Tell how likely the tokens of the answer's text were, and so many of the likeliest ones."""
    choices: int = 1
    """How many answers are wanted."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A generation in the engine's terms."""

    generation: Generation
    request: Request
    reader: Callable[[], Reader]
    """Makes one for the text of an answer."""
    next_turn: Callable[[Sequence[Piece]], Request | None]
    """What to compute in idle time once the answer is known: the conversation as the next turn
    will show it, which may differ from the tokens that were generated."""
    spans: tuple[Span, ...]
    """What of the conversation the stretches of the prompt are from."""


def tool(name: str, description: str | None, parameters: Plain | None) -> Plain:
    """A tool in the form templates expect."""
    members = {"name": name, "description": description, "parameters": parameters}
    given = {name: value for name, value in members.items() if value is not None}
    return {"type": "function", "function": given}


def call(call_id: str | None, name: str, arguments: Plain) -> Plain:
    """A call of a tool in the form templates expect."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def thinking(effort: str | None, thinks: bool | None = None) -> dict[str, Plain]:
    """What templates are told of how much to think, under the names that they have for it.

    :param thinks: whether to think at all; ``None``: that depends on the effort, and without one on
        the template.
    """
    if thinks is None and effort is not None:
        thinks = effort != "none"
    told: dict[str, Plain] = {} if effort is None else {"reasoning_effort": effort}
    return told if thinks is None else {**told, "enable_thinking": thinks, "thinking": thinks}


def prompt_tokens(model: Model, generation: Generation) -> Tokens:
    """The tokens of the prompt, shape (n,).

    Raises :class:`~anaphora.errors.TemplateError` and :class:`~anaphora.errors.PromptError`.
    """
    return _rendered(model, generation).tokens


def _rendered(model: Model, generation: Generation) -> Prompt:
    """The prompt; a raw one has no places in it."""
    if isinstance(generation.prompt, Conversation):
        return adapt.render(model.renderer, generation.prompt, generation.options, tool_ends=True)
    return Prompt(model.tokenize(generation.prompt), "", ())


def _outline(generation: Generation, profile: Profile, prompt: Prompt) -> Outline:
    """Where prefixes of ``prompt`` may end, as far as that is of any account."""
    marked = any(ending.mark for ending in generation.endings)
    if not isinstance(generation.prompt, Conversation) or not generation.endings:
        return NO_OUTLINE
    if isinstance(profile, Local) and not marked:
        return NO_OUTLINE
    return outline(generation.endings, generation.prompt.messages, prompt, generation.implicit)


def prepare(
    model: Model,
    generation: Generation,
    tenant: Tenant,
    profile: Profile,
    *,
    request_id: str,
    strict: bool,
) -> Prepared:
    """What the engine is asked for, by the rules of ``profile``.

    ``max_tokens`` over the room that the prompt leaves is cut down to it, or refused where
    ``strict``.

    Raises :class:`~anaphora.errors.GrammarError` where the grammar can't be used,
    :class:`~anaphora.errors.PromptTooLongError` where the prompt itself does not fit, and what
    :func:`prompt_tokens` raises.
    """
    if generation.grammar is not None and not generation.forced:
        check(generation.grammar, model.vocabulary)
    prompt = _rendered(model, generation)
    tokens = prompt.tokens
    size = model.info.context_size
    room = size - len(tokens)
    if room < 0:
        raise PromptTooLongError(len(tokens), size)
    wanted = room if generation.max_tokens is None else generation.max_tokens
    if wanted > room and strict:
        raise ApiError(
            f"max_tokens is {wanted} and the prompt of {len(tokens)} tokens leaves room for "
            f"{room} in a context of {size}: ask for less",
            param="max_tokens",
        )
    trunk = _trunk(model, generation, tenant)

    def cache(prompt: Tokens) -> CacheHints:
        return CacheHints(tenant.segments(common_prefix(prompt, trunk)), profile=profile)

    hints = replace(cache(tokens), outline=_outline(generation, profile, prompt))
    reading = _reading(model, generation, prompt)
    request = Request(
        request_id,
        tokens,
        min(wanted, room),
        generation.sampling,
        hints,
        grammar=reading.grammar,
        shown=reading.shown,
        logprobs=generation.logprobs,
    )
    return Prepared(
        generation,
        request,
        reading.reader,
        lambda answer: _next_turn(model, generation, cache, answer),
        _spans(model, generation, prompt),
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    """How an answer comes to be read."""

    reader: Callable[[], Reader]
    shown: Mapping[int, bytes] = field(default_factory=dict)
    """The control tokens that show in its text."""
    grammar: Grammar | None = None


def _reading(model: Model, generation: Generation, prompt: Prompt) -> _Reading:
    """What a grammar of the request's holds is neither call nor reasoning, whatever it looks like.

    Where calls are forced there is no text that it could hold.
    """
    conversation, grammar = generation.prompt, generation.grammar
    if not isinstance(conversation, Conversation) or (grammar and not generation.forced):
        return _Reading(partial(Form().reader, "", {}, frozenset()), grammar=grammar)
    form = model.renderer.form
    if prompt.generic_tools:
        form = form.with_generic()
    tools = {} if generation.calls == "none" else _parameters(conversation.tools)
    first_only = generation.calls == "one"
    if generation.forced:
        tools = {name: tools[name] for name in generation.forced}
        answer = forced(form, prompt.text, tools, model.vocabulary, several=not first_only)
        form, grammar = answer.form, answer.grammar
    shown = form.shown(model.vocabulary.control, with_calls=bool(tools))
    hidden = frozenset(text.decode() for text in shown.values())
    reader = partial(form.reader, prompt.text, tools, hidden, first_call_only=first_only)
    return _Reading(reader, shown, grammar)


def _parameters(tools: Sequence[Plain]) -> dict[str, Plain]:
    """Schemas of the parameters of ``tools``, which are in the form of :func:`tool`, by name."""
    return {item["function"]["name"]: item["function"].get("parameters") for item in tools}


def message(pieces: Sequence[Piece]) -> Message:
    """An answer as a client will send it back."""
    content = [TextPart(piece.text) for piece in pieces if isinstance(piece, Text)]
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls = [
        call(piece.id, piece.name, piece.arguments) for piece in pieces if isinstance(piece, Call)
    ]
    fields = {"reasoning_content": thoughts, "tool_calls": calls}
    return Message("assistant", tuple(content), {k: v for k, v in fields.items() if v})


def _spans(model: Model, generation: Generation, prompt: Prompt) -> tuple[Span, ...]:
    if isinstance(generation.prompt, Conversation):
        return spans(generation.prompt, prompt, model.vocabulary)
    return (Span(0, len(prompt.tokens), Place("message", 1, name="prompt")),)


def _trunk(model: Model, generation: Generation, tenant: Tenant) -> Tokens:
    """What the tenant shares of this and the next prompt in its namespace, shape (n,)."""
    if tenant.shared is None or not isinstance(generation.prompt, Conversation):
        return np.empty(0, dtype=np.int32)
    return adapt.trunk(model.renderer, generation.prompt, generation.options)


def _next_turn(
    model: Model,
    generation: Generation,
    cache: Callable[[Tokens], CacheHints],
    answer: Sequence[Piece],
) -> Request | None:
    """A request that settles the turn; ``None`` where there is nothing to settle."""
    if not answer or not isinstance(generation.prompt, Conversation):
        return None
    answered = adapt.answered(generation.prompt, message(answer))
    tokens = model.opening(answered, generation.options)
    if tokens is None:
        return None
    return Request(uuid.uuid4().hex, tokens, 0, cache=cache(tokens), background=True)
