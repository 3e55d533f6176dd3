"""What the modules of all wire protocols share: who asks, what for, and the way to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request

from anaphora.api import edge, streams
from anaphora.api.books import ID_PREFIXES, Origin
from anaphora.api.errors import ApiError, request_id
from anaphora.api.generation import Generation, Prepared, prepare
from anaphora.api.serving import Answer, Finished, Serving
from anaphora.clock import SystemClock
from anaphora.engine.protocol import Done, Grammar
from anaphora.keys import LOCAL, Keys, Tenant
from anaphora.model import Model
from anaphora.profiles import DEFAULT_PROFILE, PROFILES, Profile
from anaphora.prompt.conversation import Conversation
from anaphora.prompt.volatile import VolatileRules
from anaphora.responses import ResponseStore
from anaphora.roster import Choice
from anaphora.usage.record import Api

B = TypeVar("B", bound=edge.Body)


class Wanted(Protocol):
    """A body that wants an answer."""

    @property
    def model(self) -> str | None: ...

    @property
    def stream(self) -> bool | None: ...

    @property
    def answer_grammar(self) -> Grammar | None: ...

    @property
    def generation(self) -> Generation: ...


_APIS: Mapping[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
}
_QUICK = 16 << 10
"""Bytes of a body up to which it takes a few milliseconds at most to make a prompt of it."""


@dataclass(frozen=True, slots=True)
class Options:
    """How requests are treated."""

    strict_model: bool = False
    """Refuse requests for a model that is none of the server's (404)."""
    strict_max_tokens: bool = False
    """Refuse requests for more tokens than there is room for (400)."""
    body_limit: int = 32 << 20
    """Bytes of a request's body."""
    profile: str = DEFAULT_PROFILE.name
    """Name of the profile of requests whose key has none."""
    profiles: Mapping[str, Profile] = field(default_factory=lambda: PROFILES)
    """The rules of each, by name."""
    volatile: VolatileRules = field(default_factory=VolatileRules)
    """For text at the top of prompts that changes with every request."""
    heartbeat: float = 10.0
    """Seconds after which a silent stream shows that it lives."""
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")
    """What the Host header may say, without the port; empty: anything."""
    origins: tuple[str, ...] = ()
    """Origins whose pages may use the server from a browser; ``*``: all."""


class Endpoint:
    """One per application."""

    def __init__(
        self,
        serving: Serving,
        options: Options,
        keys: Keys | None,
        responses: ResponseStore | None,
    ) -> None:
        self.serving = serving
        self.options = options
        self.responses = responses
        """``None``: responses are not stored."""
        self._keys = keys
        self._clock = SystemClock()

    def tenant(self, request: Request) -> Tenant:
        """Whom ``request`` is for; its scope names the tenant from then on.

        Raises :class:`ApiError` 401.
        """
        tenant = self._tenant(request)
        request.scope["tenant"] = tenant.name
        return tenant

    async def read(self, request: Request, kind: type[B]) -> tuple[B, Tenant, dict[str, str]]:
        """The body, whom it is from, and headers for the response."""
        tenant = self.tenant(request)
        body = await edge.read(request, kind, self.options.body_limit)
        model = getattr(body, "model", None)
        if self.options.strict_model and model is not None:
            self.choice(model)
        return body, tenant, edge.ignored(body)

    def profile(self, tenant: Tenant) -> Profile:
        """Whose rules count for the requests of ``tenant``."""
        return self.options.profiles[tenant.profile or self.options.profile]

    def choice(self, name: str) -> Choice:
        """The model called ``name``. Raises :class:`ApiError` 404."""
        choice = self.serving.roster.find(name)
        if choice.name != name:
            raise ApiError(
                f"there is no model {name!r}: GET /v1/models names those there are",
                status=404,
                param="model",
                code="model_not_found",
            )
        return choice

    async def submit(
        self, request: Request, body: Wanted, tenant: Tenant, *, quick: bool = True
    ) -> Answer:
        """Hand a request to the engine. It is not ``quick`` where the prompt is more than its body,
        nor where there is a grammar to be checked.

        Raises what :meth:`Serving.submit` does, and
        :class:`~starlette.requests.ClientDisconnect` where nobody waits any more.
        """
        length = request.headers.get("content-length", "")
        strict = self.options.strict_max_tokens
        profile = self.profile(tenant)
        own_id = request_id(request).removeprefix("req_")

        def make(model: Model) -> Prepared:
            generation = self.without_volatile(request, body.generation)
            return prepare(model, generation, tenant, profile, request_id=own_id, strict=strict)

        api = _APIS[request.scope["path"]]
        submitting = self.serving.submit(
            make,
            origin=Origin(
                ID_PREFIXES[api] + own_id, tenant, api, bool(body.stream), self._clock.now()
            ),
            model=body.model,
            quick=quick
            and body.answer_grammar is None
            and length.isdecimal()
            and int(length) <= _QUICK,
        )
        # It may wait for another model to be loaded.
        answer = await streams.while_connected(request.receive, submitting)
        if answer is None:
            raise ClientDisconnect
        return answer

    def without_volatile(self, request: Request, generation: Generation) -> Generation:
        """``generation`` after the rules for volatile text; the response's header will name them.

        Raw prompts stay as they are.
        """
        if not isinstance(generation.prompt, Conversation):
            return generation
        applied = self.options.volatile.apply(generation.prompt)
        request.scope["volatile"] = applied.rules
        return replace(generation, prompt=applied.conversation, rules=applied.rules)

    async def whole(self, request: Request, answer: Answer) -> Finished:
        """The finished answer; the request is cancelled where its client leaves."""
        try:
            finished = await streams.while_connected(request.receive, answer.whole())
        finally:
            answer.close()
        if finished is None:
            raise ClientDisconnect
        return finished

    def _tenant(self, request: Request) -> Tenant:
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


def computed(done: Done) -> dict[str, str]:
    """The header that tells how many tokens of the prompt were really computed."""
    return {"anaphora-computed-tokens": str(done.computed_tokens)}


def asks(kind: type[edge.Body], events: str | None = None) -> dict[str, Any]:
    """For the OpenAPI document: that a route takes a query of ``kind``.

    :param events: what the data of its events are, where it can stream.
    """
    members = kind.model_json_schema()["properties"]
    parameters = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in members.items()
    ]
    return {"parameters": parameters, **_streams(events)}


def takes(kind: type[edge.Body], events: str | None = None) -> dict[str, Any]:
    """For the OpenAPI document: that a route takes a body of ``kind``.

    :param events: what the data of its events are, where it can stream.
    """
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"requestBody": body, **_streams(events)}


def _streams(events: str | None) -> dict[str, Any]:
    if events is None:
        return {}
    data = {"type": "string", "description": events}
    event = {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }
    return {"responses": {"200": {"content": {"text/event-stream": {"itemSchema": event}}}}}
