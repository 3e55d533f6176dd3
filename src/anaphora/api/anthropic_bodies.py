"""What requests of Anthropic's Messages are made of, and the conversation they come down to.

Blocks that chat templates have no form for are shown as text in tags: documents and search results
as they are, others as JSON. Images, PDFs and uploaded files can't be shown and are refused, once
everything else is found to be right.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from anaphora.api.edge import Body, Count
from anaphora.api.errors import ApiError
from anaphora.api.generation import call, thinking, tool
from anaphora.api.outlines import Ending, with_message_ends
from anaphora.profiles.anthropic import Conditions, Level, Markable, refusal, top_level_target
from anaphora.profiles.outline import LIFETIMES, Ttl
from anaphora.prompt.conversation import Conversation, Message, Plain, TextPart

_ERROR, _END_OF_ERROR = TextPart("<error>\n"), TextPart("\n</error>")


class _Tagged:
    """The type of a breakpoint stands in the path of errors in it, as the provider has it."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.tagged_union_schema({"ephemeral": handler(source)}, discriminator="type")


def _no_mark(value: Any) -> None:
    if value is not None:
        raise PydanticCustomError("extra_forbidden", "Extra inputs are not permitted")


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class CacheControl(Body):
    """A breakpoint."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


Mark = Annotated[CacheControl, _Tagged()] | None
NoMark = Annotated[None, BeforeValidator(_no_mark, json_schema_input_type=None)]


class Marked(Body):
    """What a breakpoint can stand on."""

    cache_control: Mark = None

    @property
    def ttl(self) -> Ttl | None:
        return self.cache_control.ttl if self.cache_control else None

    @property
    def inner(self) -> Iterable[tuple[str, Marked]]:
        """What is in it that a breakpoint can stand on as well, with its path from here."""
        return ()


class Shown(Marked):
    """A block that is shown as text."""

    @property
    @abstractmethod
    def shown(self) -> str: ...


class TextBlock(Shown):
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"text": {"minLength": 1}}},
                {"properties": {"cache_control": {"type": "null"}}},
            ]
        }
    )

    type: Literal["text"]
    text: str

    @model_validator(mode="after")
    def _marked_text(self) -> Self:
        if self.cache_control is not None and not self.text:
            raise PydanticCustomError(
                "empty_text", "cache_control cannot be set for empty text blocks"
            )
        return self

    @property
    def shown(self) -> str:
        return self.text


Texts = Annotated[
    list[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]


class ImageBlock(Marked):
    type: Literal["image"]


class Citations(Body):
    enabled: bool | None = None


class TextSource(Body):
    type: Literal["text"]
    data: str
    media_type: Literal["text/plain"] | None = None


class ContentSource(Body):
    type: Literal["content"]
    content: Annotated[
        list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]],
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock | ImageBlock]),
    ]


class FileSource(Body):
    """A PDF, or a file that was uploaded."""

    type: Literal["base64", "url", "file"]


class Cited(Shown):
    """A block that citations can be asked for. There are none here, but caching depends on it."""

    citations: Citations | None = None

    def without_effect(self) -> Iterable[str]:
        return [*super().without_effect(), *(["citations"] if self.cited else [])]

    @property
    def cited(self) -> bool:
        return bool(self.citations and self.citations.enabled)


class DocumentBlock(Cited):
    type: Literal["document"]
    source: Annotated[TextSource | ContentSource | FileSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    @property
    def inner(self) -> Iterable[tuple[str, Marked]]:
        if isinstance(self.source, ContentSource):
            yield from _numbered("source.content", self.source.content)

    @property
    def shown(self) -> str:
        match self.source:
            case TextSource(data=text):
                pass
            case ContentSource(content=blocks):
                text = "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
            case FileSource():
                text = ""
        return _in_tags("document", {"title": self.title, "context": self.context}, text)


class SearchResultBlock(Cited):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]

    @property
    def inner(self) -> Iterable[tuple[str, Marked]]:
        return _numbered("content", self.content)

    @property
    def shown(self) -> str:
        text = "\n".join(block.text for block in self.content)
        return _in_tags("search_result", {"source": self.source, "title": self.title}, text)


class ToolReferenceBlock(Shown):
    type: Literal["tool_reference"]
    tool_name: str

    @property
    def shown(self) -> str:
        return _in_tags(self.type, {}, self.tool_name)


class BrowserStateBlock(Shown):
    type: Literal["browser_state"]
    tabs: list[Any]
    state_changes: list[Any] | None = None

    @property
    def shown(self) -> str:
        members = {"tabs": self.tabs, "state_changes": self.state_changes}
        return _in_tags(self.type, {}, _json({k: v for k, v in members.items() if v is not None}))


class ServerToolUseBlock(Shown):
    type: Literal["server_tool_use", "mcp_tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    @property
    def shown(self) -> str:
        return _in_tags(self.type, {}, _json({"name": self.name, "arguments": self.input}))


class ServerToolResultBlock(Shown):
    type: Literal[
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_result",
    ]
    tool_use_id: str
    content: Any

    @property
    def shown(self) -> str:
        return _in_tags(self.type, {}, _json(_legible(self.content)))


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    cache_control: NoMark = None


class RedactedThinkingBlock(Body):
    type: Literal["redacted_thinking"]
    cache_control: NoMark = None


class ToolUseBlock(Marked):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ContainerUploadBlock(Marked):
    type: Literal["container_upload"]
    file_id: str


Result = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolReferenceBlock
    | BrowserStateBlock
)


class ToolResultBlock(Marked):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        list[Annotated[Result, Field(discriminator="type")]],
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[Result]),
    ] = Field(default_factory=list)
    is_error: bool | None = None

    @property
    def inner(self) -> Iterable[tuple[str, Marked]]:
        return _numbered("content", self.content)

    @property
    def parts(self) -> tuple[TextPart, ...]:
        """What the model sees: a failure's text stands in ``<error>`` tags."""
        texts = (block.shown for block in self.content if isinstance(block, Shown))
        parts = tuple(TextPart(text) for text in texts if text)
        return (_ERROR, *parts, _END_OF_ERROR) if self.is_error else parts


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ServerToolUseBlock
    | ServerToolResultBlock
    | ContainerUploadBlock
)


class MessageBody(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Annotated[Block, Field(discriminator="type")]],
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
    ]


class Tool(Marked):
    """A tool with a schema. The provider's own tools, which have none, are left out."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None

    def without_effect(self) -> Iterable[str]:
        return super().without_effect() if self.input_schema is not None else [self.type or "type"]

    @property
    def searches_the_web(self) -> bool:
        return (self.type or "").startswith(("web_search", "web_fetch"))


class ToolChoice(Body):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None

    def without_effect(self) -> Iterable[str]:
        return [*super().without_effect(), *self.given("budget_tokens")]

    @property
    def thinks(self) -> bool | None:
        """``None``: as the template has it."""
        return {"enabled": True, "disabled": False}.get(self.type)


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    model: str | None = None
    messages: list[MessageBody] = Field(min_length=1)
    system: Texts | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    speed: Literal["standard", "fast"] | None = None
    cache_control: Mark = None
    chat_template_kwargs: dict[str, Any] | None = None

    def without_effect(self) -> Iterable[str]:
        return [*super().without_effect(), *self.given("speed")]

    @property
    def options(self) -> dict[str, Plain]:
        """Further variables for the chat template."""
        effort = self.output_config.effort if self.output_config else None
        told = thinking(effort, self.thinking.thinks if self.thinking else None)
        return {**told, **(self.chat_template_kwargs or {})}

    @property
    def calls(self) -> Literal["none", "one", "any"]:
        """How many calls of tools the answer may have."""
        if self.tool_choice is None:
            return "any"
        if self.tool_choice.type == "none":
            return "none"
        one = self.tool_choice.disable_parallel_tool_use or self.tool_choice.type == "tool"
        return "one" if one else "any"

    @property
    def conditions(self) -> Conditions:
        """What a cached prefix has to match on besides its tokens."""
        choice, defaults = self.tool_choice, Conditions()
        effort = self.output_config.effort if self.output_config else None
        return Conditions(
            speed=self.speed or defaults.speed,
            citations=any(block.cited for block in self._all_blocks if isinstance(block, Cited)),
            web=any(item.searches_the_web for item in self.tools or ()),
            tool_choice=_words(choice.type, choice.name) if choice else defaults.tool_choice,
            disable_parallel_tool_use=bool(choice and choice.disable_parallel_tool_use),
            thinking=(
                _words(self.thinking.type, self.thinking.budget_tokens)
                if self.thinking
                else defaults.thinking
            ),
            effort=effort or defaults.effort,
        )

    def read(self) -> Reading:
        """The conversation, and where breakpoints are. Raises :class:`ApiError`."""
        return _Reader(self).read()

    @property
    def _all_blocks(self) -> Iterator[Body]:
        for message in self.messages:
            for block in message.content:
                yield block
                if isinstance(block, ToolResultBlock):
                    yield from block.content


@dataclass(frozen=True, slots=True)
class Reading:
    """A request, read."""

    conversation: Conversation
    endings: tuple[Ending, ...]
    """What prefixes of the prompt may end with: tools, blocks, and messages."""
    conditions: Conditions
    """What these have to match on besides tokens."""


class _Reader:
    """Goes through a request in the order of its prompt."""

    def __init__(self, body: CountRequest) -> None:
        self._body = body
        self._conditions = body.conditions
        self._matches = {level: self._conditions.match(level) for level in get_args(Level)}
        self._messages: list[Message] = []
        self._tools: list[Plain] = []
        self._blocks: list[Markable] = []
        """Everything that can be marked, and what in it is marked."""
        self._endings: list[Ending | None] = []
        """Of each of them; ``None``: its mark counts for what it is in."""
        self._not_shown: str | None = None
        """The first block that can't be shown."""

    def read(self) -> Reading:
        body = self._body
        if body.messages[0].role == "system":
            raise ApiError("messages.0: the first message can't be a system one: use 'system'")
        for number, item in enumerate(body.tools or ()):
            self._read_tool(f"tools.{number}", item)
        if body.system:
            self._read_system(body.system)
        for number, message in enumerate(body.messages):
            self._read_message(f"messages.{number}", message)
        top_level = body.cache_control.ttl if body.cache_control else None
        if why := refusal(self._blocks, top_level):
            raise ApiError(why)
        if self._not_shown is not None:
            raise ApiError(
                f"{self._not_shown}: images, PDFs and uploaded files can't be shown to this "
                "model: send text"
            )
        match = self._match("messages")
        endings = with_message_ends(self._marked(top_level), self._messages, match)
        conversation = Conversation(tuple(self._messages), tuple(self._tools))
        return Reading(conversation, endings, self._conditions)

    def _marked(self, top_level: Ttl | None) -> Iterator[Ending]:
        """The endings with their marks; one on an inner block counts for the block it is in."""
        target = top_level_target(self._blocks) if top_level else None
        marks: list[Ttl] = []
        for number, (block, ending) in enumerate(zip(self._blocks, self._endings, strict=True)):
            marks += [ttl for ttl in (block.ttl, top_level if number == target else None) if ttl]
            if ending is not None:
                longest = max(marks, key=LIFETIMES.__getitem__, default=None)
                yield replace(ending, mark=longest)
                marks = []

    def _match(self, level: Level) -> str:
        """What prefixes that end on ``level`` have to match on. Levels never match each other: a
        template may show tools behind the system prompt, and it changes with them all the same."""
        return f"{level} {self._matches[level]}"

    def _read_tool(self, path: str, item: Tool) -> None:
        ending = Ending(hidden=True)
        if item.input_schema is not None:
            ending = Ending(len(self._tools))
            self._tools.append(tool(item.name, item.description, item.input_schema))
        self._add(path, item, replace(ending, match=self._match("tools")))

    def _read_system(self, blocks: list[TextBlock]) -> None:
        match = self._match("system")
        parts: list[TextPart] = []
        for number, block in enumerate(blocks):
            ending = self._text(block.text, parts)
            self._add(f"system.{number}", block, replace(ending, match=match))
        self._messages.append(Message("system", tuple(parts)))

    def _read_message(self, path: str, body: MessageBody) -> None:
        """One message of the wire; results of tools become messages of their own, in place."""
        match = self._match("messages")
        parts: list[TextPart] = []
        thoughts: list[str] = []
        calls: list[Plain] = []
        uses = [n for n, block in enumerate(body.content) if isinstance(block, ToolUseBlock)]
        results = False
        for number, block in enumerate(body.content):
            place = f"{path}.content.{number}"
            if body.role == "system" and not isinstance(block, TextBlock):
                raise ApiError(f"{place}: a system message holds text only")
            # The end of a message is the end of its last call; those of others are not known.
            ending = Ending(message=len(self._messages), hidden=True)
            match block:
                case Shown():
                    ending = self._text(block.shown, parts)
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case ToolUseBlock():
                    calls.append(call(block.id, block.name, block.input))
                    ending = replace(ending, hidden=number != uses[-1])
                case ToolResultBlock():
                    if parts:
                        self._messages.append(Message(body.role, tuple(parts)))
                        parts = []
                    shown, results = block.parts, True
                    last = len(shown) - 1 if shown else None
                    ending = Ending(last, message=len(self._messages))
                    self._messages.append(
                        Message("tool", shown, {"tool_call_id": block.tool_use_id})
                    )
            self._add(place, block, replace(ending, match=match))
        fields = {"reasoning_content": "".join(thoughts), "tool_calls": calls}
        if parts or not results:
            present = {name: value for name, value in fields.items() if value}
            self._messages.append(Message(body.role, tuple(parts), present))

    def _text(self, text: str, parts: list[TextPart]) -> Ending:
        """The end of a block shown as ``text``, which joins ``parts`` of the next message."""
        if not text:
            return Ending(message=len(self._messages), hidden=True)
        parts.append(TextPart(text))
        return Ending(len(parts) - 1, message=len(self._messages))

    def _add(self, path: str, block: Body, ending: Ending) -> None:
        if _is_file(block):
            self._not_shown = self._not_shown or path
        if not isinstance(block, Marked):
            self._blocks.append(Markable(path, cacheable=False))
        else:
            for way, inner in _all_inner(block):
                if _is_file(inner):
                    self._not_shown = self._not_shown or f"{path}.{way}"
                if inner.ttl is not None:
                    self._blocks.append(Markable(f"{path}.{way}", inner.ttl, cacheable=False))
                    self._endings.append(None)
            empty = isinstance(block, TextBlock) and not block.text
            self._blocks.append(Markable(path, block.ttl, cacheable=not empty))
        self._endings.append(ending)


def _all_inner(block: Marked) -> Iterator[tuple[str, Marked]]:
    for way, inner in block.inner:
        for further, innermost in _all_inner(inner):
            yield f"{way}.{further}", innermost
        yield way, inner


def _is_file(block: Body) -> bool:
    match block:
        case ImageBlock() | ContainerUploadBlock():
            return True
        case DocumentBlock():
            return isinstance(block.source, FileSource)
        case ServerToolResultBlock():
            return _holds_file(block.content)
    return False


def _holds_file(content: Plain) -> bool:
    """Whether there is a PDF among what a tool of the provider's found."""
    match content:
        case {"source": {"type": "base64" | "url" | "file"}}:
            return True
        case dict():
            return any(_holds_file(value) for value in content.values())
        case list():
            return any(_holds_file(value) for value in content)
    return False


def _legible(value: Plain) -> Plain:
    """``value`` without what only the provider can read, and without breakpoints."""
    match value:
        case dict():
            return {
                name: _legible(item)
                for name, item in value.items()
                if not name.startswith("encrypted_") and name != "cache_control"
            }
        case list():
            return [_legible(item) for item in value]
    return value


def _numbered(path: str, blocks: Iterable[Marked]) -> Iterator[tuple[str, Marked]]:
    return ((f"{path}.{number}", block) for number, block in enumerate(blocks))


def _in_tags(name: str, members: dict[str, str | None], text: str) -> str:
    """What stands on lines of their own: members that are there, then the text."""
    lines = [f"<{key}>{value}</{key}>\n" for key, value in members.items() if value]
    return f"<{name}>\n{''.join(lines)}{text}\n</{name}>\n"


def _words(*values: object) -> str:
    return " ".join(str(value) for value in values if value is not None)


def _json(value: Plain) -> str:
    return json.dumps(value, ensure_ascii=False)
