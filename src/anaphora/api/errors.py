"""Errors in the shape of the provider whose protocol was spoken."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from anaphora.errors import (
    AnaphoraError,
    GrammarError,
    OverloadedError,
    PromptError,
    PromptTooLongError,
    SettingsError,
    ShuttingDownError,
    TemplateError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

_INTERNAL = "the server failed on this request: its log says why"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(AnaphoraError):
    """A request that is refused. ``param`` and ``code`` are OpenAI's error members."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


def as_api_error(error: Exception) -> ApiError:
    """What the client is told about ``error``; the unexpected is logged and not told."""
    match error:
        case ApiError():
            return error
        case OverloadedError():
            headers = {"retry-after": str(error.retry_after)}
            code = "rate_limit_exceeded"
            return ApiError(str(error), status=429, code=code, headers=headers)
        case ShuttingDownError() | UnavailableError():
            return ApiError(str(error), status=503, headers={"retry-after": "5"})
        case PromptTooLongError():
            # Agents look for the code, or for these words, to make their conversation shorter.
            message = (
                f"prompt is too long: {error.prompt_tokens} tokens > {error.context_size} maximum: "
                "send less, or serve the model with a larger ctx-size"
            )
            return ApiError(message, param="messages", code="context_length_exceeded")
        case PromptError() | TemplateError() | SettingsError() | GrammarError():
            return ApiError(str(error))
        case HTTPException():
            return ApiError(error.detail, status=error.status_code, headers=error.headers)
        case AnaphoraError():
            return ApiError(str(error), status=500)
    logger.error("a request failed unexpectedly", exc_info=error)
    return ApiError(_INTERNAL, status=500)


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    if isinstance(error, ApiError) and error.code == "rate_limit_exceeded":
        kind = "overloaded_error"
    return {
        "type": "error",
        "error": {"type": kind, "message": str(error)},
        "request_id": request_id,
    }


def openai_body(error: ApiError) -> dict[str, Any]:
    return {
        "error": {
            "message": str(error),
            "type": _OPENAI_TYPES.get(error.status, "invalid_request_error"),
            "param": error.param,
            "code": error.code,
        }
    }


def speaks_anthropic(request: Request) -> bool:
    """Whether a request came from a client of that protocol, be its path right or wrong."""
    path = request.url.path
    return path.startswith("/v1/messages") or "anthropic-version" in request.headers


def request_id(request: Request) -> str:
    return str(request.scope.get("request_id", ""))


async def error_response(request: Request, error: Exception) -> Response:
    """``error`` as a response."""
    told = as_api_error(error)
    status = told.status
    if speaks_anthropic(request):
        body = anthropic_body(told, request_id(request))
        status = 529 if told.code == "rate_limit_exceeded" else status
    else:
        body = openai_body(told)
    return Response(json.dumps(body), status, told.headers, "application/json")


def install(app: FastAPI) -> None:
    """Answer every error of ``app`` in its protocol's shape."""
    for kind in (AnaphoraError, HTTPException):
        app.add_exception_handler(kind, error_response)
