"""What answers look like, for the OpenAPI document. The tests hold the answers to it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Reply(BaseModel):
    """An object of an answer: it has these members, all of them and no others."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class OpenAIErrorDetails(Reply):
    message: str
    """What is wrong, and what to do."""
    type: str
    param: str | None
    """The member of the request that is at fault."""
    code: str | None


class OpenAIError(Reply):
    error: OpenAIErrorDetails


class AnthropicErrorDetails(Reply):
    type: str
    message: str
    """What is wrong, and what to do."""


class AnthropicError(Reply):
    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str


class PromptTokensDetails(Reply):
    cached_tokens: int
    """Read from the cache."""
    cache_write_tokens: int
    """Written to the cache."""


class CompletionTokensDetails(Reply):
    reasoning_tokens: int


class CompletionUsage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CalledFunction(Reply):
    name: str
    arguments: str
    """A JSON object."""


class ToolCall(Reply):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnsweredMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    """``null`` beside calls without a text."""
    refusal: None
    reasoning_content: str | None = None
    """Only where there is some, as ``tool_calls``."""
    tool_calls: list[ToolCall] | None = None


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int]


class Logprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[Logprob]
    """Of the tokens that begin in the text."""
    refusal: None


class ChatChoice(Reply):
    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class TextLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]
    """Which character of the text a token's begins in."""


class TextChoice(Reply):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: CompletionUsage


class OutputText(Reply):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[Logprob]


class OutputMessage(Reply):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class ReasoningText(Reply):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Reply):
    id: str
    type: Literal["reasoning"]
    status: Literal["completed", "incomplete"]
    summary: list[None]
    content: list[ReasoningText]


class OutputFunctionCall(Reply):
    id: str
    type: Literal["function_call"]
    status: Literal["completed"]
    call_id: str
    name: str
    arguments: str
    """A JSON object."""


class OutputCustomCall(Reply):
    id: str
    type: Literal["custom_tool_call"]
    status: Literal["completed"]
    call_id: str
    name: str
    input: str


class CacheWriteDetails(Reply):
    ttl_30m_tokens: int
    ttl_12h_tokens: int


class InputTokensDetails(Reply):
    cached_tokens: int
    cache_write_tokens: int
    cache_write_tokens_details: CacheWriteDetails


class OutputTokensDetails(Reply):
    reasoning_tokens: int


class ResponseUsage(Reply):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Reply):
    reason: Literal["max_output_tokens"]


class PromptCacheOptions(Reply):
    mode: Literal["implicit", "explicit"]
    ttl: Literal["30m", "12h"]
    comparison_response_id: str | None


class CacheMiss(Reply):
    """Where a request parts from the one it is compared with."""

    type: Literal["cache_miss"]
    reason: Literal[
        "model_changed",
        "prompt_cache_key_changed",
        "tools_changed",
        "text_format_changed",
        "reasoning_effort_changed",
        "verbosity_changed",
        "input_changed",
    ]
    cache_missed_tokens: int
    comparison_reusable_tokens: int


class NoCacheMiss(Reply):
    type: Literal["cache_hit", "comparison_response_not_found", "unavailable"]


class ResponseObject(BaseModel):
    """A response; beside these it repeats members of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    output: list[OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall]
    usage: ResponseUsage
    metadata: dict[str, str]
    store: bool
    """Whether it is stored."""
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_options: PromptCacheOptions
    prompt_cache_diagnostics: CacheMiss | NoCacheMiss | None


class DeletedResponse(Reply):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItem(BaseModel):
    """An item as requests have them, and its id."""

    id: str
    type: str
    status: Literal["completed", "incomplete"]


class InputItems(Reply):
    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CacheCreation(Reply):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(Reply):
    """The whole prompt is ``input_tokens`` and both ``cache_…_input_tokens`` together."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    service_tier: Literal["standard"]


class Divergence(Reply):
    type: Literal["model_changed", "system_changed", "tools_changed", "messages_changed"]
    """The first of them."""
    cache_missed_input_tokens: int


class NoComparison(Reply):
    type: Literal["previous_message_not_found", "unavailable"]


class CacheDiagnostics(Reply):
    cache_miss_reason: Divergence | NoComparison


class MessageText(Reply):
    type: Literal["text"]
    text: str


class MessageThinking(Reply):
    type: Literal["thinking"]
    thinking: str
    signature: str
    """Always the same."""


class MessageToolUse(Reply):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnthropicMessage(Reply):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageText | MessageThinking | MessageToolUse]
    stop_reason: Literal[
        "end_turn", "tool_use", "stop_sequence", "max_tokens", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage
    diagnostics: CacheDiagnostics | None


class TokenCount(Reply):
    input_tokens: int
