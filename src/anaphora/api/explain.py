"""Why a request read no more from the cache: ``GET /v1/cache/explain/ID``."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from anaphora.api.endpoint import Endpoint
from anaphora.api.errors import ApiError
from anaphora.diagnose.explain import Explanation


def router(api: Endpoint) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/cache/explain/{answer_id}", response_model=Explanation)
    async def explain(request: Request, answer_id: str) -> Response:
        """Why a request of one's own read no more from the cache than it did."""
        tenant = api.tenant(request)
        async with api.serving.model(None) as (model, name):
            found = await asyncio.to_thread(
                api.serving.books.explain, tenant, name, answer_id, model.vocabulary
            )
        if found is None:
            raise ApiError(
                f"no request of yours is remembered whose answer has the id {answer_id!r}: it is "
                "too long ago, or was for a model that is not loaded now",
                status=404,
            )
        return JSONResponse(found.as_json())

    return routes
