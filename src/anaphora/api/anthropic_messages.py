"""Anthropic's Messages: ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from anaphora.answer.pieces import Call, Piece, Reasoning, Text
from anaphora.api import streams
from anaphora.api.anthropic_bodies import CountRequest, ToolChoice
from anaphora.api.anthropic_diagnostics import Diagnostics, Fingerprint
from anaphora.api.edge import Body, Count, TopK
from anaphora.api.endpoint import Endpoint, computed, takes
from anaphora.api.errors import ApiError, anthropic_body, as_api_error, request_id
from anaphora.api.generation import Generation, prompt_tokens
from anaphora.api.replies import AnthropicMessage, TokenCount
from anaphora.api.serving import Answer
from anaphora.api.tool_choice import names, present
from anaphora.engine.protocol import Done, Grammar, Sampling, Started
from anaphora.model import Model
from anaphora.profiles.outline import Ttl
from anaphora.prompt.conversation import Plain

_CUMULATIVE = (
    "input_tokens",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
    "output_tokens",
)
"""What ``message_delta`` repeats of the usage."""
_SIGNATURE = "anaphora"
"""Of all thinking: nobody checks it here, and clients expect one."""
_HOURS: tuple[Ttl, ...] = ("1h", "12h")
"""Lifetimes that are counted under one hour."""


class DiagnosticsBody(Body):
    previous_message_id: str | None = None


class MessagesRequest(CountRequest):
    max_tokens: Count
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: TopK | None = None
    diagnostics: DiagnosticsBody | None = None

    @property
    def answer_grammar(self) -> Grammar | None:
        wanted = self.output_config.format if self.output_config else None
        return None if wanted is None else Grammar.json_schema(wanted.schema_)

    @property
    def generation(self) -> Generation:
        reading = self.read()
        self._refuse()
        given = self.given("temperature", "top_p", "top_k")
        sampling = Sampling(**given, stop=tuple(self.stop_sequences or ()))
        return Generation(
            reading.conversation,
            self.max_tokens,
            sampling,
            self.answer_grammar,
            self.options,
            endings=reading.endings,
            implicit="30m",
            conditions=reading.conditions.given,
            calls=self.calls,
            forced=self._forced(reading.conversation.tools),
        )

    def _forced(self, tools: Sequence[Plain]) -> tuple[str, ...]:
        """The names of the tools one of which has to be called."""
        there = names(tools)
        match self.tool_choice:
            case ToolChoice(type="any"):
                return present(there, there)
            case ToolChoice(type="tool", name=name):
                return present((name or "",), there)
        return ()

    def _refuse(self) -> None:
        if self.max_tokens == 0:
            if self.stream:
                raise ApiError("max_tokens: 0 only fills the cache and can't be streamed")
            if self.thinking and self.thinking.type == "enabled":
                raise ApiError("max_tokens: 0 leaves nothing to think with: disable thinking")
            if self.output_config and self.output_config.format is not None:
                raise ApiError("max_tokens: 0 gives no answer: leave output_config.format out")
        if self.tool_choice and self.tool_choice.type in ("any", "tool"):
            if self.max_tokens == 0:
                raise ApiError("max_tokens: 0 gives no call: use tool_choice 'auto' or 'none'")
            if self.thinking and self.thinking.type == "enabled":
                raise ApiError("Thinking may not be enabled when tool_choice forces tool use.")


def router(api: Endpoint) -> APIRouter:
    routes = APIRouter()
    diagnostics = Diagnostics()

    @routes.post(
        "/v1/messages",
        response_model=AnthropicMessage,
        openapi_extra=takes(MessagesRequest, "An object from `message_start` to `message_stop`."),
    )
    async def create_message(request: Request) -> Response:
        """The next answer in a conversation, in the protocol of Anthropic's Messages."""
        body, tenant, headers = await api.read(request, MessagesRequest)
        asked = body.diagnostics
        seen = await asyncio.to_thread(Fingerprint.of, body) if asked else None
        answer = await api.submit(request, body, tenant)
        cut = answer.request.max_tokens < body.max_tokens
        head = {
            "id": f"msg_{answer.request.id}",
            "type": "message",
            "role": "assistant",
            "model": answer.model_name,
        }

        def begun(started: Started) -> dict[str, Any]:
            """What is known of the message once its cached prefix is there."""
            found = None
            if asked is not None and seen is not None:
                found = diagnostics.compare(
                    tenant.name,
                    head["id"],
                    answer.model_name,
                    seen,
                    started,
                    asked.previous_message_id,
                )
            return {**head, "diagnostics": found}

        if body.stream:
            events = _events(answer, begun, cut, api.options.heartbeat, request_id(request))
            return streams.EventStream(events, answer.close, headers)
        finished = await api.whole(request, answer)
        called = any(isinstance(piece, Call) for piece in finished.pieces)
        reply = {
            **begun(finished.started),
            "content": [_block(piece) for piece in finished.pieces],
            **_stop(finished.done, cut, called),
            "usage": _usage(finished.started, finished.done.generated_tokens),
        }
        return JSONResponse(reply, headers={**headers, **computed(finished.done)})

    @routes.post(
        "/v1/messages/count_tokens",
        response_model=TokenCount,
        openapi_extra=takes(CountRequest),
    )
    async def count_tokens(request: Request) -> Response:
        """How many tokens the prompt of a message has."""
        body, _, headers = await api.read(request, CountRequest)

        def count(model: Model) -> int:
            generation = Generation(body.read().conversation, 0, Sampling(), options=body.options)
            return len(prompt_tokens(model, api.without_volatile(request, generation)))

        async with api.serving.model(body.model) as (model, _):
            tokens = await asyncio.to_thread(count, model)
        return JSONResponse({"input_tokens": tokens}, headers=headers)

    return routes


def _usage(started: Started, output_tokens: int) -> dict[str, Any]:
    """What is neither read nor written is left for ``input_tokens``; the protocol has two lifetimes
    to count under: one hour or more, and whatever else."""
    written = started.written_tokens
    for_hours = sum(started.written_by_lifetime.get(ttl, 0) for ttl in _HOURS)
    return {
        "input_tokens": started.uncached_tokens,
        "cache_read_input_tokens": started.read_tokens,
        "cache_creation_input_tokens": written,
        "cache_creation": {
            "ephemeral_5m_input_tokens": written - for_hours,
            "ephemeral_1h_input_tokens": for_hours,
        },
        "output_tokens": output_tokens,
        "service_tier": "standard",
    }


def _stop(done: Done, cut: bool, called: bool) -> dict[str, str | None]:
    """Why the answer ended.

    :param cut: there was less room than the tokens asked for.
    :param called: it calls tools.
    """
    full = "model_context_window_exceeded" if cut else "max_tokens"
    end = "tool_use" if called else "end_turn"
    reason = {"end": end, "stop": "stop_sequence", "length": full}[done.reason]
    return {"stop_reason": reason, "stop_sequence": done.stop_text}


def _block(piece: Piece) -> dict[str, Any]:
    match piece:
        case Text():
            return {"type": "text", "text": piece.text}
        case Reasoning():
            return {"type": "thinking", "thinking": piece.text, "signature": _SIGNATURE}
        case Call():
            given = json.loads(piece.arguments)
            return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": given}


def _opening(piece: Piece) -> dict[str, Any]:
    """The block that ``piece`` is in before its first delta."""
    empty = {"text": "", "thinking": "", "signature": "", "input": {}}
    block = _block(piece)
    return {**block, **{name: value for name, value in empty.items() if name in block}}


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case Text():
            return {"type": "text_delta", "text": piece.text}
        case Reasoning():
            return {"type": "thinking_delta", "thinking": piece.text}
        case Call():
            return {"type": "input_json_delta", "partial_json": piece.arguments}


async def _events(
    answer: Answer,
    begun: Callable[[Started], dict[str, Any]],
    cut: bool,
    heartbeat: float,
    request_id: str,
) -> AsyncIterator[bytes]:
    def event(kind: str, **members: Any) -> bytes:
        return streams.event({"type": kind, **members}, kind)

    opened: type[Piece] | None = None
    index, called = -1, False

    def close() -> Iterator[bytes]:
        if opened is Reasoning:
            signed = {"type": "signature_delta", "signature": _SIGNATURE}
            yield event("content_block_delta", index=index, delta=signed)
        if opened is not None:
            yield event("content_block_stop", index=index)

    try:
        async for happened in answer.events(heartbeat):
            match happened:
                case None if answer.started is None:
                    yield streams.COMMENT
                case None:
                    yield event("ping")
                case Started() as started:
                    # What the cache did is known before the rest of the prompt is computed.
                    message = {
                        **begun(started),
                        "content": [],
                        "stop_reason": None,
                        "stop_sequence": None,
                        "usage": _usage(started, 0),
                    }
                    yield event("message_start", message=message)
                case Text() | Reasoning() | Call():
                    if opened is not type(happened) or isinstance(happened, Call):
                        for closing in close():
                            yield closing
                        opened, index = type(happened), index + 1
                        called = called or isinstance(happened, Call)
                        block = _opening(happened)
                        yield event("content_block_start", index=index, content_block=block)
                    yield event("content_block_delta", index=index, delta=_delta(happened))
                case Done():
                    for closing in close():
                        yield closing
                    counted = _usage(started, happened.generated_tokens)
                    usage = {name: counted[name] for name in _CUMULATIVE}
                    yield event("message_delta", delta=_stop(happened, cut, called), usage=usage)
                    yield event("message_stop")
    except Exception as error:
        yield streams.event(anthropic_body(as_api_error(error), request_id), "error")
