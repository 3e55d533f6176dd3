"""OpenAI's Responses: ``POST /v1/responses``, and what is stored of them.

A request brings the whole conversation, or names a stored response that it continues, or items of
stored responses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from anaphora.answer.pieces import Call, Piece, Reasoning, Text, merged
from anaphora.api import formats, openai_diagnostics, openai_items, streams
from anaphora.api.edge import Body, Count, Off, TopLogprobs, query
from anaphora.api.endpoint import Endpoint, asks, computed, takes
from anaphora.api.errors import ApiError
from anaphora.api.formats import TEXT, Format, ResponsesFormat
from anaphora.api.generation import Generation, thinking, tool
from anaphora.api.openai_caching import Caching, CachingBody, written_by_ttl
from anaphora.api.openai_chat import Verbosity
from anaphora.api.openai_diagnostics import Likeness
from anaphora.api.openai_events import ResponseEvents, replay
from anaphora.api.openai_items import Item, ItemReference
from anaphora.api.openai_logprobs import Wording
from anaphora.api.replies import DeletedResponse, InputItems, ResponseObject
from anaphora.api.serving import Answer
from anaphora.api.tool_choice import Choice, ToolChoice, forced
from anaphora.engine.protocol import Done, Grammar, Sampling, Started
from anaphora.errors import UnavailableError
from anaphora.keys import Tenant
from anaphora.prompt.conversation import Conversation, Message, Plain, TextPart
from anaphora.responses import StoredResponse


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_LOGPROBS = "message.output_text.logprobs"
_EVENTS = "The object of a `response.…` event."

Items = Annotated[list[Item], Field(min_length=1)]


class Tool(Body):
    """A function, or a tool whose input is free text. The provider's own tools are left out."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @property
    def shown(self) -> bool:
        return self.type in ("function", "custom") and self.name is not None

    def without_effect(self) -> Iterable[str]:
        return super().without_effect() if self.shown else [self.type]


class TextOptions(Body):
    format: ResponsesFormat | None = None
    verbosity: Verbosity | None = None


class ReasoningOptions(Body):
    effort: str | None = None


class CacheOptions(Body):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool | None = None
    """Only fill the cache."""
    comparison_response_id: str | None = None
    """Tell where this request parts from that stored response."""


class ResponsesRequest(CachingBody):
    model: str | None = None
    input: Annotated[Items, BeforeValidator(_as_items, json_schema_input_type=str | Items)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: TopLogprobs | None = None
    include: list[str] | None = None
    """Of what else to tell: of nothing but log probabilities can it be."""
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    background: Off = None
    conversation: None = None
    prompt: None = None
    store: bool | None = None
    """Whether a later request may continue this one; ``None``: it may."""
    previous_response_id: str | None = None
    prompt_cache_options: CacheOptions | None = None
    metadata: dict[str, str] | None = None
    """Only sent back."""
    chat_template_kwargs: dict[str, Any] | None = None

    def without_effect(self) -> Iterable[str]:
        unknown = any(one != _LOGPROBS for one in self.include or ())
        untold = self.top_logprobs and self.likeliest is None
        names = {"include": unknown, "top_logprobs": untold}
        return [*super().without_effect(), *(name for name, holds in names.items() if holds)]

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to tell; ``None``: no log probabilities."""
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else None

    @property
    def cache_options(self) -> CacheOptions:
        return self.prompt_cache_options or CacheOptions()

    @property
    def caching(self) -> Caching:
        effort = self.reasoning.effort if self.reasoning else None
        verbosity = self.text.verbosity if self.text else None
        options = self.cache_options
        conditions = self.conditions(effort, verbosity, formats.matched(self.format))
        return Caching(conditions, options.mode, options.ttl)

    @property
    def format(self) -> Format:
        return (self.text and self.text.format) or TEXT

    @property
    def shown_tools(self) -> list[Plain]:
        return [_tool(item) for item in self.tools or () if item.shown]

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of those whose input is free text."""
        custom = (item for item in self.tools or () if item.shown and item.type == "custom")
        return frozenset(item.name for item in custom if item.name is not None)

    @property
    def echo(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        options = self.cache_options
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "prompt_cache_options": {
                "mode": options.mode or "implicit",
                "ttl": options.ttl or "30m",
                "comparison_response_id": options.comparison_response_id,
            },
            "prompt_cache_retention": self.prompt_cache_retention,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": formats.echoed(self.format)},
            "tool_choice": _chosen(self.tool_choice),
            "tools": [_echoed(item) for item in self.tools or () if item.shown],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
        }


class ResponseQuery(Body):
    """How to give a stored response."""

    stream: bool = False
    """As the events of its stream."""
    starting_after: int = -1
    """The number of the event before them."""


class ItemsQuery(Body):
    """Which items of the input to list."""

    after: str | None = None
    """The id of the item before them."""
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


@dataclass(frozen=True, slots=True)
class Turn:
    """A request, and the conversation that it continues."""

    body: ResponsesRequest
    before: tuple[StoredResponse, ...]
    input: list[Item]
    """That of the request, with what it refers to in its place."""

    @property
    def model(self) -> str | None:
        return self.body.model

    @property
    def stream(self) -> bool | None:
        return self.body.stream

    @property
    def answer_grammar(self) -> Grammar | None:
        return self.body.format.grammar

    @property
    def generation(self) -> Generation:
        body, caching = self.body, self.body.caching
        earlier = openai_items.parse([item for turn in self.before for item in turn.items])
        messages: list[Message] = []
        if body.instructions:
            messages.append(Message("system", (TextPart(body.instructions),)))
        marked = openai_items.read([*earlier, *self.input], messages, caching)
        kwargs = body.chat_template_kwargs or {}
        return Generation(
            Conversation(tuple(messages), tuple(body.shown_tools)),
            0 if body.cache_options.prewarm else body.max_output_tokens,
            Sampling(**body.given("temperature", "top_p")),
            self.answer_grammar,
            {**thinking(body.reasoning.effort if body.reasoning else None), **kwargs},
            endings=caching.endings(marked, messages),
            implicit=caching.implicit,
            conditions=caching.conditions.given,
            calls=body.calls(body.tool_choice),
            forced=forced(body.tool_choice, body.shown_tools),
            logprobs=body.likeliest,
        )


class Exchange:
    """A turn, its answer, and what is told and kept of them."""

    def __init__(
        self, api: Endpoint, tenant: Tenant, turn: Turn, compared: Likeness | Plain, answer: Answer
    ) -> None:
        """``compared`` is what to compare with, or what to say where that can't be."""
        self.answer = answer
        self.custom = turn.body.custom_tools
        self.head = {
            "id": f"resp_{answer.request.id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": answer.model_name,
            **turn.body.echo,
            "store": turn.body.store is not False and api.responses is not None,
        }
        self._api = api
        self._tenant = tenant
        self._turn = turn
        self._compared = compared
        asked = turn.body.likeliest is not None
        self._wording = Wording(answer.model.vocabulary) if asked else None

    def logprobs(self, piece: Piece) -> list[Plain]:
        """How likely the tokens of ``piece`` were, where that is asked for."""
        if self._wording is None or not isinstance(piece, Text):
            return []
        return self._wording.listed(piece.logprobs)

    async def finish(self, pieces: Sequence[Piece], started: Started, done: Done) -> dict[str, Any]:
        """The finished response. It is stored by then, where it is to be and can be.

        :param pieces: the answer, as it was cut for events.
        """
        body, whole = self._turn.body, merged(pieces)
        cut = done.reason == "length" and not body.cache_options.prewarm
        status = "incomplete" if cut else "completed"
        likeness = self._likeness(started)
        reply = {
            **self.head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [
                openai_items.output(
                    piece,
                    self.answer.request.id,
                    number,
                    self.custom,
                    status if number == len(whole) - 1 else "completed",
                    self.logprobs(piece),
                )
                for number, piece in enumerate(whole)
            ],
            "prompt_cache_diagnostics": self._diagnostics(likeness, started),
            "usage": _usage(started, done, self.answer.reasoning_tokens),
        }
        if reply["store"] and self._api.responses is not None:
            stored = StoredResponse(
                reply["id"],
                body.previous_response_id,
                openai_items.listed(self._turn.input, self.answer.request.id),
                reply,
                asdict(likeness),
                [_length(piece) for piece in pieces if not isinstance(piece, Call)],
            )
            if not await self._api.responses.save(self._tenant.name, stored):
                self._api.serving.metrics.count_lost_response(self._tenant.name)
                reply["store"] = False
        return reply

    def _likeness(self, started: Started) -> Likeness:
        return openai_diagnostics.likeness(
            self._api.profile(self._tenant).name,
            self.answer.model_name,
            self._turn.body.caching.conditions,
            self._turn.body.shown_tools,
            self.answer.request.tokens,
            started.read_tokens + started.written_tokens,
        )

    def _diagnostics(self, likeness: Likeness, started: Started) -> Plain:
        if not isinstance(self._compared, Likeness):
            return self._compared
        tokens = self.answer.request.tokens
        return openai_diagnostics.diagnose(self._compared, likeness, tokens, started.read_tokens)


def router(api: Endpoint) -> APIRouter:
    routes = APIRouter()
    one = "/v1/responses/{response_id}"

    @routes.post(
        "/v1/responses",
        response_model=ResponseObject,
        openapi_extra=takes(ResponsesRequest, _EVENTS),
    )
    async def create_response(request: Request) -> Response:
        """The next answer in a conversation, in the protocol of OpenAI's Responses."""
        body, tenant, headers = await api.read(request, ResponsesRequest)
        before = await _conversation(api, tenant, body.previous_response_id)
        compared = await _compared(api, tenant, body.cache_options.comparison_response_id)
        turn = Turn(body, before, await _resolved(api, tenant, body.input, before))
        quick = turn.input is body.input and not before
        answer = await api.submit(request, turn, tenant, quick=quick)
        exchange = Exchange(api, tenant, turn, compared, answer)
        if body.stream:
            events = _events(exchange, api.options.heartbeat)
            return streams.EventStream(events, answer.close, headers)
        finished = await api.whole(request, answer)
        reply = await exchange.finish(finished.pieces, finished.started, finished.done)
        return JSONResponse(reply, headers={**headers, **computed(finished.done)})

    @routes.get(one, response_model=ResponseObject, openapi_extra=asks(ResponseQuery, _EVENTS))
    async def retrieve_response(request: Request, response_id: str) -> Response:
        """A stored response, as it was answered."""
        tenant = api.tenant(request)
        wanted = query(request, ResponseQuery)
        stored = api.responses and await api.responses.find(tenant.name, response_id)
        if not stored:
            raise _not_found(response_id)
        if not wanted.stream:
            return JSONResponse(stored.response)
        events = await asyncio.to_thread(b"".join, replay(stored, wanted.starting_after))
        headers = {"cache-control": "no-cache"}
        return Response(events, headers=headers, media_type=streams.EventStream.media_type)

    @routes.delete(one, response_model=DeletedResponse)
    async def delete_response(request: Request, response_id: str) -> Response:
        """Forget a stored response."""
        tenant = api.tenant(request)
        if not api.responses or not await api.responses.delete(tenant.name, response_id):
            raise _not_found(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @routes.get(f"{one}/input_items", response_model=InputItems, openapi_extra=asks(ItemsQuery))
    async def list_input_items(request: Request, response_id: str) -> Response:
        """The conversation that a stored response is the answer to, without instructions."""
        tenant = api.tenant(request)
        wanted = query(request, ItemsQuery)
        turns = api.responses and await api.responses.conversation(tenant.name, response_id)
        if not turns:
            raise _not_found(response_id)
        items = [item for turn in turns[:-1] for item in turn.items] + turns[-1].input
        if wanted.order == "desc":
            items.reverse()
        if wanted.after is not None:
            ids = [item["id"] for item in items]
            if wanted.after not in ids:
                raise ApiError(f"there is no item {wanted.after!r} in the list", param="after")
            items = items[ids.index(wanted.after) + 1 :]
        shown = items[: wanted.limit]
        ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
        none = {"first_id": None, "last_id": None}
        more = len(shown) < len(items)
        return JSONResponse({"object": "list", "data": shown, "has_more": more, **none, **ends})

    return routes


async def _conversation(
    api: Endpoint, tenant: Tenant, previous_id: str | None
) -> tuple[StoredResponse, ...]:
    """What a request continues. Raises :class:`ApiError` where it isn't there."""
    if previous_id is None:
        return ()
    turns = api.responses and await api.responses.conversation(tenant.name, previous_id)
    if not turns:
        raise ApiError(
            f"Previous response with id '{previous_id}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return tuple(turns)


async def _resolved(
    api: Endpoint, tenant: Tenant, items: list[Item], before: tuple[StoredResponse, ...]
) -> list[Item]:
    """``items`` with those they refer to in their places.

    Raises :class:`ApiError` where one isn't there, or is in the conversation already.
    """
    references = [item.id for item in items if isinstance(item, ItemReference)]
    if not references:
        return items
    there = {item["id"] for turn in before for item in turn.items}
    wanted: dict[str, list[str]] = {}
    for item_id in references:
        if item_id in there:
            raise ApiError(
                f"Duplicate item found with id {item_id}. "
                "Remove duplicate items from your input and try again.",
                param="input",
            )
        there.add(item_id)
        wanted.setdefault(openai_items.response_id(item_id), []).append(item_id)
    found = await api.responses.items(tenant.name, wanted) if api.responses else {}
    for item_id in references:
        if item_id not in found:
            raise ApiError(f"Item with id '{item_id}' not found.", status=404, param="input")
    put = iter(openai_items.parse([found[item_id] for item_id in references]))
    return [next(put) if isinstance(item, ItemReference) else item for item in items]


async def _compared(api: Endpoint, tenant: Tenant, response_id: str | None) -> Likeness | Plain:
    """What to compare a request with, or what to say where that can't be."""
    if response_id is None:
        return None
    try:
        stored = api.responses and await api.responses.find(tenant.name, response_id)
    except UnavailableError:  # a diagnosis never fails a request
        return openai_diagnostics.UNAVAILABLE
    return Likeness(**stored.likeness) if stored else openai_diagnostics.NOT_FOUND


def _not_found(response_id: str) -> ApiError:
    return ApiError(f"Response with id '{response_id}' not found.", status=404)


def _tool(item: Tool) -> Any:
    parameters = item.parameters
    if item.type == "custom":
        parameters = {"type": "object", "properties": {"input": {"type": "string"}}}
    return tool(item.name or "", item.description, parameters)


def _chosen(choice: Choice | None) -> Any:
    """``tool_choice`` as it was sent."""
    if isinstance(choice, Body):
        return choice.model_dump(exclude_unset=True)
    return choice or "auto"


def _echoed(item: Tool) -> dict[str, Any]:
    if item.type == "custom":
        return {"type": "custom", "name": item.name, "description": item.description}
    return {
        "type": "function",
        "name": item.name,
        "description": item.description,
        "parameters": item.parameters,
        "strict": False,
    }


def _length(piece: Text | Reasoning) -> int | tuple[int, int]:
    """In characters, and in tokens where how likely these were is told."""
    if isinstance(piece, Text) and piece.logprobs:
        return len(piece.text), len(piece.logprobs)
    return len(piece.text)


def _usage(started: Started, done: Done, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": started.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": started.read_tokens,
            "cache_write_tokens": started.written_tokens,
            "cache_write_tokens_details": written_by_ttl(started),
        },
        "output_tokens": done.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": started.prompt_tokens + done.generated_tokens,
    }


async def _events(exchange: Exchange, heartbeat: float) -> AsyncIterator[bytes]:
    events = ResponseEvents(exchange.head, exchange.answer.request.id, exchange.custom)
    for event in events.begin():
        yield event
    try:
        async for happened in exchange.answer.events(heartbeat):
            match happened:
                case None:
                    yield streams.COMMENT
                case Started() as started:
                    pass
                case Text() | Reasoning() | Call():
                    for event in events.add(happened, exchange.logprobs(happened)):
                        yield event
                case Done():
                    reply = await exchange.finish(events.pieces, started, happened)
                    for event in events.end(reply):
                        yield event
    except Exception as error:
        yield events.fail(error)
