"""The items that conversations are made of in OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from anaphora.api.edge import Body
from anaphora.api.generation import call
from anaphora.api.openai_caching import Breakpoint, Caching
from anaphora.api.outlines import Ending
from anaphora.prompt.conversation import Message, Plain, TextPart


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


def _kind(item: Any) -> str:
    """The type of an item. Messages may leave it out; references may, and may say null."""
    if not isinstance(item, dict):
        return getattr(item, "type", None) or "item_reference"
    refers = "id" in item and ("type" in item or "role" not in item)
    untyped = "item_reference" if refers else "message"
    kind = item.get("type", untyped)
    return kind if isinstance(kind, str) else untyped


class TextContent(Body):
    type: Literal["input_text", "text"]
    text: str
    prompt_cache_breakpoint: Breakpoint | None = None


class OutputContent(Body):
    type: Literal["output_text"]
    text: str


class RefusalContent(Body):
    type: Literal["refusal"]
    refusal: str


Part = TextContent | OutputContent | RefusalContent
Content = Annotated[
    list[Annotated[Part, Field(discriminator="type")]],
    BeforeValidator(_as_parts, json_schema_input_type=str | list[Part]),
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


class ItemReference(Body):
    """An item of a stored response, to be put in its place."""

    type: Literal["item_reference"] | None = None
    id: str


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CustomOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
]

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def parse(listed: Sequence[Plain]) -> list[Item]:
    """Items from what :func:`listed` made of them, and from output of responses."""
    return _ITEMS.validate_python(listed)


def output_id(request_id: str) -> str:
    """The id of the message that answers a request."""
    return f"msg_{request_id}"


def response_id(item_id: str) -> str:
    """The response that an item is of, if there is one: their ids tell."""
    _, _, rest = item_id.partition("_")
    return f"resp_{rest.partition('_')[0]}"


def listed(items: Iterable[Item], request_id: str) -> list[Plain]:
    """``items`` as the API lists them, with ids of their own. Reasoning is left out."""
    shown = [_listed(item) for item in items if not isinstance(item, ReasoningItem)]
    return [
        {"id": f"{prefix}_{request_id}_{number}", "status": "completed", **members}
        for number, (prefix, members) in enumerate(shown)
    ]


def read(items: Iterable[Item], messages: list[Message], caching: Caching) -> list[Ending]:
    """Append ``items`` to ``messages``; returns where their breakpoints are.

    Calls that follow each other or a text belong to one message.
    """
    marked: list[Ending] = []
    for item in items:
        match item:
            case MessageItem():
                marked += caching.marked(len(messages), _texts(item.content))
                messages.append(Message(item.role, _parts(item.content)))
            case FunctionCallItem():
                _add_call(messages, call(item.call_id, item.name, item.arguments))
            case CustomCallItem():
                _add_call(messages, call(item.call_id, item.name, {"input": item.input}))
            case FunctionOutputItem() | CustomOutputItem():
                marked += caching.marked(len(messages), _texts(item.output))
                fields = {"tool_call_id": item.call_id}
                messages.append(Message("tool", _parts(item.output), fields))
    return marked


def _add_call(messages: list[Message], made: Any) -> None:
    before = messages.pop() if messages and messages[-1].role == "assistant" else None
    content = before.content if before else ()
    calls = before.fields.get("tool_calls", []) if before else []
    messages.append(Message("assistant", content, {"tool_calls": [*calls, made]}))


def _texts(content: Iterable[Part]) -> Iterator[tuple[str, Breakpoint | None]]:
    """The texts of ``content``, with the breakpoints on them."""
    for part in content:
        match part:
            case TextContent():
                yield part.text, part.prompt_cache_breakpoint
            case OutputContent():
                yield part.text, None
            case RefusalContent():
                yield part.refusal, None


def _parts(content: Iterable[Part]) -> tuple[TextPart, ...]:
    return tuple(TextPart(text) for text, _ in _texts(content) if text)


def _listed(item: Item) -> tuple[str, dict[str, Plain]]:
    """What an item's id begins with, and its members."""
    match item:
        case MessageItem():
            parts = [_listed_part(part, item.role) for part in item.content]
            return "msg", {"type": item.type, "role": item.role, "content": parts}
        case FunctionCallItem():
            return "fc", item.model_dump(include={"type", "call_id", "name", "arguments"})
        case CustomCallItem():
            return "ctc", item.model_dump(include={"type", "call_id", "name", "input"})
        case FunctionOutputItem() | CustomOutputItem():
            output = [_listed_part(part, "tool") for part in item.output]
            prefix = "fco" if isinstance(item, FunctionOutputItem) else "ctco"
            return prefix, {"type": item.type, "call_id": item.call_id, "output": output}
    raise TypeError(f"{item.type} is not listed")


def _listed_part(part: Part, role: str) -> Plain:
    match part:
        case RefusalContent():
            return {"type": "refusal", "refusal": part.refusal}
        case TextContent(prompt_cache_breakpoint=Breakpoint() as mark):
            given = mark.model_dump(include={"mode", "ttl"}, exclude_none=True)
            return {"type": "input_text", "text": part.text, "prompt_cache_breakpoint": given}
        case TextContent() if role != "assistant":
            return {"type": "input_text", "text": part.text}
    return text_part(part.text)


def answer(item_id: str, status: str, text: str = "") -> dict[str, Plain]:
    """The message that an answer is."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [text_part(text)] if text else [],
    }


def text_part(text: str) -> Plain:
    """A text of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
