"""Values of arguments, from what models write for them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from anaphora.answer.source import NoCall
from anaphora.errors import PromptError
from anaphora.prompt.conversation import Plain, plain

_ALL = frozenset({"object", "array", "string", "number", "boolean", "null"})
_PYTHON = {"True": True, "False": False, "None": None}
"""How templates that print values as they are have taught models to write them."""


def from_json(text: str) -> Plain:
    """The value of a JSON text; line ends inside strings are let pass.

    Raises :class:`NoCall` where it is none, or none that can be sent on.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
        return plain(value)
    except (ValueError, RecursionError, PromptError) as error:
        raise NoCall from error


def arguments(value: Plain) -> str:
    """The arguments of a call as JSON. Raises :class:`NoCall` where they are no object."""
    if isinstance(value, str):  # some models quote the object once more
        value = from_json(value)
    if not isinstance(value, dict):
        raise NoCall
    return json.dumps(value, ensure_ascii=False)


def typed(text: str, schema: Plain) -> Plain:
    """The value that is written as bare ``text``, by what its schema says it is.

    A string stands for itself wherever there may be one and the text is no value of another kind
    that there may be. Without a schema every kind may be.
    """
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    bare = text.strip()
    if bare in _PYTHON:
        value = _PYTHON[bare]
    else:
        try:
            value = from_json(bare)
        except NoCall:
            return text
    return value if _kind(value) in kinds - {"string"} else text


def parameter(parameters: Plain, name: str) -> Plain:
    """The schema of a parameter; ``None``: nothing is known of it."""
    match parameters:
        case {"properties": Mapping() as properties}:
            return properties.get(name)
    return None


def _kinds(schema: Plain) -> frozenset[str]:
    """Which kinds of values ``schema`` lets pass, as far as can be seen at a glance."""
    match schema:
        case {"type": str(kind)}:
            return frozenset({"number" if kind == "integer" else kind})
        case {"type": [*kinds]}:
            return frozenset("number" if kind == "integer" else str(kind) for kind in kinds)
        case {"enum": [*values]}:
            return frozenset(map(_kind, values))
        case {"anyOf": [*schemas]} | {"oneOf": [*schemas]}:
            return frozenset().union(*map(_kinds, schemas))
    return _ALL


def _kind(value: Plain) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
    return "array"


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _refuse(name: Any) -> NoReturn:
    raise ValueError(name)
