"""What is served, and how it is doing: ``/v1/models``, ``/health``, ``/metrics``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from anaphora.api.edge import Body
from anaphora.api.endpoint import Endpoint, takes
from anaphora.roster import Choice, Roster


class LoadRequest(Body):
    """Which model to load."""

    model: str


def router(api: Endpoint) -> APIRouter:
    routes = APIRouter()
    roster = api.serving.roster

    @routes.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """The models there are, in a form that both providers' clients read."""
        api.tenant(request)
        models = [_model(roster, choice) for choice in roster.choices]
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]}
        return JSONResponse({"object": "list", "data": models, "has_more": False, **ends})

    @routes.get("/v1/models/{name:path}")
    async def retrieve_model(request: Request, name: str) -> Response:
        api.tenant(request)
        return JSONResponse(_model(roster, api.choice(name)))

    @routes.post("/v1/models/load", openapi_extra=takes(LoadRequest))
    async def load_model(request: Request) -> Response:
        """Load a model of the list in the place of the one before; returns when that is done."""
        body, _, headers = await api.read(request, LoadRequest)
        choice = api.choice(body.model)
        async with api.serving.model(choice.name):
            return JSONResponse(_model(roster, choice), headers=headers)

    @routes.get("/health")
    async def health() -> Response:
        """Whether requests are served: 200, else 503."""
        if api.serving.ready:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable"}, 503)

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """For Prometheus. An operator's key, or where there are no keys: everything.

        Another key: what counts its own tenant's requests.
        """
        tenant = api.tenant(request)
        text = api.serving.metrics.text(None if tenant.operator else tenant.name)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return routes


def _model(roster: Roster, choice: Choice) -> dict[str, Any]:
    try:
        seconds = int(choice.path.stat().st_mtime)
    except OSError:  # it is gone, which those who want it loaded will be told
        seconds = 0
    info = roster.info(choice)
    size = info.context_size if info else None
    return {
        "id": choice.name,
        "object": "model",
        "created": seconds,
        "owned_by": "anaphora",
        "type": "model",
        "display_name": info.model if info else choice.name,
        "created_at": datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": size,
        "max_tokens": size,
        "loaded": choice == roster.loaded,
    }
