"""Two hundred connections, thousands of requests, clients that leave: does anything pile up?

Usage: ``python bench/load.py``, or with ``--engine process --kill``. See docs/bench.md.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families

from anaphora.cli.output import AsJson, CacheDir, err
from anaphora.scratch import scratch_folder
from anaphora.settings import DEFAULT_CACHE_DIR
from client import ask
from report import Report, Row
from servers import Server, rest, serve
from texts import Texts

CHAT = "/v1/chat/completions"
PARALLEL = 8
CONTEXT = 2048
BATCHES = 4
"""The first one is the warm-up: what comes later is compared with its end."""
SYSTEMS, TEXTS = 10, 100
"""How many different ones there are. The server remembers the tokens of long texts up to a budget;
that, too, must not grow after the warm-up."""
STALL_SECONDS = 10.0
GROWTH = 1.05
POOL = (os.cpu_count() or 1) + 4
"""Threads of asyncio's pool at most; it starts one only when all it has are busy."""
BACK_SECONDS = 10.0

Leave = Literal["never", "at once", "in prefill", "in decode", "unstreamed"]
MIX: dict[Leave, int] = {
    "never": 10,
    "at once": 2,
    "in prefill": 3,
    "in decode": 3,
    "unstreamed": 2,
}
"""When clients leave, by weight. Of those who never do, every third doesn't stream."""


@dataclass(frozen=True, slots=True)
class Task:
    """One request, and when its client leaves."""

    body: dict[str, Any]
    leave: Leave
    patience: float | None
    """Seconds, of those who leave at once or without streaming."""
    texts: int
    """How many are read by those who leave in decode."""


@dataclass(slots=True)
class Seen:
    """What the clients saw. Times are seconds."""

    ends: Counter[str] = field(default_factory=Counter)
    silence: float = 0.0
    """Longest time without anything for anybody, while requests were in flight."""
    pause: float = 0.0
    """Longest time between two events of one answer."""
    wait: float = 0.0
    """Longest time from a request to its begin."""
    in_flight: int = 0
    last_progress: float = 0.0

    def progress(self) -> None:
        now = time.perf_counter()
        if self.in_flight:
            self.silence = max(self.silence, now - self.last_progress)
        self.last_progress = now


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at rest."""

    rss: int
    """Bytes, of all its processes."""
    descriptors: int
    threads: int


class Clients:
    """So many clients, each with one request in flight."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._count = count
        self.seen = Seen()
        self.over = 0
        """Requests that have ended, one way or another."""

    async def work(self, tasks: list[Task]) -> None:
        """Send all tasks."""
        left = iter(tasks)

        async def client() -> None:
            for task in left:
                await self._send(http, task)

        # Connections are kept and used again, except by those who leave.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._count)
        async with httpx.AsyncClient(base_url=self._url, limits=limits, timeout=None) as http:
            await asyncio.gather(*(client() for _ in range(self._count)))

    async def _send(self, http: httpx.AsyncClient, task: Task) -> None:
        seen = self.seen
        seen.progress()
        seen.in_flight += 1
        try:
            async with asyncio.timeout(task.patience):
                end = await (self._stream if task.body["stream"] else self._whole)(http, task)
        except TimeoutError:
            end = "left"
        except httpx.HTTPError as error:
            end = f"broken: {error!r}"
        seen.progress()
        seen.in_flight -= 1
        seen.ends[end] += 1
        self.over += 1
        if end == "error":  # a fair client doesn't come again at once
            await asyncio.sleep(0.2)

    async def _whole(self, http: httpx.AsyncClient, task: Task) -> str:
        response = await http.post(CHAT, json=task.body)
        return _end(response)

    async def _stream(self, http: httpx.AsyncClient, task: Task) -> str:
        seen, sent = self.seen, time.perf_counter()
        before: float | None = None
        texts = 0
        failed = finished = False
        async with http.stream("POST", CHAT, json=task.body) as response:
            if response.status_code != 200:
                await response.aread()
                return _end(response)
            async for event in _events(response):
                seen.progress()
                if event is None:
                    return "answered" if finished else "broken: a stream without an end"
                if "error" in event:
                    failed = True
                    continue
                now = time.perf_counter()
                if before is None:
                    seen.wait = max(seen.wait, now - sent)
                    if task.leave == "in prefill":
                        return "left"
                else:
                    seen.pause = max(seen.pause, now - before)
                before = now
                (choice,) = event["choices"]
                texts += bool(choice["delta"].get("content"))
                finished = finished or choice["finish_reason"] is not None
                if task.leave == "in decode" and texts >= task.texts:
                    return "left"
        return "error" if failed else "broken: a stream that just stopped"


def _end(response: httpx.Response) -> str:
    if response.status_code == 200:
        return "answered"
    return "error" if "error" in response.json() else f"broken: {response.text}"


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any] | None]:
    """The events of a stream; ``None`` for its proper end."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            yield None
        elif line.startswith("data: "):
            yield json.loads(line[len("data: ") :])


class Run:
    """One server under load."""

    def __init__(self, server: Server, texts: Texts, clients: Clients, seed: int) -> None:
        self._server = server
        self._texts = texts
        self._clients = clients
        self._random = random.Random(seed)
        self._systems = [
            texts.document(self._random.randint(200, 500), f"System {n}.") for n in range(SYSTEMS)
        ]
        self._long = [
            texts.document(self._random.randint(20, 1000), f"Text {n}.") for n in range(TEXTS)
        ]
        self._count = 0
        self.samples: list[Sample] = []
        self.back: float | None = None
        """Seconds from the engine's death to the first answer."""

    def batch(self, count: int, kill: bool) -> None:
        """Send so many requests, wait until the server is at rest, and look at it."""
        tasks = [self._task() for _ in range(count)]
        asyncio.run(self._work(tasks, kill))
        gc.collect()  # closes connections whose making was broken off
        rest(*self._server.processes)
        processes = self._server.processes
        self.samples.append(
            Sample(
                sum(process.memory_info().rss for process in processes),
                sum(process.num_fds() for process in processes),
                sum(process.num_threads() for process in processes),
            )
        )

    def problems(self) -> list[str]:
        """What is wrong with the server at rest."""
        metrics = self._metrics()
        found = [
            f"{name} is {metrics[name]:g} without requests"
            for name in ("anaphora_requests_running", "anaphora_requests_waiting")
            if metrics[name]
        ]
        prompt, read, written = (
            metrics[f"anaphora_{name}_tokens_total"]
            for name in ("prompt", "cache_read", "cache_written")
        )
        if prompt != read + written:
            found.append(f"of {prompt:g} prompt tokens {read:g} were read, {written:g} written")
        ends = self._fill()
        if ends["answered"] != PARALLEL:
            found.append(f"requests that take all cells ended so: {dict(ends)}")
        body = self._body(self._systems[0], "Hello.", 4)
        ask(self._server.port, CHAT, body)
        again = ask(self._server.port, CHAT, body)
        if again.cached_tokens != again.prompt_tokens:
            found.append(f"a repeated prompt read {again.cached_tokens} of {again.prompt_tokens}")
        return found

    def _fill(self) -> Counter[str]:
        """As many requests as run together, each almost as long as the context."""
        document = self._texts.document(CONTEXT - 256, "All cells.")
        bodies = [self._body(f"{n} {document}", "Hello.", 64) for n in range(PARALLEL)]
        clients = Clients(self._server.url, PARALLEL)
        asyncio.run(clients.work([Task(body, "never", None, 0) for body in bodies]))
        return clients.seen.ends

    async def _work(self, tasks: list[Task], kill: bool) -> None:
        work = asyncio.create_task(self._clients.work(tasks))
        if kill:
            half = self._clients.over + len(tasks) // 2
            while self._clients.over < half:
                await asyncio.sleep(0.01)
            self.back = await asyncio.to_thread(self._kill)
        await work

    def _kill(self) -> float:
        """Kill the engine's process; returns seconds until a request is answered again."""
        children = self._server.processes[1:]
        if not children:
            raise RuntimeError("the server has no process of the engine's own: --engine process")
        killed = time.perf_counter()
        for child in children:
            child.kill()
        body = self._body("Are you there?", "Hello.", 1)
        while True:
            try:
                ask(self._server.port, CHAT, body)
            except RuntimeError:  # an error, and a proper one
                time.sleep(0.05)
            else:
                return time.perf_counter() - killed

    def _task(self) -> Task:
        chance = self._random
        self._count += 1
        (leave,) = chance.choices(list(MIX), list(MIX.values()))
        stream = leave != "unstreamed" and not (leave == "never" and chance.random() < 1 / 3)
        system, text = chance.choice(self._systems), chance.choice(self._long)
        # Behind the system message no two prompts are the same.
        body = self._body(system, f"Request {self._count}.", chance.randint(1, 64), stream=stream)
        body["messages"].append({"role": "user", "content": text})
        longest = {"at once": 0.01, "unstreamed": 5.0}.get(leave)
        patience = None if longest is None else chance.uniform(0, longest)
        return Task(body, leave, patience, chance.randint(1, 8))

    def _body(self, system: str, text: str, tokens: int, *, stream: bool = True) -> dict[str, Any]:
        return {
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": text},
            ],
            "max_tokens": tokens,
            "logit_bias": self._texts.no_end,
            "stream": stream,
        }

    def _metrics(self) -> dict[str, float]:
        """Sums over all labels."""
        with urllib.request.urlopen(f"{self._server.url}/metrics", timeout=60) as response:
            families = text_string_to_metric_families(response.read().decode())
        sums: defaultdict[str, float] = defaultdict(float)
        for family in families:
            for sample in family.samples:
                sums[sample.name] += sample.value
        return dict(sums)


def tiny_model(folder: Path) -> Path:
    """A random model whose tokens cost next to nothing, so that the server is what is loaded."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "tests.tiny_models", str(folder), "llama"]
    subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL)
    return folder / "llama.gguf"


def main(
    cache_dir: CacheDir = DEFAULT_CACHE_DIR,
    model: Annotated[
        Path | None, typer.Option(help="A GGUF file. Default: a tiny random model.")
    ] = None,
    engine: Annotated[
        Literal["thread", "process"] | None,
        typer.Option(help="Where the engine runs. Default: the server's own."),
    ] = None,
    kill: Annotated[
        bool, typer.Option("--kill", help="Kill the engine's process half-way.")
    ] = False,
    connections: Annotated[int, typer.Option(min=1)] = 200,
    requests: Annotated[int, typer.Option(min=BATCHES)] = 2000,
    seed: Annotated[int, typer.Option(help="Of the requests and when clients leave.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Load the server and see what is left afterwards; exit code 1 if a bar is missed."""
    with scratch_folder(cache_dir.expanduser(), "load") as folder, err.status("") as status:
        path = tiny_model(folder) if model is None else model.expanduser()
        # Both tiers are full after the warm-up: what grows later is none of theirs.
        budgets = ("16MiB", "64MiB") if model is None else ("512MiB", "2GiB")
        options: tuple[object, ...] = ("--memory-budget", budgets[0], "--disk-budget", budgets[1])
        options += ("--parallel", PARALLEL, "--ctx-size", CONTEXT)
        if model is None:
            options += ("--threads", 1)  # more would wait for each other most of the time
        if engine is not None:
            options += ("--engine", engine)
        with serve(path, folder, folder / "server.log", *options) as server:
            clients = Clients(server.url, connections)
            run = Run(server, Texts(path), clients, seed)
            for batch in range(BATCHES):
                status.update(f"{batch * requests // BATCHES} of {requests} requests")
                run.batch(requests // BATCHES, kill and batch == BATCHES // 2)
            problems = run.problems()
            start_seconds = server.start_seconds
    report = _report(run, clients.seen, problems, kill, start_seconds, f"{path.name}, {requests}")
    report.show(as_json)
    if not report.passed:
        raise typer.Exit(1)


def _report(
    run: Run, seen: Seen, problems: list[str], kill: bool, start_seconds: float, what: str
) -> Report:
    samples = run.samples
    first, last = samples[0], samples[-1]
    broken = {end: count for end, count in seen.ends.items() if end.startswith("broken")}

    def once(name: str, value: float, unit: str, bar: float | None) -> Row:
        values = (*[None] * (len(samples) - 1), value)
        return Row(name, values, unit, value if bar is not None else None, bar)

    rows = [
        Row(
            "memory of the server",
            tuple(sample.rss / 2**20 for sample in samples),
            "MiB",
            last.rss / first.rss,
            None if kill else GROWTH,
        ),
        Row(
            "file descriptors",
            tuple(sample.descriptors for sample in samples),
            "",
            last.descriptors - first.descriptors,
            0,
        ),
        Row(
            "threads",
            tuple(sample.threads for sample in samples),
            "",
            last.threads - first.threads,
            None if kill else POOL,
        ),
        once("longest time without anything for anybody", seen.silence, "s", STALL_SECONDS),
        once("longest pause within an answer", seen.pause, "s", STALL_SECONDS),
        once("longest wait for a place", seen.wait, "s", None),
        once("answered", seen.ends["answered"], "", None),
        once("left by their clients", seen.ends["left"], "", None),
        once("ended with an error", seen.ends["error"], "", None if kill else 0),
        once("broken off", sum(broken.values()), "", 0),
        once("faults found at rest", len(problems), "", 0),
    ]
    if run.back is not None:
        rows.append(once("back after the kill", run.back, "s", BACK_SECONDS + start_seconds))
    return Report(
        f"{what} requests, {PARALLEL} at a time",
        tuple(f"{part}/{BATCHES}" for part in range(1, BATCHES + 1)),
        "growth, value",
        tuple(rows),
        (
            "memory, descriptors and threads at rest after each part, growth since the first",
            *problems,
            *(f"{count} {end}" for end, count in broken.items()),
        ),
    )


if __name__ == "__main__":
    typer.run(main)
