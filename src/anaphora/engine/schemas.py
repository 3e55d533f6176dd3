"""What can't be held to: JSON schemas that nothing finite fits, or with inexact numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any
from urllib.parse import unquote

_CONTAINERS = {"object", "array"}
_MOST_REFERENCES = 500
_LARGEST = 1 << 53


def endless(schema: Mapping[str, Any]) -> bool:
    """Whether everything that fits ``schema`` would go on without end.

    That is so where a definition needs itself and has no alternative that doesn't. References to
    what is not there are somebody else's affair.

    :raises ValueError: more references than can be followed in good time.
    """
    targets = {reference: _target(schema, reference) for reference in _references(schema)}
    if len(targets) > _MOST_REFERENCES:
        raise ValueError(f"it refers to more than {_MOST_REFERENCES} places")
    users: dict[str, set[str]] = {reference: set() for reference in targets}
    for reference, target in targets.items():
        for used in _references(target):
            users[used].add(reference)
    finite: set[str] = set()
    waiting = set(targets)
    while waiting:
        reference = waiting.pop()
        if _is_finite(targets[reference], finite):
            finite.add(reference)
            waiting |= users[reference] - finite
    return not _is_finite(schema, finite)


def inexact(schema: Any) -> bool:
    """Whether ``schema`` lists a whole number that llguidance would round to a float's 53 bits."""
    if not isinstance(schema, Mapping):
        return isinstance(schema, list) and any(map(inexact, schema))
    listed = [schema.get("const"), *_items(schema, "enum")]
    return any(isinstance(one, int) and abs(one) > _LARGEST for one in listed) or any(
        map(inexact, schema.values())
    )


def _is_finite(schema: Any, finite: Set[str]) -> bool:
    """Whether something finite fits, given that it does where the references ``finite`` lead."""
    if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in finite:
        return False
    if not all(_is_finite(part, finite) for part in _items(schema, "allOf")):
        return False
    for name in ("anyOf", "oneOf"):
        parts = _items(schema, name)
        if parts and not any(_is_finite(part, finite) for part in parts):
            return False
    types = schema.get("type")
    allowed = {types} if isinstance(types, str) else set(map(str, _items(schema, "type")))
    return (
        not allowed <= _CONTAINERS
        or not allowed
        or ("object" in allowed and all(_is_finite(part, finite) for part in _required(schema)))
        or ("array" in allowed and all(_is_finite(part, finite) for part in _first_items(schema)))
    )


def _required(schema: Mapping[str, Any]) -> Iterator[Any]:
    """What an object can't be without."""
    properties = schema.get("properties")
    for name in _items(schema, "required"):
        if isinstance(properties, Mapping) and name in properties:
            yield properties[name]
        else:
            yield schema.get("additionalProperties")


def _first_items(schema: Mapping[str, Any]) -> Iterator[Any]:
    """What an array can't be without."""
    least = schema.get("minItems", 0)
    least = least if isinstance(least, int) else 0
    first = _items(schema, "prefixItems")
    yield from first[:least]
    if least > len(first):
        yield schema.get("items")


def _references(value: Any) -> Iterator[str]:
    match value:
        case Mapping():
            if isinstance(reference := value.get("$ref"), str):
                yield reference
            for item in value.values():
                yield from _references(item)
        case list():
            for item in value:
                yield from _references(item)


def _target(schema: Mapping[str, Any], reference: str) -> Any:
    """What a reference of the form ``#/a/b`` leads to; ``None`` for others."""
    if not reference.startswith("#"):
        return None
    found: Any = schema
    for step in reference[1:].split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return None
    return found


def _items(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []
