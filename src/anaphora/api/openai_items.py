"""The items that conversations are made of in OpenAI's Responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from anaphora.answer.pieces import Call, Piece, Reasoning, Text
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


class ReasoningContent(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningSummary(Body):
    type: Literal["summary_text"]
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    content: list[ReasoningContent] | None = None
    summary: list[ReasoningSummary] = Field(default_factory=list)

    @property
    def text(self) -> str:
        """Without a text of its own, its summary."""
        return "".join(part.text for part in self.content or self.summary)


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


def response_id(item_id: str) -> str:
    """The response that an item is of, if there is one: their ids tell."""
    _, _, rest = item_id.partition("_")
    return f"resp_{rest.partition('_')[0]}"


def listed(items: Iterable[Item], request_id: str) -> list[Plain]:
    """``items`` as the API lists them, with ids of their own."""
    return [
        {"id": f"{prefix}_{request_id}_{number}", "status": "completed", **members}
        for number, (prefix, members) in enumerate(map(_listed, items))
    ]


def read(items: Iterable[Item], messages: list[Message], caching: Caching) -> list[Ending]:
    """Append ``items`` to ``messages``; returns where their breakpoints are.

    Reasoning, a text and calls that follow each other belong to one message.
    """
    marked: list[Ending] = []
    for item in items:
        match item:
            case MessageItem():
                before = messages[-1] if messages else Message("user")
                if item.role == before.role == "assistant" and before.fields:
                    _join(messages, _parts(item.content))
                else:
                    messages.append(Message(item.role, _parts(item.content)))
                place, behind = len(messages) - 1, len(messages[-1].content)
                first = behind - len(_parts(item.content))
                marked += (
                    replace(ending, number=first + (ending.number or 0))
                    for ending in caching.marked(place, _texts(item.content))
                )
            case ReasoningItem():
                _join(messages, reasoning=item.text)
            case FunctionCallItem():
                _join(messages, calls=[call(item.call_id, item.name, item.arguments)])
            case CustomCallItem():
                _join(messages, calls=[call(item.call_id, item.name, {"input": item.input})])
            case FunctionOutputItem() | CustomOutputItem():
                marked += caching.marked(len(messages), _texts(item.output))
                fields = {"tool_call_id": item.call_id}
                messages.append(Message("tool", _parts(item.output), fields))
    return marked


def _join(
    messages: list[Message],
    content: tuple[TextPart, ...] = (),
    reasoning: str = "",
    calls: Sequence[Plain] = (),
) -> None:
    """Make these a part of the assistant message at the end, or a new one."""
    before = Message("assistant")
    if messages and messages[-1].role == "assistant":
        before = messages.pop()
    fields = {
        "reasoning_content": before.fields.get("reasoning_content", "") + reasoning,
        "tool_calls": [*before.fields.get("tool_calls", []), *calls],
    }
    present = {name: value for name, value in fields.items() if value}
    messages.append(Message("assistant", (*before.content, *content), present))


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
        case ReasoningItem():
            members = item.model_dump(include={"type", "content", "summary"}, exclude_none=True)
            return "rs", members
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


def text_part(text: str, logprobs: Sequence[Plain] = ()) -> dict[str, Plain]:
    """A text of an answer, and how likely its tokens were."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}


def _reasoning_part(text: str, logprobs: Sequence[Plain] = ()) -> dict[str, Plain]:
    return {"type": "reasoning_text", "text": text}


@dataclass(frozen=True, slots=True)
class Kind:
    """How items of texts are worded."""

    prefix: str
    """Of their ids."""
    members: Mapping[str, Plain]
    part: Callable[[str, Sequence[Plain]], dict[str, Plain]]
    """Their content, from a text and log probabilities."""
    event: str
    """What the events of the text are called."""
    has_logprobs: bool
    """Whether these have log probabilities."""


KINDS: Mapping[type[Piece], Kind] = {
    Text: Kind(
        "msg",
        {"type": "message", "role": "assistant"},
        text_part,
        "output_text",
        True,
    ),
    Reasoning: Kind(
        "rs", {"type": "reasoning", "summary": []}, _reasoning_part, "reasoning_text", False
    ),
}


def output(
    piece: Piece,
    request_id: str,
    index: int,
    custom: Collection[str],
    status: str = "completed",
    logprobs: Sequence[Plain] = (),
) -> dict[str, Plain]:
    """The item that ``piece`` is in the output of a response, whole as it is.

    :param custom: names of the tools whose input is free text.
    :param logprobs: how likely its tokens were.
    """
    own_id = f"{request_id}_out{index}" if index else request_id
    if not isinstance(piece, Call):
        kind = KINDS[type(piece)]
        return {
            "id": f"{kind.prefix}_{own_id}",
            **kind.members,
            "status": status,
            "content": [kind.part(piece.text, logprobs)],
        }
    members = {"status": "completed", "call_id": piece.id, "name": piece.name}
    if piece.name in custom:
        text = _free_text(piece.arguments)
        return {"id": f"ctc_{own_id}", "type": "custom_tool_call", **members, "input": text}
    arguments = piece.arguments
    return {"id": f"fc_{own_id}", "type": "function_call", **members, "arguments": arguments}


def piece(item: Mapping[str, Plain]) -> Piece:
    """What :func:`output` made ``item`` of."""
    match item["type"]:
        case "function_call":
            return Call(item["name"], item["arguments"], item["call_id"])
        case "custom_tool_call":
            arguments = json.dumps({"input": item["input"]}, ensure_ascii=False)
            return Call(item["name"], arguments, item["call_id"])
    text = "".join(part["text"] for part in item["content"])
    return Reasoning(text) if item["type"] == "reasoning" else Text(text)


def _free_text(arguments: str) -> str:
    """The input of a custom tool, which is shown to the model as a function with one argument."""
    match json.loads(arguments):
        case {"input": str(text), **others} if not others:
            return text
    return arguments
