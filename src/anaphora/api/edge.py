"""Where requests come in: bodies are read, checked once, and what has no effect is named.

Rules for every body:

- It is JSON in UTF-8, an object, and no larger than the limit (413).
- A lone UTF-16 surrogate in it becomes U+FFFD; a pair is the character it stands for.
- Of members of the same name in an object the last one counts.
- 1.0 is an integer; true and false are no numbers.
- Members nobody here knows, and those that are only hints, are ignored: the log and the response
  header ``anaphora-ignored`` name them. What cannot be ignored without changing what the answer
  means is refused.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import Request

from anaphora.api.errors import ApiError
from anaphora.engine.protocol import MOST_CANDIDATES
from anaphora.prompt.conversation import plain

logger = logging.getLogger(__name__)

_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.-]")
_MOST_NAMES = 20
_MOST_CHOICES = 8
"""Answers to one request. It has one place in the queue, however many it wants: with more of them
one client could keep all others out for long."""
_MOST_COLUMNS = 5
"""Likeliest tokens in OpenAI's older API."""
_NO_TEXT = {
    "image_url": "images",
    "input_image": "images",
    "computer_screenshot": "images",
    "computer_call_output": "images",
    "image_generation_call": "images",
    "input_audio": "audio",
    "video_url": "videos",
    "file": "files",
    "input_file": "files",
}
"""What parts and items of OpenAI's protocols are that no model here can be shown, by type."""


class Body(BaseModel):
    """An object of a request. Members that are not declared are allowed, and ignored."""

    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True)

    def without_effect(self) -> Iterable[str]:
        """Names of what is ignored here."""
        return self.model_extra or ()

    def given(self, *names: str) -> dict[str, Any]:
        """Those of these members that are there and not null."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


B = TypeVar("B", bound=Body)


def _as_number(value: Any) -> Any:
    """JSON has one kind of number, and 1.0 is an integer in it; true is no number at all."""
    if isinstance(value, bool):
        raise ValueError("use a number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _no_number(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError("use false")
    return value


Integer = Annotated[int, BeforeValidator(_as_number)]
Count = Annotated[int, Field(ge=0), BeforeValidator(_as_number)]
TopK = Annotated[int, Field(ge=0, le=2**31 - 1), BeforeValidator(_as_number)]
Choices = Annotated[int, Field(ge=1, le=_MOST_CHOICES), BeforeValidator(_as_number)]
TopLogprobs = Annotated[int, Field(ge=0, le=MOST_CANDIDATES), BeforeValidator(_as_number)]
ColumnLogprobs = Annotated[int, Field(ge=0, le=_MOST_COLUMNS), BeforeValidator(_as_number)]
# A plain literal would take what equals it: 0 for false.
Off = Annotated[Literal[False] | None, BeforeValidator(_no_number)]
"""A switch that can't be on yet."""


async def read(request: Request, kind: type[B], limit: int) -> B:
    """The body of ``request``. Raises :class:`ApiError`: 400, or 413 above ``limit`` bytes."""
    data = await _read_bytes(request, limit)
    try:
        value = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # also what is no UTF-8
        raise ApiError(f"the body is not valid JSON: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise ApiError("the body must be a JSON object")
    try:
        return kind.model_validate(plain(value))
    except ValidationError as error:
        raise _refusal(error) from error


def query(request: Request, kind: type[B]) -> B:
    """What the query of ``request`` says. Raises :class:`ApiError` 400."""
    try:
        return kind.model_validate(dict(request.query_params), strict=False)
    except ValidationError as error:
        raise _refusal(error) from error


def ignored(body: Body) -> dict[str, str]:
    """The header that names the members of ``body`` without effect; logs them too."""
    names = list(dict.fromkeys(_undeclared(body, "")))
    if not names:
        return {}
    if len(names) > _MOST_NAMES:
        names[_MOST_NAMES:] = [f"and {len(names) - _MOST_NAMES} more"]
    text = ", ".join(names)
    logger.info("ignored members of a request: %s", text)
    return {"anaphora-ignored": text}


async def _read_bytes(request: Request, limit: int) -> bytes:
    too_large = ApiError(f"the body is larger than {limit} bytes: send less", status=413)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _refusal(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(step) for step in first["loc"])
    message = _one_line(first["msg"].removeprefix("Value error, "))
    if first["type"] == "none_required":
        message = "is not supported: leave it out"
    if first["type"] == "union_tag_invalid" and (what := _NO_TEXT.get(first["ctx"]["tag"])):
        message = f"{what} can't be shown to this model: send text"
    param = str(first["loc"][0]) if first["loc"] else None
    return ApiError(f"{place}: {message}" if place else message, param=param)


def _undeclared(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Body):
        for name in value.without_effect():
            yield path + (_UNPRINTABLE.sub("?", name)[:64] or "?")
        for name in type(value).model_fields:
            yield from _undeclared(getattr(value, name), f"{path}{name}.")
    elif isinstance(value, list):
        for item in value:
            yield from _undeclared(item, path)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())[:500]
