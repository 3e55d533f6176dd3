"""Which tools an answer may call, and whether it has to, as OpenAI's protocols say it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from anaphora.api.edge import Body
from anaphora.api.errors import ApiError
from anaphora.prompt.conversation import Plain


class Named(Body):
    """A tool, as Responses name it."""

    type: Literal["function", "custom"]
    name: str


class Allowed(Body):
    """Some of the tools, as Responses list them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]

    @property
    def names(self) -> list[str]:
        inner = (item.get("function", item) for item in self.tools)
        return [str(item.get("name")) for item in inner if isinstance(item, dict)]


class _Function(Body):
    name: str


class _NamedInChat(Body):
    type: Literal["function"]
    function: _Function


class _AllowedInside(Body):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class _AllowedInChat(Body):
    type: Literal["allowed_tools"]
    allowed_tools: _AllowedInside


def _flat(choice: Any) -> Any:
    """A choice of Chat Completions in the words of Responses."""
    match choice:
        case {"type": "function", "function": dict(inner)}:
            return {"type": "function", **inner}
        case {"type": "allowed_tools", "allowed_tools": dict(inner)}:
            return {"type": "allowed_tools", **inner}
    return choice


Word = Literal["auto", "none", "required"]
Choice = Word | Named | Allowed
ToolChoice = Annotated[
    Word | Annotated[Named | Allowed, Field(discriminator="type")] | None,
    BeforeValidator(_flat, json_schema_input_type=Choice | _NamedInChat | _AllowedInChat | None),
]
"""Tools stay in the prompt whatever it says, so that what is cached of it stays of use."""


def forced(choice: Choice | None, tools: Sequence[Plain]) -> tuple[str, ...]:
    """The names of the tools one of which has to be called; none: nothing has to be.

    :param tools: those that are shown to the model.

    Raises :class:`ApiError` where that is no tool there is.
    """
    there = names(tools)
    match choice:
        case "required":
            wanted = there
        case Named():
            wanted = (choice.name,)
        case Allowed(mode="required"):
            wanted = tuple(choice.names)
        case _:
            return ()
    return present(wanted, there)


def names(tools: Sequence[Plain]) -> tuple[str, ...]:
    return tuple(item["function"]["name"] for item in tools)


def present(wanted: tuple[str, ...], there: tuple[str, ...]) -> tuple[str, ...]:
    """``wanted``. Raises :class:`ApiError` where one is not there, or none is wanted."""
    if not wanted:
        raise ApiError("tool_choice wants a call, and there are no tools", param="tool_choice")
    for name in wanted:
        if name not in there:
            raise ApiError(f"tool_choice: there is no tool {name!r} in tools", param="tool_choice")
    return wanted
