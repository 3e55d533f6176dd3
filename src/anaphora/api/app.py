"""The HTTP application."""

from __future__ import annotations

import logging
import uuid
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anaphora import __version__
from anaphora.api import (
    anthropic_messages,
    document,
    errors,
    explain,
    models,
    openai_chat,
    openai_completions,
    openai_responses,
)
from anaphora.api.endpoint import Endpoint, Options
from anaphora.api.errors import ApiError
from anaphora.api.replies import AnthropicError, OpenAIError
from anaphora.api.serving import Serving
from anaphora.keys import Keys
from anaphora.responses import ResponseStore

logger = logging.getLogger(__name__)

_PROTOCOLS = (
    (openai_chat, OpenAIError),
    (openai_completions, OpenAIError),
    (openai_responses, OpenAIError),
    (anthropic_messages, AnthropicError),
    (models, OpenAIError),
    (explain, OpenAIError),
)
"""With the shape of their errors; whoever sends ``anthropic-version`` gets the other one."""


def create_app(
    serving: Serving,
    options: Options = Options(),  # noqa: B008 - frozen
    keys: Keys | None = None,
    responses: ResponseStore | None = None,
) -> FastAPI:
    """The application that serves ``serving``.

    Without ``keys`` everybody is one tenant. Without ``responses`` none are stored.
    """
    api = Endpoint(serving, options, keys, responses)
    app = FastAPI(
        title="Anaphora",
        version=__version__,
        openapi_url="/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.openapi = lambda: document.write(app)  # type: ignore[method-assign]
    errors.install(app)
    app.add_middleware(Gate, serving=serving, options=options)
    for module, error in _PROTOCOLS:
        app.include_router(module.router(api), responses=document.errors(error))
    return app


class Gate:
    """Every request passes here: it gets an id, and is turned away if it comes from elsewhere.

    A page in a browser can send requests to a server on the same machine, also under a name of its
    own that leads there; so the Host header has to name this server, and an Origin to be allowed.
    """

    def __init__(self, app: ASGIApp, serving: Serving, options: Options) -> None:
        self._app = app
        self._metrics = serving.metrics
        self._hosts = frozenset(host.lower() for host in options.hosts)
        self._origins = frozenset(options.origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["request_id"] = f"req_{uuid.uuid4().hex}"
        origin = Headers(scope=scope).get("origin")
        begun = False

        async def send_marked(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                headers["request-id"] = headers["x-request-id"] = scope["request_id"]
                if rules := scope.get("volatile"):
                    headers["anaphora-volatile"] = ", ".join(rules)
                if origin is not None and self._allows(origin):
                    self._open(headers, origin)
                route = getattr(scope.get("route"), "path", "other")
                tenant = scope.get("tenant", "")
                self._metrics.count_response(tenant, route, message["status"])
            await send(message)

        request = Request(scope, receive)
        try:
            if refusal := self._check(request):
                response = await errors.error_response(request, refusal)
            elif request.method == "OPTIONS" and origin is not None:
                response = Response(status_code=204)
            else:
                await self._app(scope, receive, send_marked)
                return
        except ClientDisconnect:
            return
        except Exception as error:
            if begun:
                logger.exception("a response broke off")
                return
            response = await errors.error_response(request, error)
        await response(scope, receive, send_marked)

    def _check(self, request: Request) -> ApiError | None:
        host = request.headers.get("host", "")
        if self._hosts and _without_port(host) not in self._hosts:
            return ApiError(
                f"the Host header says {host!r}: name the server by an allowed host", status=403
            )
        origin = request.headers.get("origin")
        if origin is not None and not self._allows(origin) and urlsplit(origin).netloc != host:
            return ApiError(
                f"pages of {origin!r} may not use this server: allow their origin", status=403
            )
        return None

    def _allows(self, origin: str) -> bool:
        return "*" in self._origins or origin in self._origins

    def _open(self, headers: MutableHeaders, origin: str) -> None:
        """Let a page of ``origin`` read the response."""
        headers["access-control-allow-origin"] = origin
        headers["access-control-allow-methods"] = "GET, POST, DELETE, OPTIONS"
        headers["access-control-allow-headers"] = "*, authorization"
        headers["access-control-expose-headers"] = "*"
        headers.add_vary_header("origin")


def _without_port(host: str) -> str:
    name, colon, port = host.lower().rpartition(":")
    return name if colon and (port.isdecimal() or not port) else host.lower()
