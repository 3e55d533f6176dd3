"""What the server adds to the library: to a hit's time to first token, and to decode speed.

Usage: ``python bench/server_overhead.py``. See docs/bench.md.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import typer

from anaphora import Model, Sampling, Stream
from anaphora.cli.output import AsJson, CacheDir, ModelPath, err, prepare_model
from anaphora.config import Config
from anaphora.scratch import scratch_folder
from anaphora.settings import DEFAULT_CACHE_DIR
from client import Answer, ask
from report import Report, Row, paired
from servers import rest, serve
from texts import Texts

PREFIX = 4096
DECODED = 128
HITS = 15
"""Questions of a round: one and the same request takes 10 % more or less each time."""
DECODES = 5
"""How many of them get a longer answer as well."""
CONTEXT = 8192
POLL_SECONDS = 1.0
"""Between two scrapes of the metrics, which in Prometheus is rarely set to less."""
QUESTION = " Which of these rules, called {}, would surprise a careful reader of the text above?"
"""About 20 tokens."""

LIBRARY = "library"

Ask = Callable[[str, int], Answer]
"""Continue the document with a text, and generate so many tokens."""

Side = Mapping[Literal["prompt", "chat"], Ask]
"""The document as a raw prompt, and as the system message of a chat."""


class Values:
    """What was measured."""

    def __init__(self) -> None:
        self.first: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        """Seconds to the first token of a hit: by kind of prompt, and side."""
        self.speed: defaultdict[str, list[float]] = defaultdict(list)
        """Tokens a second, by side."""

    def round(
        self, sides: Mapping[str, Side], processes: Sequence[psutil.Process], number: int
    ) -> None:
        """Hits and longer answers; every side is asked before the next question.

        ``processes`` are those of all sides: only one has anything to do at any time.
        """
        names = list(sides)
        for side in sides.values():
            for ask_ in side.values():  # the document is computed, or read as an earlier round's
                rest(*processes)
                ask_("Hello.", 1)
        for hit in range(HITS):
            names = [*names[1:], names[0]]  # another comes first each time
            text = QUESTION.format(f"{number}-{hit}")
            for kind in ("prompt", "chat"):
                for name in names:
                    rest(*processes)
                    answer = sides[name][kind](text, 1)
                    if answer.cached_tokens < PREFIX - 2:
                        raise RuntimeError(f"the measurement went wrong: {name} did not hit")
                    self.first[kind, name].append(answer.first_token)
            for name in names if hit < DECODES else ():
                rest(*processes)
                self.speed[name].append(sides[name]["prompt"](text, DECODED).speed)


def library(model: Model, document: str, bias: Mapping[str, float]) -> Side:
    """The library's side."""
    sampling = Sampling(temperature=0, logit_bias={int(id_): value for id_, value in bias.items()})

    def read(stream: Callable[[], Stream]) -> Answer:
        began = time.perf_counter()
        running = stream()
        times = [time.perf_counter() - began for _ in running]
        reply, usage = running.reply, running.reply.usage
        counts = (usage.prompt_tokens, usage.read_tokens, usage.generated_tokens)
        return Answer(reply.text, times[0], times[-1], *counts)

    def prompt(text: str, tokens: int) -> Answer:
        return read(lambda: model.stream(document + text, max_tokens=tokens, sampling=sampling))

    def chat(text: str, tokens: int) -> Answer:
        return read(lambda: model.chat(document, max_tokens=tokens, sampling=sampling).stream(text))

    return {"prompt": prompt, "chat": chat}


def server(port: int, document: str, bias: Mapping[str, float]) -> Side:
    """The server's side, with somebody who reads its metrics meanwhile."""

    def send(path: str, tokens: int, body: Mapping[str, Any]) -> Answer:
        with _watched(port):
            sampling = {"temperature": 0, "logit_bias": bias}
            return ask(port, path, {**body, **sampling, "max_tokens": tokens})

    def prompt(text: str, tokens: int) -> Answer:
        return send("/v1/completions", tokens, {"prompt": document + text})

    def chat(text: str, tokens: int) -> Answer:
        system = {"role": "system", "content": document}
        body = {"messages": [system, {"role": "user", "content": text}]}
        return send("/v1/chat/completions", tokens, body)

    return {"prompt": prompt, "chat": chat}


@contextmanager
def _watched(port: int) -> Iterator[None]:
    over = threading.Event()

    def poll() -> None:
        wait = random.uniform(0, POLL_SECONDS)
        while not over.wait(wait):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read()
            wait = POLL_SECONDS

    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(poll)
        try:
            yield
        finally:
            over.set()
        polling.result()


def main(
    cache_dir: CacheDir = DEFAULT_CACHE_DIR,
    model: ModelPath = None,
    engine: Annotated[
        Literal["thread", "process", "both"] | None,
        typer.Option(help="Where the server's engine runs. Default: the server's own."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with models anew.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure the server against the library in one run; exit code 1 if a bar is missed."""
    path = prepare_model(model, cache_dir)
    texts = Texts(path)
    document = texts.document(PREFIX, "A copy of the reference.")
    engines: Mapping[str, tuple[str, ...]] = {"server": ()}
    if engine is not None:
        places = ("thread", "process") if engine == "both" else (engine,)
        engines = {f"server, engine in a {place}": ("--engine", place) for place in places}
    values = Values()
    with scratch_folder(cache_dir.expanduser(), "bench") as folder, err.status("") as status:
        # The library as it is by default: the engine on a thread.
        settings = Config(ctx_size=CONTEXT, cache_dir=folder / LIBRARY, engine="thread").settings()
        for number in range(rounds):
            status.update(f"round {number + 1} of {rounds}")
            # Where a context happens to lie in memory changes its speed by some percent, so every
            # round has new ones.
            with ExitStack() as stack:
                loaded = stack.enter_context(Model(path, settings))
                sides = {LIBRARY: library(loaded, document, texts.no_end)}
                processes = [psutil.Process()]
                for name, options in engines.items():
                    where = folder / name
                    where.mkdir(exist_ok=True)
                    options = ("--ctx-size", str(CONTEXT), *options)
                    running = serve(path, where, folder / f"{name}.log", *options)
                    stack.enter_context(running)
                    sides[name] = server(running.port, document, texts.no_end)
                    processes += running.processes
                values.round(sides, processes, number)
    report = _report(values, list(engines), path, rounds)
    report.show(as_json)
    if not report.passed:
        raise typer.Exit(1)


def _report(values: Values, servers: list[str], path: Path, rounds: int) -> Report:
    rows = []
    for name in servers:
        for kind in ("prompt", "chat"):
            ours, theirs = values.first[kind, name], values.first[kind, LIBRARY]
            medians = (1e3 * statistics.median(theirs), 1e3 * statistics.median(ours))
            more = statistics.median(1e3 * (a - b) for a, b in zip(ours, theirs, strict=True))
            rows.append(Row(f"{name}: hit, {PREFIX} + 20, {kind}", medians, "ms", more, 5.0))
        speeds = (values.speed[LIBRARY], values.speed[name])
        rows.append(
            Row(
                f"{name}: decode at {PREFIX}",
                (statistics.median(speeds[0]), statistics.median(speeds[1])),
                "tokens/s",
                paired(speeds[1], speeds[0]),
                0.97,
                at_least=True,
            )
        )
    return Report(
        f"{path.name}, medians of {rounds} rounds with {HITS} questions each",
        (LIBRARY, "server"),
        "ms more, ratio",
        tuple(rows),
        (
            "a question is asked of one side right after the other, and compared with that",
            f"the metrics are read every {POLL_SECONDS:g} s meanwhile",
            "the floor is the library itself: 0 ms more, ratio 1",
        ),
    )


if __name__ == "__main__":
    typer.run(main)
