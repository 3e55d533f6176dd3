"""Several models one after another, and an engine that dies under the server."""

from __future__ import annotations

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from anaphora.api.endpoint import Options
from tests.api.conftest import DOCUMENT, Serve, Server
from tests.api.test_streams import CHAT, LONG, NEVER_ENDING, data_lines, wait_until_idle
from tests.conftest import TinyModel
from tests.engine.test_process import kill

MESSAGES = "/v1/messages"


@pytest.fixture
def paths(tiny_llama: Path, tiny_model: TinyModel, tmp_path: Path) -> tuple[Path, Path]:
    other = tmp_path / "other.gguf"
    shutil.copy(tiny_model("llama", seed=7), other)
    first = tmp_path / "first.gguf"
    first.symlink_to(tiny_llama)
    return first, other


def chat(server: Server, model: str | None = None, **options: Any) -> dict[str, Any]:
    body = {"messages": LONG, "max_tokens": 2, "model": model, **options}
    response = server.http().post(CHAT, json=body)
    assert response.status_code == 200, response.text
    data: dict[str, Any] = response.json()
    return data


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_a_request_brings_its_model_and_each_keeps_its_cache(
    serve: Serve, paths: tuple[Path, Path], tmp_path: Path
) -> None:
    server = serve(paths=paths, cache_dir=tmp_path / "cache")
    first, other = chat(server, "first"), chat(server, "other")
    assert (first["model"], other["model"]) == ("first", "other")
    assert (cached(first), cached(other)) == (0, 0)
    assert chat(server)["model"] == "other"
    assert chat(server, "gpt-5")["model"] == "other"
    again = chat(server, "first")
    assert again["model"] == "first"
    assert cached(again) == cached(chat(server, "other")) == first["usage"]["prompt_tokens"]
    count = {"model": "first", "messages": LONG}
    tokens = server.http().post(f"{MESSAGES}/count_tokens", json=count).json()["input_tokens"]
    assert tokens == first["usage"]["prompt_tokens"]
    assert 'model="tiny-llama"' in server.http().get("/metrics").text


def test_the_list_of_models_and_loading_one(serve: Serve, paths: tuple[Path, Path]) -> None:
    server = serve(paths=paths, options=Options(strict_model=True))
    client = server.openai()
    assert [(m.id, m.loaded) for m in client.models.list()] == [  # type: ignore[attr-defined]
        ("first", True),
        ("other", False),
    ]
    assert [m.id for m in server.anthropic().models.list()] == ["first", "other"]
    assert server.anthropic().models.retrieve("other").max_input_tokens is None
    loaded = server.http().post("/v1/models/load", json={"model": "other"})
    assert loaded.json()["loaded"] is True
    assert client.models.retrieve("first").loaded is False  # type: ignore[attr-defined]
    assert server.anthropic().models.retrieve("other").max_input_tokens == 8192
    refused = server.http().post("/v1/models/load", json={"model": "/etc/passwd"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert server.http().post("/v1/models/load", json={}).status_code == 400
    assert server.http().get("/health").status_code == 200


def test_a_swap_waits_for_those_before_it(serve: Serve, paths: tuple[Path, Path]) -> None:
    server = serve(paths=paths)
    body = {"messages": LONG, "max_tokens": 200, "logit_bias": NEVER_ENDING, "stream": True}
    with ThreadPoolExecutor() as threads:
        with server.http().stream("POST", CHAT, json={**body, "model": "first"}) as response:
            lines = data_lines(response)
            assert next(lines)["model"] == "first"
            swapped = threads.submit(chat, server, "other")
            behind = threads.submit(chat, server, "first")
            rest = [line["choices"][0]["finish_reason"] for line in lines]
        assert rest[-1] == "length"
        assert swapped.result(30)["model"] == "other"
        assert behind.result(30)["model"] == "first"
    wait_until_idle(server)


def test_who_leaves_while_waiting_for_a_model_brings_no_swap(
    serve: Serve, paths: tuple[Path, Path]
) -> None:
    server = serve(paths=paths)
    holding, release = threading.Event(), asyncio.Event()

    async def hold() -> None:
        async with server.serving.model(None):
            holding.set()
            await release.wait()

    with ThreadPoolExecutor() as threads:
        held = threads.submit(server.call, hold())
        assert holding.wait(10)
        with pytest.raises(httpx.ReadTimeout):
            server.http().post(CHAT, json={"messages": LONG, "model": "other"}, timeout=0.3)
        wait_until_idle(server)

        async def let_go() -> None:
            release.set()

        server.call(let_go())
        held.result(10)
    assert chat(server)["model"] == "first"


def test_a_model_that_cannot_be_loaded_leaves_the_one_before(
    serve: Serve, paths: tuple[Path, Path]
) -> None:
    server = serve(paths=paths)
    paths[1].write_bytes(b"no model any more")
    response = server.http().post(CHAT, json={"messages": LONG, "model": "other"})
    assert response.status_code == 503
    assert "'other' can't be loaded" in response.json()["error"]["message"]
    assert chat(server, "first")["model"] == "first"
    assert server.http().get("/health").status_code == 200


def test_an_engine_that_dies_fails_what_runs_and_comes_back(serve: Serve, tmp_path: Path) -> None:
    server = serve(engine="process", cache_dir=tmp_path / "cache")
    chat(server)
    server.serving.roster.load(server.serving.roster.choices[0])  # everything is on disk now
    body = {"messages": LONG, "max_tokens": 5000, "logit_bias": NEVER_ENDING}
    with ThreadPoolExecutor() as threads:
        whole = threads.submit(server.http().post, CHAT, json=body)
        with server.http().stream("POST", CHAT, json={**body, "stream": True}) as response:
            lines = data_lines(response)
            next(lines)
            kill()
            error = list(lines)[-1]["error"]
        assert "send the request again" in error["message"]
        assert whole.result(30).status_code == 503
    again = chat(server)  # waits until the engine is back
    assert cached(again) == again["usage"]["prompt_tokens"]
    with server.anthropic().messages.stream(
        model="x", max_tokens=3, messages=[{"role": "user", "content": DOCUMENT}]
    ) as stream:
        assert (stream.get_final_message().usage.cache_read_input_tokens or 0) > 0
    assert server.http().get("/health").status_code == 200
    wait_until_idle(server)


def test_health_tells_when_there_is_no_engine(serve: Serve) -> None:
    server = serve(engine="process")
    chat(server)
    kill()
    for expected in (503, 200):
        while server.http().get("/health").status_code != expected:
            threading.Event().wait(0.01)
