"""What the modules of all wire protocols share: who asks, what for, and the way to the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from anaphora.api import edge, streams
from anaphora.api.errors import ApiError
from anaphora.api.generation import Generation, prepare
from anaphora.api.serving import Answer, Finished, Serving
from anaphora.engine.protocol import Done
from anaphora.keys import LOCAL, Keys, Tenant

B = TypeVar("B", bound=edge.Body)

_QUICK = 16 << 10
"""Bytes of a body up to which it takes a few milliseconds at most to make a prompt of it."""


@dataclass(frozen=True, slots=True)
class Options:
    """How requests are treated."""

    alias: str | None = None
    """The model's name for clients. Default: its file's name."""
    strict_model: bool = False
    """Refuse requests for a model of another name (404)."""
    strict_max_tokens: bool = False
    """Refuse requests for more tokens than there is room for (400)."""
    body_limit: int = 32 << 20
    """Bytes of a request's body."""
    heartbeat: float = 10.0
    """Seconds after which a silent stream shows that it lives."""
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")
    """What the Host header may say, without the port; empty: anything."""
    origins: tuple[str, ...] = ()
    """Origins whose pages may use the server from a browser; ``*``: all."""


class Endpoint:
    """One per application."""

    def __init__(self, serving: Serving, options: Options, keys: Keys | None) -> None:
        self.serving = serving
        self.options = options
        self.model_name = options.alias or serving.model.path.stem
        self._keys = keys

    def tenant(self, request: Request) -> Tenant:
        """Whom ``request`` is for. Raises :class:`ApiError` 401."""
        if self._keys is None:
            return LOCAL
        given = [request.headers.get(name) for name in ("authorization", "x-api-key")]
        for header in given:
            if tenant := self._keys.check(header):
                return tenant
        what = "the API key is wrong" if any(given) else "an API key is missing"
        raise ApiError(
            f"{what}: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            status=401,
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )

    async def read(self, request: Request, kind: type[B]) -> tuple[B, Tenant, dict[str, str]]:
        """The body, whom it is from, and headers for the response."""
        tenant = self.tenant(request)
        body = await edge.read(request, kind, self.options.body_limit)
        model = getattr(body, "model", None)
        if self.options.strict_model and model not in (None, self.model_name):
            raise ApiError(
                f"there is no model {model!r}: GET /v1/models names the one there is",
                status=404,
                param="model",
                code="model_not_found",
            )
        return body, tenant, edge.ignored(body)

    async def submit(
        self, request: Request, generation: Callable[[], Generation], tenant: Tenant
    ) -> Answer:
        """Hand a request to the engine; ``generation`` is called where that keeps nobody waiting.

        Raises what :meth:`Serving.submit` does.
        """
        strict, model = self.options.strict_max_tokens, self.serving.model
        length = request.headers.get("content-length", "")
        return await self.serving.submit(
            lambda: prepare(model, generation(), tenant, strict=strict),
            quick=length.isdecimal() and int(length) <= _QUICK,
        )

    async def whole(self, request: Request, answer: Answer) -> Finished:
        """The finished answer; the request is cancelled where its client leaves."""
        try:
            finished = await streams.while_connected(request.receive, answer.whole())
        finally:
            answer.close()
        if finished is None:
            raise ClientDisconnect
        return finished


def computed(done: Done) -> dict[str, str]:
    """The header that tells how many tokens of the prompt were really computed."""
    return {"anaphora-computed-tokens": str(done.computed_tokens)}


def takes(kind: type[edge.Body]) -> dict[str, Any]:
    """For the OpenAPI document: that a route takes a body of ``kind``, and may stream."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    extra: dict[str, Any] = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
    }
    if "stream" in kind.model_fields:
        events = {"text/event-stream": {"schema": {"type": "string"}}}
        extra["responses"] = {"200": {"content": events}}
    return extra
