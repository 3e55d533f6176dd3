"""OpenAI's Chat Completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from anaphora.api import streams
from anaphora.api.edge import Body, Off
from anaphora.api.endpoint import Endpoint, computed, takes
from anaphora.api.errors import ApiError, as_api_error, openai_body
from anaphora.api.generation import Generation, call, tool
from anaphora.api.serving import Answer
from anaphora.engine.protocol import Done, FinishReason, Sampling, Started
from anaphora.prompt.conversation import Conversation, Message

FINISH: dict[FinishReason, str] = {"end": "stop", "stop": "stop", "length": "length"}


def as_parts(content: Any) -> Any:
    """Content as a list of parts, whichever form it came in."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [] if content is None else content


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def unforced(choice: Any) -> Any:
    """``tool_choice`` as a word; calls cannot be forced yet."""
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}:
            return "auto"
        case {"type": "allowed_tools", "mode": "auto"}:
            return "auto"
        case None | "auto" | "none":
            return choice
    raise ValueError("a call of a tool cannot be forced: use 'auto' or 'none'")


class TextPart(Body):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


Parts = Annotated[
    list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]],
    BeforeValidator(as_parts, json_schema_input_type=str | list[TextPart | RefusalPart] | None),
]
Stop = Annotated[
    list[str] | None, BeforeValidator(as_list, json_schema_input_type=str | list[str] | None)
]
ToolChoice = Annotated[
    Literal["auto", "none"] | None,
    BeforeValidator(unforced, json_schema_input_type=Literal["auto", "none"] | None),
]


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Parts = Field(default_factory=list)
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class ResponseFormat(Body):
    type: Literal["text"]


class StreamOptions(Body):
    include_usage: bool | None = None


class SamplingBody(Body):
    """What both of OpenAI's older endpoints take, and common extensions of theirs."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0)
    n: Literal[1] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, gt=0, le=100)

    @property
    def sampling(self) -> Sampling:
        given = {
            name: value
            for name in (
                *("temperature", "top_p", "top_k", "min_p", "seed"),
                *("frequency_penalty", "presence_penalty", "repeat_penalty"),
            )
            if (value := getattr(self, name)) is not None
        }
        try:
            bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        except ValueError as error:
            raise ApiError("logit_bias: its names must be token ids", param="logit_bias") from error
        return Sampling(**given, logit_bias=bias, stop=tuple(self.stop or ()))

    @property
    def with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(SamplingBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    functions: None = None
    function_call: Literal["auto", "none"] | None = None
    response_format: ResponseFormat | None = None
    logprobs: Off = None
    top_logprobs: Literal[0] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    web_search_options: None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def generation(self) -> Generation:
        limit = self.max_completion_tokens
        return Generation(
            Conversation(
                tuple(_message(message) for message in self.messages),
                tuple(
                    tool(item.function.name, item.function.description, item.function.parameters)
                    for item in self.tools or ()
                ),
            ),
            self.max_tokens if limit is None else limit,
            self.sampling,
            self.chat_template_kwargs or {},
        )


def usage(started: Started, done: Done) -> dict[str, Any]:
    """Tokens of a request; those read from and written to the cache are parts of the prompt's."""
    return {
        "prompt_tokens": started.prompt_tokens,
        "completion_tokens": done.generated_tokens,
        "total_tokens": started.prompt_tokens + done.generated_tokens,
        "prompt_tokens_details": {
            "cached_tokens": started.read_tokens,
            "cache_write_tokens": started.written_tokens,
        },
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def router(api: Endpoint) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        body, tenant, headers = await api.read(request, ChatRequest)
        answer = await api.submit(request, body, tenant)
        head = {
            "id": f"chatcmpl-{answer.request.id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": answer.model_name,
        }
        if body.stream:
            head["object"] = "chat.completion.chunk"
            chunks = _chunks(answer, head, body.with_usage, api.options.heartbeat)
            return streams.EventStream(chunks, answer.close, headers)
        finished = await api.whole(request, answer)
        message = {"role": "assistant", "content": finished.text, "refusal": None}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": FINISH[finished.done.reason],
        }
        reply = {**head, "choices": [choice], "usage": usage(finished.started, finished.done)}
        return JSONResponse(reply, headers={**headers, **computed(finished.done)})

    return routes


async def _chunks(
    answer: Answer, head: dict[str, Any], with_usage: bool, heartbeat: float
) -> AsyncIterator[bytes]:
    no_usage = {"usage": None} if with_usage else {}

    def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return streams.event({**head, "choices": [choice], **no_usage})

    try:
        async for event in answer.events(heartbeat):
            match event:
                case None:
                    yield streams.COMMENT
                case Started() as started:
                    yield chunk({"role": "assistant", "content": ""})
                case str():
                    yield chunk({"content": event})
                case Done():
                    yield chunk({}, FINISH[event.reason])
                    if with_usage:
                        last = {"choices": [], "usage": usage(started, event)}
                        yield streams.event({**head, **last})
        yield streams.DONE
    except Exception as error:
        yield streams.event(openai_body(as_api_error(error)))


def _message(message: ChatMessage) -> Message:
    texts = [p.text if isinstance(p, TextPart) else p.refusal for p in message.content]
    names = {"name", "tool_call_id", "reasoning_content", "reasoning", "thinking"}
    members = message.model_dump(include=names, exclude_none=True)
    if message.tool_calls:
        members["tool_calls"] = [
            call(item.id, item.function.name, item.function.arguments)
            for item in message.tool_calls
        ]
    return Message.parse({**members, "role": message.role, "content": texts})
