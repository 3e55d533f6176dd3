"""What is served, and how it is doing: ``/v1/models``, ``/health``, ``/metrics``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from anaphora.api.endpoint import Endpoint
from anaphora.api.errors import ApiError


def router(api: Endpoint) -> APIRouter:
    routes = APIRouter()
    model = _model(api)

    @routes.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """The loaded model, in a form that both providers' clients read."""
        api.tenant(request)
        name = model["id"]
        listed = {"object": "list", "data": [model]}
        return JSONResponse({**listed, "has_more": False, "first_id": name, "last_id": name})

    @routes.get("/v1/models/{name:path}")
    async def retrieve_model(request: Request, name: str) -> Response:
        api.tenant(request)
        if name != model["id"]:
            raise ApiError(
                f"there is no model {name!r}: GET /v1/models names the one there is",
                status=404,
                param="model",
                code="model_not_found",
            )
        return JSONResponse(model)

    @routes.get("/health")
    async def health() -> Response:
        """Whether requests are served: 200, else 503."""
        if api.serving.ready:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable"}, 503)

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Sums over all tenants, for Prometheus. Needs a key where there are keys."""
        api.tenant(request)
        return Response(api.serving.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes


def _model(api: Endpoint) -> dict[str, Any]:
    made = datetime.fromtimestamp(int(api.serving.model.path.stat().st_mtime), UTC)
    size = api.serving.model.info.context_size
    return {
        "id": api.model_name,
        "object": "model",
        "created": int(made.timestamp()),
        "owned_by": "anaphora",
        "type": "model",
        "display_name": api.serving.model.info.model,
        "created_at": made.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": size,
        "max_tokens": size,
    }
