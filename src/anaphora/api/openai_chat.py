"""OpenAI's Chat Completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from anaphora.answer.pieces import Call, Piece, Reasoning, Text
from anaphora.api import formats, openai_choices
from anaphora.api.edge import Body, Count, TopLogprobs
from anaphora.api.endpoint import Endpoint, takes
from anaphora.api.errors import ApiError
from anaphora.api.formats import TEXT, ChatFormat, Format, GrammarFormat, TextFormat
from anaphora.api.generation import Generation, call, thinking, tool
from anaphora.api.openai_caching import Breakpoint, Caching, CachingBody
from anaphora.api.openai_choices import ChoicesBody, Form
from anaphora.api.replies import ChatCompletion
from anaphora.api.tool_choice import ToolChoice, forced
from anaphora.engine.protocol import Grammar
from anaphora.prompt.conversation import Conversation, Message


def as_parts(content: Any) -> Any:
    """Content as a list of parts, whichever form it came in."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [] if content is None else content


class TextPart(Body):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Breakpoint | None = None


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


Parts = Annotated[
    list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]],
    BeforeValidator(as_parts, json_schema_input_type=str | list[TextPart | RefusalPart] | None),
]
Verbosity = Literal["low", "medium", "high"]


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
    audio: None = None
    """An earlier answer that was heard."""


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class CacheOptions(Body):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class ChatRequest(ChoicesBody, CachingBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    functions: None = None
    function_call: Literal["auto", "none"] | None = None
    response_format: ChatFormat | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    web_search_options: None = None
    reasoning_effort: str | None = None
    verbosity: Verbosity | None = None
    prompt_cache_options: CacheOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def format(self) -> Format:
        """Raises :class:`ApiError` where there are two."""
        wanted = self.response_format or TEXT
        if self.gbnf is None:
            return wanted
        if not isinstance(wanted, TextFormat):
            raise ApiError("grammar and response_format exclude each other", param="grammar")
        return GrammarFormat(type="gbnf", grammar=self.gbnf)

    @property
    def answer_grammar(self) -> Grammar | None:
        return self.format.grammar

    @property
    def generation(self) -> Generation:
        limit = self.max_completion_tokens
        options = self.prompt_cache_options or CacheOptions()
        conditions = self.conditions(
            self.reasoning_effort, self.verbosity, formats.matched(self.format)
        )
        caching = Caching(conditions, options.mode, options.ttl)
        messages = [_message(message) for message in self.messages]
        marked = (
            ending
            for number, message in enumerate(self.messages)
            for ending in caching.marked(number, _texts(message))
        )
        tools = tuple(
            tool(item.function.name, item.function.description, item.function.parameters)
            for item in self.tools or ()
        )
        return Generation(
            Conversation(tuple(messages), tools),
            self.max_tokens if limit is None else limit,
            self.sampling,
            self.answer_grammar,
            {**thinking(self.reasoning_effort), **(self.chat_template_kwargs or {})},
            endings=caching.endings(marked, messages),
            implicit=caching.implicit,
            conditions=conditions.given,
            calls=self.calls(self.tool_choice or self.function_call),
            forced=forced(self.tool_choice, tools),
            logprobs=self.likeliest,
            choices=self.n or 1,
        )

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to tell; ``None``: no log probabilities.

        Raises :class:`ApiError`.
        """
        if self.top_logprobs and not self.logprobs:
            raise ApiError(
                "top_logprobs tells nothing without logprobs: true", param="top_logprobs"
            )
        return (self.top_logprobs or 0) if self.logprobs else None


def _whole(pieces: Sequence[Piece]) -> dict[str, Any]:
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls = [_called(piece) for piece in pieces if isinstance(piece, Call)]
    others = {"reasoning_content": reasoning, "tool_calls": calls}
    return {
        "message": {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
            **{name: value for name, value in others.items() if value},
        }
    }


def _piece(piece: Piece, calls: int) -> dict[str, Any]:
    match piece:
        case Text():
            return {"delta": {"content": piece.text}}
        case Reasoning():
            return {"delta": {"reasoning_content": piece.text}}
        case Call():
            return {"delta": {"tool_calls": [{"index": calls, **_called(piece)}]}}


def _called(made: Call) -> dict[str, Any]:
    function = {"name": made.name, "arguments": made.arguments}
    return {"id": made.id, "type": "function", "function": function}


_FORM = Form(
    prefix="chatcmpl",
    kind="chat.completion",
    chunk_kind="chat.completion.chunk",
    whole=_whole,
    piece=_piece,
    first={"delta": {"role": "assistant", "content": ""}},
    last={"delta": {}},
    logprobs=lambda wording, told, _: {"content": wording.listed(told), "refusal": None},
)


def router(api: Endpoint) -> APIRouter:
    routes = APIRouter()

    @routes.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        openapi_extra=takes(ChatRequest, "A `chat.completion.chunk`; at the end `[DONE]`."),
    )
    async def create_chat_completion(request: Request) -> Response:
        """The next answer in a conversation, in the protocol of OpenAI's Chat Completions."""
        return await openai_choices.answer(api, request, ChatRequest, _FORM)

    return routes


def _texts(message: ChatMessage) -> Iterator[tuple[str, Breakpoint | None]]:
    """The texts of its content, with the breakpoints on them."""
    for part in message.content:
        if isinstance(part, TextPart):
            yield part.text, part.prompt_cache_breakpoint
        else:
            yield part.refusal, None


def _message(message: ChatMessage) -> Message:
    texts = [text for text, _ in _texts(message)]
    names = {"name", "tool_call_id", "reasoning_content", "reasoning", "thinking"}
    members = message.model_dump(include=names, exclude_none=True)
    if message.tool_calls:
        members["tool_calls"] = [
            call(item.id, item.function.name, item.function.arguments)
            for item in message.tool_calls
        ]
    return Message.parse({**members, "role": message.role, "content": texts})
