"""What Chat Completions and Completions share: sampling, usage, and answers that are choices."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from anaphora.answer.pieces import Call, Piece, Reasoning, Text
from anaphora.api import streams
from anaphora.api.edge import Body, Count, Integer, One, TopK
from anaphora.api.endpoint import Endpoint, computed
from anaphora.api.errors import as_api_error, openai_body
from anaphora.api.generation import Generation
from anaphora.api.serving import Answer
from anaphora.engine.protocol import Done, FinishReason, Grammar, Sampling, Started

_FINISH: dict[FinishReason, str] = {"end": "stop", "stop": "stop", "length": "length"}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stop = Annotated[
    list[str] | None, BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None)
]
Bias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-1e30, le=1e30)]],
    Field(json_schema_extra={"additionalProperties": False}),
]
"""By token ids."""


class StreamOptions(Body):
    include_usage: bool | None = None


class ChoicesBody(Body):
    """What both endpoints take, and common extensions of theirs."""

    model: str | None = None
    max_tokens: Count | None = None
    n: One | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: Integer | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Bias | None = None
    top_k: TopK | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.001, le=100)
    gbnf: str | None = Field(None, alias="grammar")
    """What the answer has to be, in GBNF."""

    @property
    @abstractmethod
    def generation(self) -> Generation:
        """What is asked for."""

    @property
    def answer_grammar(self) -> Grammar | None:
        return None if self.gbnf is None else Grammar("gbnf", self.gbnf)

    @property
    def sampling(self) -> Sampling:
        given = self.given(
            *("temperature", "top_p", "top_k", "min_p", "seed"),
            *("frequency_penalty", "presence_penalty", "repeat_penalty"),
        )
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        return Sampling(**given, logit_bias=bias, stop=tuple(self.stop or ()))

    @property
    def with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


@dataclass(frozen=True, slots=True)
class Form:
    """How an endpoint words its answers."""

    prefix: str
    """Of their ids."""
    kind: str
    """``object`` of an answer."""
    chunk_kind: str
    """``object`` of a chunk of a stream."""
    whole: Callable[[Sequence[Piece]], dict[str, Any]]
    """A choice's own members, from the answer."""
    piece: Callable[[Piece, int], dict[str, Any]]
    """The same in a chunk, from a piece of the answer and the number of calls before it."""
    first: dict[str, Any] | None
    """The same in a chunk that comes before all text."""
    last: dict[str, Any]
    """The same in the chunk that ends the answer."""


def usage(started: Started, done: Done, reasoning_tokens: int) -> dict[str, Any]:
    """Tokens of a request; those read from and written to the cache are parts of the prompt's."""
    return {
        "prompt_tokens": started.prompt_tokens,
        "completion_tokens": done.generated_tokens,
        "total_tokens": started.prompt_tokens + done.generated_tokens,
        "prompt_tokens_details": {
            "cached_tokens": started.read_tokens,
            "cache_write_tokens": started.written_tokens,
        },
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


async def answer(api: Endpoint, request: Request, kind: type[ChoicesBody], form: Form) -> Response:
    """The answer to ``request``, whose body is of ``kind``, whole or as a stream."""
    body, tenant, headers = await api.read(request, kind)
    running = await api.submit(request, body, tenant)
    head = {
        "id": f"{form.prefix}-{running.request.id}",
        "object": form.chunk_kind if body.stream else form.kind,
        "created": int(time.time()),
        "model": running.model_name,
    }
    if body.stream:
        chunks = _chunks(running, form, head, body.with_usage, api.options.heartbeat)
        return streams.EventStream(chunks, running.close, headers)
    finished = await api.whole(request, running)
    finish = _finish(finished.done, any(isinstance(piece, Call) for piece in finished.pieces))
    choice = _choice(form.whole(finished.pieces), finish)
    counted = usage(finished.started, finished.done, finished.reasoning_tokens)
    reply = {**head, "choices": [choice], "usage": counted}
    return JSONResponse(reply, headers={**headers, **computed(finished.done)})


def _choice(members: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": 0, **members, "logprobs": None, "finish_reason": finish}


def _finish(done: Done, called: bool) -> str:
    finish = _FINISH[done.reason]
    return "tool_calls" if called and finish == "stop" else finish


async def _chunks(
    running: Answer, form: Form, head: dict[str, Any], with_usage: bool, heartbeat: float
) -> AsyncIterator[bytes]:
    no_usage = {"usage": None} if with_usage else {}
    calls = 0

    def chunk(members: dict[str, Any], finish: str | None = None) -> bytes:
        return streams.event({**head, "choices": [_choice(members, finish)], **no_usage})

    try:
        async for event in running.events(heartbeat):
            match event:
                case None:
                    yield streams.COMMENT
                case Started() as started:
                    if form.first is not None:
                        yield chunk(form.first)
                case Text() | Reasoning() | Call():
                    yield chunk(form.piece(event, calls))
                    calls += isinstance(event, Call)
                case Done():
                    yield chunk(form.last, _finish(event, calls > 0))
                    if with_usage:
                        counted = usage(started, event, running.reasoning_tokens)
                        last = {"choices": [], "usage": counted}
                        yield streams.event({**head, **last})
        yield streams.DONE
    except Exception as error:
        yield streams.event(openai_body(as_api_error(error)))
