"""The OpenAPI document: bodies as they are checked, answers as they are given, and errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from anaphora.api import (
    anthropic_bodies,
    anthropic_messages,
    models,
    openai_chat,
    openai_completions,
    openai_responses,
)
from anaphora.api.replies import AnthropicError, OpenAIError

_PLACE = "#/components/schemas/{model}"
_SCHEMAS: list[tuple[type[BaseModel], JsonSchemaMode]] = [
    (openai_chat.ChatRequest, "validation"),
    (openai_completions.CompletionRequest, "validation"),
    (openai_responses.ResponsesRequest, "validation"),
    (anthropic_messages.MessagesRequest, "validation"),
    (anthropic_bodies.CountRequest, "validation"),
    (models.LoadRequest, "validation"),
    (OpenAIError, "serialization"),
    (AnthropicError, "serialization"),
]
_ERRORS = {
    "400": "The body is no valid JSON, a value is wrong, or something asked for is not supported.",
    "401": "Keys are in use, and the one sent is missing or wrong.",
    "403": "The Host header or the Origin is not allowed.",
    "404": "There is no such path or response, or no such model where that matters.",
    "413": "The body is larger than the limit.",
    "429": "Too many requests wait. `retry-after` says, in seconds, when to come back.",
    "500": "The engine failed.",
    "503": "The server is stopping.",
    "default": "Any other error.",
}


def errors(shape: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Responses of a route whose errors have this shape."""
    content = {"application/json": {"schema": {"$ref": _PLACE.format(model=shape.__name__)}}}
    busy = "529" if shape is AnthropicError else "429"
    return {
        busy if status == "429" else status: {"description": meaning, "content": content}
        for status, meaning in _ERRORS.items()
    }


def write(app: FastAPI) -> dict[str, Any]:
    """The document about ``app``, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, schemas = models_json_schema(_SCHEMAS, ref_template=_PLACE)
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        app.openapi_schema = document
    return app.openapi_schema
