"""What Chat Completions and Completions share: sampling, usage, and answers that are choices."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from anaphora.answer.pieces import Call, Piece, Reasoning, Text, logprobs
from anaphora.api import streams
from anaphora.api.edge import Body, Choices, Count, Integer, TopK
from anaphora.api.endpoint import Endpoint, computed
from anaphora.api.errors import as_api_error, openai_body
from anaphora.api.generation import Generation
from anaphora.api.openai_logprobs import Wording
from anaphora.api.serving import Answer
from anaphora.engine.protocol import (
    Done,
    FinishReason,
    Grammar,
    Sampling,
    Started,
    TokenLogprob,
)

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
    n: Choices | None = None
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
    logprobs: Callable[[Wording, Iterable[TokenLogprob], int], dict[str, Any]]
    """How likely tokens were, and so many of the likeliest ones, where that is asked for."""


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
    told = _telling(running, form)
    choices = [
        _choice(number, form.whole(one.pieces), told(one.pieces), _finish(one.done, one.pieces))
        for number, one in enumerate(running.alternatives)
        if one.done is not None
    ]
    counted = usage(finished.started, finished.done, finished.reasoning_tokens)
    reply = {**head, "choices": choices, "usage": counted}
    return JSONResponse(reply, headers={**headers, **computed(finished.done)})


def _choice(
    index: int, members: dict[str, Any], told: dict[str, Any] | None, finish: str | None
) -> dict[str, Any]:
    return {"index": index, **members, "logprobs": told, "finish_reason": finish}


def _telling(running: Answer, form: Form) -> Callable[[Iterable[Piece]], dict[str, Any] | None]:
    """What tells how likely the tokens of pieces were, if that is asked for."""
    top = running.request.logprobs
    if top is None:
        return lambda pieces: None
    wording = Wording(running.model.vocabulary)
    return lambda pieces: form.logprobs(wording, logprobs(pieces), top)


def _finish(done: Done, pieces: Iterable[Piece]) -> str:
    finish = _FINISH[done.reason]
    called = any(isinstance(piece, Call) for piece in pieces)
    return "tool_calls" if called and finish == "stop" else finish


async def _chunks(
    running: Answer, form: Form, head: dict[str, Any], with_usage: bool, heartbeat: float
) -> AsyncIterator[bytes]:
    no_usage = {"usage": None} if with_usage else {}
    calls: Counter[int] = Counter()
    told = _telling(running, form)

    def chunk(
        index: int,
        members: dict[str, Any],
        told: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = _choice(index, members, told, finish)
        return streams.event({**head, "choices": [choice], **no_usage})

    try:
        async for index, event in running.choices(heartbeat):
            match event:
                case None:
                    yield streams.COMMENT
                case Started():
                    if form.first is not None:
                        yield chunk(index, form.first)
                case Text():
                    yield chunk(index, form.piece(event, 0), told([event]))
                case Reasoning():
                    yield chunk(index, form.piece(event, 0))
                case Call():
                    yield chunk(index, form.piece(event, calls[index]))
                    calls[index] += 1
                case Done():
                    pieces = running.alternatives[index].pieces
                    yield chunk(index, form.last, finish=_finish(event, pieces))
        started, done = running.started, running.done
        if with_usage and started is not None and done is not None:
            counted = usage(started, done, running.reasoning_tokens)
            yield streams.event({**head, "choices": [], "usage": counted})
        yield streams.DONE
    except Exception as error:
        yield streams.event(openai_body(as_api_error(error)))
