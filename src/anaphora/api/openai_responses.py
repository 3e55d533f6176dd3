"""OpenAI's Responses without a store: ``POST /v1/responses``.

The whole conversation comes with every request. Reasoning items of earlier turns are left out.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from anaphora.api import streams
from anaphora.api.edge import Body, Count, Off, Zero
from anaphora.api.endpoint import Endpoint, computed, takes
from anaphora.api.errors import ApiError, as_api_error
from anaphora.api.generation import Generation, call, tool
from anaphora.api.openai_chat import ToolChoice
from anaphora.api.replies import ResponseObject
from anaphora.api.serving import Answer
from anaphora.engine.protocol import Done, Sampling, Started
from anaphora.prompt.conversation import Conversation, Message, TextPart


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _kind(item: Any) -> str:
    """The type of an item; messages may leave it out."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


class TextContent(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalContent(Body):
    type: Literal["refusal"]
    refusal: str


Content = Annotated[
    list[Annotated[TextContent | RefusalContent, Field(discriminator="type")]],
    BeforeValidator(_as_parts, json_schema_input_type=str | list[TextContent | RefusalContent]),
]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class CustomCallItem(Body):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class CustomOutputItem(Body):
    type: Literal["custom_tool_call_output"]
    call_id: str
    output: Content


class ReasoningItem(Body):
    type: Literal["reasoning"]


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CustomOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]

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


class TextFormat(Body):
    type: Literal["text"]


class TextOptions(Body):
    format: TextFormat | None = None


class ResponsesRequest(Body):
    model: str | None = None
    input: Annotated[Items, BeforeValidator(_as_items, json_schema_input_type=str | Items)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: Zero | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    background: Off = None
    conversation: None = None
    prompt: None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    """Only sent back."""

    @property
    def generation(self) -> Generation:
        if self.previous_response_id is not None:
            raise ApiError(
                f"Previous response with id {self.previous_response_id!r} not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        messages = _messages(self.input)
        if self.instructions:
            messages.insert(0, Message("system", (TextPart(self.instructions),)))
        tools = (_tool(item) for item in self.tools or () if item.shown)
        conversation = Conversation(tuple(messages), tuple(tools))
        sampling = Sampling(**self.given("temperature", "top_p"))
        return Generation(conversation, self.max_output_tokens, sampling)

    @property
    def echo(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": [_echoed(item) for item in self.tools or () if item.shown],
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
        }


def router(api: Endpoint) -> APIRouter:
    routes = APIRouter()

    @routes.post(
        "/v1/responses",
        response_model=ResponseObject,
        openapi_extra=takes(ResponsesRequest, "The object of a `response.…` event."),
    )
    async def create_response(request: Request) -> Response:
        """The next answer in a conversation, in the protocol of OpenAI's Responses."""
        body, tenant, headers = await api.read(request, ResponsesRequest)
        answer = await api.submit(request, body, tenant)
        head = {
            "id": f"resp_{answer.request.id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": answer.model_name,
            **body.echo,
        }
        item_id = f"msg_{answer.request.id}"
        if body.stream:
            events = _events(answer, head, item_id, api.options.heartbeat)
            return streams.EventStream(events, answer.close, headers)
        finished = await api.whole(request, answer)
        reply = _finished(head, item_id, finished.text, finished.started, finished.done)
        return JSONResponse(reply, headers={**headers, **computed(finished.done)})

    return routes


def _messages(items: Iterable[Item]) -> list[Message]:
    """Items as messages; calls that follow each other or a text belong to one message."""
    messages: list[Message] = []
    for item in items:
        match item:
            case MessageItem():
                messages.append(Message(item.role, _parts(item.content)))
            case FunctionCallItem():
                _add_call(messages, call(item.call_id, item.name, item.arguments))
            case CustomCallItem():
                _add_call(messages, call(item.call_id, item.name, {"input": item.input}))
            case FunctionOutputItem() | CustomOutputItem():
                fields = {"tool_call_id": item.call_id}
                messages.append(Message("tool", _parts(item.output), fields))
    return messages


def _add_call(messages: list[Message], made: Any) -> None:
    before = messages.pop() if messages and messages[-1].role == "assistant" else None
    content = before.content if before else ()
    calls = before.fields.get("tool_calls", []) if before else []
    messages.append(Message("assistant", content, {"tool_calls": [*calls, made]}))


def _parts(content: Iterable[TextContent | RefusalContent]) -> tuple[TextPart, ...]:
    texts = (part.text if isinstance(part, TextContent) else part.refusal for part in content)
    return tuple(TextPart(text) for text in texts if text)


def _tool(item: Tool) -> Any:
    parameters = item.parameters
    if item.type == "custom":
        parameters = {"type": "object", "properties": {"input": {"type": "string"}}}
    return tool(item.name or "", item.description, parameters)


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


def _usage(started: Started, done: Done) -> dict[str, Any]:
    written = started.written_tokens
    return {
        "input_tokens": started.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": started.read_tokens,
            "cache_write_tokens": written,
            "cache_write_tokens_details": {"ttl_30m_tokens": written, "ttl_12h_tokens": 0},
        },
        "output_tokens": done.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": started.prompt_tokens + done.generated_tokens,
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(item_id: str, status: str, content: list[Any]) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _finished(
    head: dict[str, Any], item_id: str, text: str, started: Started, done: Done
) -> dict[str, Any]:
    status = "incomplete" if done.reason == "length" else "completed"
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        **head,
        "status": status,
        "error": None,
        "incomplete_details": details,
        "output": [_item(item_id, status, [_text_part(text)])] if text else [],
        "usage": _usage(started, done),
    }


async def _events(
    answer: Answer, head: dict[str, Any], item_id: str, heartbeat: float
) -> AsyncIterator[bytes]:
    number = -1

    def event(kind: str, **members: Any) -> bytes:
        nonlocal number
        number += 1
        return streams.event({"type": kind, "sequence_number": number, **members}, kind)

    running = {**head, "error": None, "incomplete_details": None, "output": [], "usage": None}
    running["status"] = "in_progress"
    place = {"item_id": item_id, "output_index": 0, "content_index": 0}
    texts: list[str] = []
    yield event("response.created", response=running)
    yield event("response.in_progress", response=running)
    try:
        async for happened in answer.events(heartbeat):
            match happened:
                case None:
                    yield streams.COMMENT
                case Started() as started:
                    pass
                case str():
                    if not texts:
                        item = _item(item_id, "in_progress", [])
                        yield event("response.output_item.added", output_index=0, item=item)
                        part = _text_part("")
                        yield event("response.content_part.added", **place, part=part)
                    texts.append(happened)
                    kind = "response.output_text.delta"
                    yield event(kind, **place, delta=happened, logprobs=[])
                case Done():
                    text = "".join(texts)
                    reply = _finished(head, item_id, text, started, happened)
                    if texts:
                        kind = "response.output_text.done"
                        yield event(kind, **place, text=text, logprobs=[])
                        part = _text_part(text)
                        yield event("response.content_part.done", **place, part=part)
                        item = reply["output"][0]
                        yield event("response.output_item.done", output_index=0, item=item)
                    yield event(f"response.{reply['status']}", response=reply)
    except Exception as error:
        told = as_api_error(error)
        failure = {"code": told.code or "server_error", "message": str(told)}
        failed = {**running, "status": "failed", "error": failure}
        yield event("response.failed", response=failed)
