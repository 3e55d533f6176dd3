"""A tiny model behind a real server on a loopback port, and the official clients for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from anthropic import Anthropic, AsyncAnthropic
from openai import AsyncOpenAI, OpenAI

from anaphora import Model
from anaphora.api.app import create_app
from anaphora.api.books import Books
from anaphora.api.endpoint import Options
from anaphora.api.serving import Serving
from anaphora.keys import KeyFile, Keys
from anaphora.responses import ResponseStore
from anaphora.roster import Choice, Roster

DOCUMENT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 20


@dataclass
class Server:
    """A server on a thread of its own."""

    serving: Serving
    options: Options
    keys: Keys | None = None
    responses: ResponseStore | None = None
    url: str = ""
    _server: uvicorn.Server = field(init=False)
    _thread: threading.Thread = field(init=False)
    _loop: asyncio.AbstractEventLoop = field(init=False)

    def start(self) -> None:
        app = create_app(self.serving, self.options, self.keys, self.responses)
        self._server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=5)
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            threading.Event().wait(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def call(self, work: Any) -> Any:
        """The result of a coroutine, run on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    @property
    def model(self) -> Model:
        return self.serving.roster.model

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self.serving.books.close()
        self.serving.roster.close()
        if self.responses is not None:
            self.responses.close()

    def openai(self, **options: Any) -> OpenAI:
        return OpenAI(**self._client(f"{self.url}/v1", options))

    def async_openai(self, **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(**self._client(f"{self.url}/v1", options))

    def anthropic(self, **options: Any) -> Anthropic:
        return Anthropic(**self._client(self.url, options))

    def async_anthropic(self, **options: Any) -> AsyncAnthropic:
        return AsyncAnthropic(**self._client(self.url, options))

    def http(self, **options: Any) -> httpx.Client:
        # Reading the machine's certificates would take longer than most requests here.
        return httpx.Client(base_url=self.url, timeout=30, verify=False, **options)

    def metric(self, name: str) -> float:
        """The value of a metric, over all its labels."""
        with self.http() as http:
            lines = http.get("/metrics").text.splitlines()
        values = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return sum(float(value) for sample, value in values if sample.split("{")[0] == name)

    def _client(self, url: str, options: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": url, "api_key": "none", "max_retries": 0, "timeout": 30, **options}

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            runner.run(self._server.serve())


def issued(folder: Path, *names: str) -> tuple[Keys, list[str]]:
    """What checks keys of tenants with these names, and the keys."""
    file = KeyFile(folder / "keys.json")
    return Keys(file.path), [file.add(name) for name in names]


Serve = Callable[..., Server]


@pytest.fixture
def serve(tiny_llama: Path, tmp_path: Path) -> Iterator[Serve]:
    """``serve(settings..., options=, keys=, responses=, books=, paths=, max_waiting=)``.

    Models are called like their files.
    """
    servers: list[Server] = []

    def serve_(
        *,
        options: Options = Options(),  # noqa: B008 - frozen
        keys: Keys | None = None,
        responses: ResponseStore | None = None,
        paths: Sequence[Path] = (tiny_llama,),
        max_waiting: int = 256,
        books: Books | None = None,
        **settings: Any,
    ) -> Server:
        serving = Serving(roster(paths, **settings), max_waiting=max_waiting, books=books)
        server = Server(serving, options, keys, responses)
        servers.append(server)
        server.start()
        return server

    yield serve_
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Server]:
    """One server for the tests of a module that leave no trace but a warm cache."""
    server = Server(Serving(roster([tiny_llama])), Options())
    server.start()
    yield server
    server.stop()


def roster(paths: Sequence[Path], **settings: Any) -> Roster:
    """With the first of the models loaded."""
    values = {"cache_dir": None, "memory_budget": 64 << 20, "threads": 1, **settings}
    choices = [Choice(path.stem, path) for path in paths]
    return Roster(choices, lambda path: Model.load(path, **values)).__enter__()
