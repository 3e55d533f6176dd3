"""OpenAI's older completions of a raw prompt: ``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from anaphora.api import streams
from anaphora.api.edge import Off
from anaphora.api.endpoint import Endpoint, computed, takes
from anaphora.api.errors import as_api_error, openai_body
from anaphora.api.generation import Generation
from anaphora.api.openai_chat import FINISH, SamplingBody, usage
from anaphora.api.serving import Answer
from anaphora.engine.protocol import Done, Started
from anaphora.errors import PromptError

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's own."""


_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_OneText = Annotated[list[_Text], Field(min_length=1, max_length=1)]
_OneIds = Annotated[list[_Ids], Field(min_length=1, max_length=1)]


def _one_prompt(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError("several prompts in one request are not supported: send one")
        value = value[0]
    numbers = isinstance(value, list) and all(type(item) is int for item in value)
    if not value or not (isinstance(value, str) or numbers):
        raise ValueError("the prompt must be a text or a list of token ids, and not empty")
    return value


class CompletionRequest(SamplingBody):
    prompt: Annotated[
        str | list[int],
        BeforeValidator(_one_prompt, json_schema_input_type=_Text | _Ids | _OneText | _OneIds),
    ]
    """Text, which never becomes a control token, or token ids; a list of one of them."""
    best_of: Literal[1] | None = None
    echo: Off = None
    logprobs: None = None
    suffix: Literal[""] | None = None

    @property
    def generation(self) -> Generation:
        wanted = _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if isinstance(self.prompt, str):
            return Generation(self.prompt, wanted, self.sampling)
        try:
            tokens = np.array(self.prompt, dtype=np.int32)
        except OverflowError as error:
            raise PromptError("the prompt has token ids that no model has") from error
        return Generation(tokens, wanted, self.sampling)


def router(api: Endpoint) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=takes(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        body, tenant, headers = await api.read(request, CompletionRequest)
        answer = await api.submit(request, body, tenant)
        head = {
            "id": f"cmpl-{answer.request.id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": answer.model_name,
        }
        if body.stream:
            chunks = _chunks(answer, head, body.with_usage, api.options.heartbeat)
            return streams.EventStream(chunks, answer.close, headers)
        finished = await api.whole(request, answer)
        choice = _choice(finished.text, FINISH[finished.done.reason])
        reply = {**head, "choices": [choice], "usage": usage(finished.started, finished.done)}
        return JSONResponse(reply, headers={**headers, **computed(finished.done)})

    return routes


def _choice(text: str, finish: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


async def _chunks(
    answer: Answer, head: dict[str, Any], with_usage: bool, heartbeat: float
) -> AsyncIterator[bytes]:
    no_usage = {"usage": None} if with_usage else {}

    def chunk(text: str, finish: str | None = None) -> bytes:
        return streams.event({**head, "choices": [_choice(text, finish)], **no_usage})

    try:
        async for event in answer.events(heartbeat):
            match event:
                case None:
                    yield streams.COMMENT
                case Started() as started:
                    pass
                case str():
                    yield chunk(event)
                case Done():
                    yield chunk("", FINISH[event.reason])
                    if with_usage:
                        last = {"choices": [], "usage": usage(started, event)}
                        yield streams.event({**head, **last})
        yield streams.DONE
    except Exception as error:
        yield streams.event(openai_body(as_api_error(error)))
