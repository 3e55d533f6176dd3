"""What the server tells of itself: its models, its health, its metrics."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.conftest import Serve, Server

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


def test_both_clients_see_the_loaded_model(server: Server) -> None:
    name = server.model.path.stem
    assert [model.id for model in server.openai().models.list()] == [name]
    assert [model.id for model in server.anthropic().models.list()] == [name]
    assert server.openai().models.retrieve(name).owned_by == "anaphora"
    described = server.anthropic().models.retrieve(name)
    assert described.max_input_tokens == server.model.info.context_size
    assert described.created_at.year > 2000
    with pytest.raises(openai.NotFoundError):
        server.openai().models.retrieve("other")


def test_health_says_ready(server: Server) -> None:
    response = server.http().get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_metrics_add_up_to_the_usage_of_all_responses(serve: Serve) -> None:
    server = serve()
    create = server.openai().chat.completions.create
    replies = [create(model="any", messages=HELLO * n, max_tokens=5, n=n) for n in (1, 2, 1)]
    with pytest.raises(openai.BadRequestError):
        create(model="any", messages=HELLO, n=0)
    usages = [reply.usage for reply in replies]
    expected: dict[str, int] = {"prompt": 0, "generated": 0, "cache_read": 0, "cache_written": 0}
    for usage in usages:
        assert usage is not None
        details = usage.prompt_tokens_details
        assert details is not None
        expected["prompt"] += usage.prompt_tokens
        expected["generated"] += usage.completion_tokens
        expected["cache_read"] += details.cached_tokens or 0
        expected["cache_written"] += details.cache_write_tokens or 0
    found = {name: server.metric(f"anaphora_{name}_tokens_total") for name in expected}
    assert found == expected
    assert server.metric("anaphora_requests_running") == 0
    assert server.metric("anaphora_requests_waiting") == 0
    assert server.metric("anaphora_request_seconds_count") == 3


def test_metrics_keep_to_prometheus_conventions(server: Server) -> None:
    response = server.http().get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = list(text_string_to_metric_families(response.text))
    ours = [family for family in families if family.name.startswith("anaphora_")]
    assert len(ours) > 10
    assert all(family.documentation for family in ours)
    assert not any(re.search(r"_(ms|milliseconds|kb|mb)(_|$)", family.name) for family in ours)
