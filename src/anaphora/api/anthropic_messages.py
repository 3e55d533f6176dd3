"""Anthropic's Messages: ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from anaphora.api import streams
from anaphora.api.edge import Body, Count, TopK
from anaphora.api.endpoint import Endpoint, computed, takes
from anaphora.api.errors import ApiError, anthropic_body, as_api_error, request_id
from anaphora.api.generation import Generation, call, prompt_tokens, tool
from anaphora.api.replies import AnthropicMessage, TokenCount
from anaphora.api.serving import Answer
from anaphora.engine.protocol import Done, Sampling, Started
from anaphora.prompt.conversation import Conversation, Message, TextPart

_CUMULATIVE = (
    "input_tokens",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
    "output_tokens",
)
"""What ``message_delta`` repeats of the usage."""
_ERROR, _END_OF_ERROR = TextPart("<error>\n"), TextPart("\n</error>")


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class TextBlock(Body):
    type: Literal["text"]
    text: str


Texts = Annotated[
    list[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field(default_factory=list)
    is_error: bool | None = None

    @property
    def shown(self) -> tuple[TextPart, ...]:
        """What the model sees: a failure's text stands in ``<error>`` tags."""
        parts = _parts(self.content)
        return (_ERROR, *parts, _END_OF_ERROR) if self.is_error else parts


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class MessageBody(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Annotated[Block, Field(discriminator="type")]],
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
    ]


class Tool(Body):
    """A tool with a schema. The provider's own tools, which have none, are left out."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None

    def without_effect(self) -> Iterable[str]:
        return super().without_effect() if self.input_schema is not None else [self.type or "type"]


class ToolChoice(Body):
    type: Literal["auto", "none"]


class OutputConfig(Body):
    format: None = None


class CountRequest(Body):
    model: str | None = None
    messages: list[MessageBody] = Field(min_length=1)
    system: Texts | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None

    @property
    def conversation(self) -> Conversation:
        if self.messages[0].role == "system":
            raise ApiError("messages.0: the first message can't be a system one: use 'system'")
        messages = [message for body in self.messages for message in _messages(body)]
        if self.system:
            messages.insert(0, Message("system", _parts(self.system)))
        tools = (
            tool(item.name, item.description, item.input_schema)
            for item in self.tools or ()
            if item.input_schema is not None
        )
        return Conversation(tuple(messages), tuple(tools))


class MessagesRequest(CountRequest):
    max_tokens: Count
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: TopK | None = None

    @property
    def generation(self) -> Generation:
        if self.stream and self.max_tokens == 0:
            raise ApiError("max_tokens: 0 only fills the cache and can't be streamed")
        given = self.given("temperature", "top_p", "top_k")
        sampling = Sampling(**given, stop=tuple(self.stop_sequences or ()))
        return Generation(self.conversation, self.max_tokens, sampling)


def router(api: Endpoint) -> APIRouter:
    routes = APIRouter()

    @routes.post(
        "/v1/messages",
        response_model=AnthropicMessage,
        openapi_extra=takes(MessagesRequest, "An object from `message_start` to `message_stop`."),
    )
    async def create_message(request: Request) -> Response:
        """The next answer in a conversation, in the protocol of Anthropic's Messages."""
        body, tenant, headers = await api.read(request, MessagesRequest)
        answer = await api.submit(request, body, tenant)
        cut = answer.request.max_tokens < body.max_tokens
        head = {
            "id": f"msg_{answer.request.id}",
            "type": "message",
            "role": "assistant",
            "model": answer.model_name,
        }
        if body.stream:
            events = _events(answer, head, cut, api.options.heartbeat, request_id(request))
            return streams.EventStream(events, answer.close, headers)
        finished = await api.whole(request, answer)
        content = [{"type": "text", "text": finished.text}] if finished.text else []
        reply = {
            **head,
            "content": content,
            **_stop(finished.done, cut),
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

        generation = Generation(body.conversation, 0, Sampling())
        async with api.serving.model(body.model) as (model, _):
            tokens = await asyncio.to_thread(prompt_tokens, model, generation)
        return JSONResponse({"input_tokens": len(tokens)}, headers=headers)

    return routes


def _messages(body: MessageBody) -> Iterator[Message]:
    """One message of the wire; results of tools become messages of their own, in place."""
    texts: list[TextBlock] = []
    thoughts: list[str] = []
    calls: list[Any] = []
    results = False
    for block in body.content:
        match block:
            case TextBlock():
                texts.append(block)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                calls.append(call(block.id, block.name, block.input))
            case ToolResultBlock():
                if texts:
                    yield Message(body.role, _parts(texts))
                    texts = []
                yield Message("tool", block.shown, {"tool_call_id": block.tool_use_id})
                results = True
    fields = {"reasoning_content": "".join(thoughts), "tool_calls": calls}
    if texts or not results:
        present = {name: value for name, value in fields.items() if value}
        yield Message(body.role, _parts(texts), present)


def _parts(blocks: Iterable[TextBlock]) -> tuple[TextPart, ...]:
    return tuple(TextPart(block.text) for block in blocks if block.text)


def _usage(started: Started, output_tokens: int) -> dict[str, Any]:
    """Everything that was not read is written: nothing is left for ``input_tokens``."""
    read, written = started.read_tokens, started.written_tokens
    return {
        "input_tokens": started.prompt_tokens - read - written,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": written,
        "cache_creation": {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": 0},
        "output_tokens": output_tokens,
        "service_tier": "standard",
    }


def _stop(done: Done, cut: bool) -> dict[str, str | None]:
    """Why the answer ended; ``cut``: there was less room than the tokens asked for."""
    full = "model_context_window_exceeded" if cut else "max_tokens"
    reason = {"end": "end_turn", "stop": "stop_sequence", "length": full}[done.reason]
    return {"stop_reason": reason, "stop_sequence": done.stop_text}


async def _events(
    answer: Answer, head: dict[str, Any], cut: bool, heartbeat: float, request_id: str
) -> AsyncIterator[bytes]:
    def event(kind: str, **members: Any) -> bytes:
        return streams.event({"type": kind, **members}, kind)

    open_block = False
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
                        **head,
                        "content": [],
                        "stop_reason": None,
                        "stop_sequence": None,
                        "usage": _usage(started, 0),
                    }
                    yield event("message_start", message=message)
                case str():
                    if not open_block:
                        open_block = True
                        block = {"type": "text", "text": ""}
                        yield event("content_block_start", index=0, content_block=block)
                    delta = {"type": "text_delta", "text": happened}
                    yield event("content_block_delta", index=0, delta=delta)
                case Done():
                    if open_block:
                        yield event("content_block_stop", index=0)
                    counted = _usage(started, happened.generated_tokens)
                    usage = {name: counted[name] for name in _CUMULATIVE}
                    yield event("message_delta", delta=_stop(happened, cut), usage=usage)
                    yield event("message_stop")
    except Exception as error:
        yield streams.event(anthropic_body(as_api_error(error), request_id), "error")
