"""``anaphora bench``: the engine against a plain loop over llama.cpp's own decode call.

Both run in one process on one loaded model file, taken in turn, and only ratios within the run are
judged. The plain loop does nothing but decode calls and sampling: no cache, no scheduling.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from llama_cpp import llama_cpp as lib

from anaphora.bundled import load_test_document
from anaphora.cache.keys import Segment, Tokens
from anaphora.clock import ManualClock
from anaphora.engine.llamacpp.context import GRID
from anaphora.engine.llamacpp.engine import LlamaEngine
from anaphora.engine.llamacpp.load import load_engine
from anaphora.engine.llamacpp.params import build
from anaphora.engine.llamacpp.sampler import Sampler
from anaphora.engine.protocol import (
    CacheHints,
    Done,
    Event,
    Failed,
    Found,
    Generated,
    Request,
    Sampling,
    Started,
)
from anaphora.errors import EngineError, SettingsError
from anaphora.settings import Settings
from anaphora.vocabulary import Vocabulary

PREFIX = 4096
SUFFIX = 20
DECODED = 64
SHARED = 3500
SEQUENCES = 8
LONG = 7680
HITS = 3
"""How often each kind of hit is timed in a round."""
REST = 0.5
"""Seconds before a hit is timed, for the engine and the plain loop alike."""
SWEPT = 128 << 20
"""Bytes read then, so that both find the processor's caches cold."""
LONG_CACHED = LONG * 95 // 100

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: medians in seconds, and the ratio that is judged."""

    name: str
    anaphora: float
    reference: float
    ratio: float
    bar: float
    at_least: bool = False
    """Whether the ratio must be at least the bar; otherwise at most."""

    @property
    def passed(self) -> bool:
        return self.ratio >= self.bar if self.at_least else self.ratio <= self.bar


@dataclass(frozen=True, slots=True)
class Report:
    """Rows of one flash-attention choice, and the figures beside them."""

    model: str
    flash_attn: str
    repeats: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)


@dataclass(slots=True)
class _Run:
    """When things happened, in seconds after the request was submitted."""

    started: Started | None = None
    tokens: list[float] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        return self.tokens[0]

    @property
    def steps(self) -> list[float]:
        """From each token to the next."""
        return [after - before for before, after in pairwise(self.tokens)]

    @property
    def found(self) -> Found:
        assert self.started is not None
        return self.started.found


class _Engine:
    """The engine under test, driven step by step on this thread, with its tiers on."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._runs: dict[str, _Run] = {}
        self._open = 0
        self._began = 0.0
        self._clock = ManualClock()
        self.engine = load_engine(path, settings, self._note, self._clock)
        # Answers of a fixed length: end tokens are out of reach, for the plain loop too.
        ends = dict.fromkeys(self.engine.vocabulary.end_of_generation, -1e9)
        self.sampling = Sampling(temperature=0.0, logit_bias=ends)
        self._count = 0

    def _note(self, event: Event) -> None:
        run = self._runs[event.id]
        match event:
            case Started():
                run.started = event
            case Generated():
                run.tokens.append(time.perf_counter() - self._began)
            case Done():
                self._open -= 1
            case Failed():
                raise event.error

    def request(self, tokens: Tokens, max_tokens: int, salt: str) -> Request:
        self._count += 1
        hints = CacheHints((Segment("bench", salt.encode()),))
        return Request(f"bench-{self._count}", tokens, max_tokens, self.sampling, hints)

    def run(self, *requests: Request) -> list[_Run]:
        """Serve requests that arrive together."""
        self._runs = {request.id: _Run() for request in requests}
        self._open, self._began = len(requests), time.perf_counter()
        for request in requests:
            self.engine.submit(request)
        while self._open:
            self.engine.step()
        return list(self._runs.values())

    def settle(self) -> None:
        """Do all idle work there is, and let the disk come to rest."""
        while (wait := self.engine.step()) is not None:
            self._clock.advance(wait)
        _rest()

    def empty(self) -> None:
        """Settle, and leave no sequence live."""
        self.settle()
        self.engine.release_idle()

    def close(self) -> None:
        self.engine.close()


class _Loop:
    """The plain loop: decode calls and a sampler.

    It runs in the engine's own context while that is empty: where a context happens to lie in
    memory changes its speed by some percent, for this very reason two of them can't be compared.
    """

    def __init__(self, engine: LlamaEngine, sampling: Sampling) -> None:
        self.context = engine.context
        self._vocabulary_size = engine.vocabulary.size
        self._sampling = sampling

    def sampler(self) -> Sampler:
        empty = np.empty(0, dtype=np.int32)
        return Sampler(self._sampling, self._vocabulary_size, empty)

    def prefill(self, tokens: Tokens, start: int = 0, seq: int = 0) -> int:
        """Compute ``tokens`` from position ``start`` on; returns the next token."""
        size = self.context.batch_size
        sampler = self.sampler()
        for at in range(0, len(tokens), size):
            part = tokens[at : at + size]
            last = at + size >= len(tokens)
            self.context.prefill(seq, part, start + at, want_logits=last)
        token = sampler.sample(self.context.pointer, -1)
        sampler.close()
        return token

    def decode(self, token: int, start: int, count: int) -> list[float]:
        """Generate ``count`` tokens; returns seconds of each step."""
        sampler, steps = self.sampler(), []
        for position in range(start, start + count):
            began = time.perf_counter()
            self.context.decode([0], [token], [position])
            token = sampler.sample(self.context.pointer, 0)
            steps.append(time.perf_counter() - began)
        sampler.close()
        return steps

    def clear(self) -> None:
        for seq in range(SEQUENCES + 1):
            self.context.truncate(seq, 0)


def measure(
    path: Path, folder: Path, choice: Literal["auto", "other"], repeats: int, say: Say
) -> Report:
    """Measure one model, with the flash attention it would use, or with the ``other`` choice.

    ``folder`` is empty at first, so that every run starts cold.

    Raises:
        SettingsError: the model runs with the cache off.
        EngineError: a hit did not come from where it should, so that its time means nothing.
    """
    flash_attn = build(Settings()).flash_attn == (choice == "auto")
    settings = Settings(
        cache_dir=folder,
        context_size=LONG + 256,
        parallel=SEQUENCES,
        memory_budget=2 << 30,
        flash_attn="on" if flash_attn else "off",
    )
    engine = _Engine(path, settings)
    try:
        info = engine.engine.info
        if not info.caching:
            raise SettingsError(f"{info.model} runs with the cache off: nothing to measure")
        tokens = _prompt(engine.engine.vocabulary)
        rows, medians = _compare(engine, tokens, repeats, say)
    finally:
        engine.close()
    restart, notes = _restart(
        path, replace(settings, cache_dir=folder / "restart"), tokens, repeats, say
    )
    moved = info.bytes_per_token * PREFIX
    notes = (
        f"a hit moves {moved / 1e6:.0f} MB of KV: from memory it costs "
        f"{(medians['memory'] - medians['live']) * 1e3:.1f} ms more than from live cells",
        *notes,
        "saved time is measured against the engine's own cold run; everything else against a "
        "plain loop over llama.cpp's decode call",
    )
    return Report(info.model, settings.flash_attn, repeats, (*rows, restart), notes)


def _rest() -> None:
    """As after a pause in which other programs ran."""
    time.sleep(REST)
    np.ones(SWEPT, dtype=np.int8).sum()


def _prompt(vocabulary: Vocabulary) -> Tokens:
    text = load_test_document(8 * LONG)
    tokens = np.array(vocabulary.encode(text), dtype=np.int32)
    return np.resize(tokens, LONG + SUFFIX)


class _Times(dict[str, list[float]]):
    """Seconds by what was measured, one value a round."""

    def note(self, name: str, *seconds: float) -> None:
        """The value of this round: the median of ``seconds``."""
        self.setdefault(name, []).append(statistics.median(seconds))

    def paired(self, name: str, reference: str) -> float:
        return _paired(self[name], self[reference])


def _compare(
    engine: _Engine, tokens: Tokens, repeats: int, say: Say
) -> tuple[list[Row], dict[str, float]]:
    loop, times = _Loop(engine.engine, engine.sampling), _Times()
    loop.prefill(tokens[:PREFIX])  # buffers are touched for the first time before anything is timed
    loop.clear()
    for number in range(repeats):
        say(f"round {number + 1} of {repeats}: cold, decode, hits")
        _cold_and_hits(engine, tokens, f"round {number}", times)
        _cold_and_suffixes(loop, tokens, times)
    for number in range(repeats):
        say(f"round {number + 1} of {repeats}: {SEQUENCES} sequences on one prefix")
        times.note("eight", *_eight(engine, tokens, f"eight {number}"))
        engine.empty()
        times.note("loop eight", *_eight_plain(loop, tokens))
        loop.clear()
    for number in range(repeats):
        say(f"round {number + 1} of {repeats}: {LONG} tokens, 95 % of them cached")
        _long(engine, tokens, f"long {number}", times)

    def row(
        what: str, name: str, reference: str, ratio: float, bar: float, *, at_least: bool = False
    ) -> Row:
        return Row(what, medians[name], medians[reference], ratio, bar, at_least=at_least)

    paired = times.paired
    size = f"{PREFIX} + {SUFFIX}"
    medians = {name: statistics.median(values) for name, values in times.items()}
    python = medians["python"]
    rows = [
        row(f"cold, {PREFIX} tokens", "cold", "loop cold", paired("cold", "loop cold"), 1.05),
        row(
            f"decode step at {PREFIX}",
            "decode",
            "loop decode",
            paired("loop decode", "decode"),
            0.95,
            at_least=True,
        ),
        Row("Python's own work, a token", python, 150e-6, python / 150e-6, 1.0),
        row(
            f"hit in live cells, {size}", "live", "loop suffix", paired("live", "loop suffix"), 1.15
        ),
        row(
            f"hit in memory, {size}", "memory", "loop suffix", paired("memory", "loop suffix"), 1.15
        ),
        row(
            f"decode step, {SEQUENCES} on one {SHARED}-token prefix",
            "eight",
            "loop eight",
            paired("eight", "loop eight"),
            1.2,
        ),
        row(
            f"time saved, 95 % of {LONG} tokens cached",
            "long hit",
            "long cold",
            1 - paired("long hit", "long cold"),
            0.9,
            at_least=True,
        ),
    ]
    return rows, medians


def _cold_and_hits(engine: _Engine, tokens: Tokens, salt: str, times: _Times) -> None:
    prefix = tokens[:PREFIX]
    with _native_seconds() as native:
        (cold,) = engine.run(engine.request(prefix, DECODED, salt))
    times.note("cold", cold.first_token)
    times.note("decode", *cold.steps)
    times.note("python", _python_share(cold.steps, native))
    live, memory = [], []
    for number in range(HITS):
        engine.settle()
        (hit,) = engine.run(engine.request(_hit(tokens, number), 1, salt))
        _expect(hit.found.live >= PREFIX, "the hit did not come from live cells")
        live.append(hit.first_token)
    for number in range(HITS, 2 * HITS):
        engine.empty()
        (hit,) = engine.run(engine.request(_hit(tokens, number), 1, salt))
        _expect(hit.found.memory >= PREFIX, "the hit did not come from memory")
        memory.append(hit.first_token)
    times.note("live", *live)
    times.note("memory", *memory)
    engine.empty()


def _cold_and_suffixes(loop: _Loop, tokens: Tokens, times: _Times) -> None:
    began = time.perf_counter()
    token = loop.prefill(tokens[:PREFIX])
    times.note("loop cold", time.perf_counter() - began)
    times.note("loop decode", *loop.decode(token, PREFIX, DECODED - 1))
    seconds = []
    for number in range(HITS):
        loop.context.truncate(0, PREFIX)
        _rest()
        began = time.perf_counter()
        loop.prefill(_hit(tokens, number)[PREFIX:], PREFIX)
        seconds.append(time.perf_counter() - began)
    times.note("loop suffix", *seconds)
    loop.clear()


def _hit(tokens: Tokens, number: int) -> Tokens:
    """The prefix and some other new tokens for each ``number``."""
    return np.concatenate([tokens[:PREFIX], tokens[PREFIX + SUFFIX * number :][:SUFFIX]])


def _long(engine: _Engine, tokens: Tokens, salt: str, times: _Times) -> None:
    (cold,) = engine.run(engine.request(tokens[:LONG], 1, salt))
    engine.settle()
    other_end = tokens[LONG_CACHED:LONG][::-1]
    parting = np.concatenate([tokens[:LONG_CACHED], other_end])
    (hit,) = engine.run(engine.request(parting, 1, salt))
    _expect(hit.found.total >= LONG_CACHED, "the long prompt did not hit")
    times.note("long cold", cold.first_token)
    times.note("long hit", hit.first_token)
    engine.empty()


def _paired(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """Median of the ratios within each round: a machine may change its speed between rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _eight(engine: _Engine, tokens: Tokens, salt: str) -> list[float]:
    """Decode steps of sequences that continue one shared prefix, all of them generating."""
    engine.run(engine.request(tokens[:SHARED], 0, salt))
    requests = [engine.request(_continued(tokens, n), DECODED, salt) for n in range(SEQUENCES)]
    *_, last = engine.run(*requests)
    # From the last one's first token on, all of them generate together.
    return last.steps[: DECODED // 2]


def _eight_plain(loop: _Loop, tokens: Tokens) -> list[float]:
    loop.prefill(tokens[:SHARED])
    next_tokens, lengths = [], []
    for number in range(SEQUENCES):
        loop.context.copy(0, number + 1, 0, SHARED)
        rest = _continued(tokens, number)[SHARED:]
        next_tokens.append(loop.prefill(rest, SHARED, number + 1))
        lengths.append(SHARED + len(rest))
    samplers = [loop.sampler() for _ in range(SEQUENCES)]
    steps = []
    for _ in range(DECODED // 2):
        began = time.perf_counter()
        loop.context.decode(range(1, SEQUENCES + 1), next_tokens, lengths)
        next_tokens = [s.sample(loop.context.pointer, row) for row, s in enumerate(samplers)]
        lengths = [length + 1 for length in lengths]
        steps.append(time.perf_counter() - began)
    for sampler in samplers:
        sampler.close()
    return steps


def _continued(tokens: Tokens, number: int) -> Tokens:
    start = PREFIX + 32 * number
    return np.concatenate([tokens[:SHARED], tokens[start : start + SUFFIX]])


def _restart(
    path: Path, settings: Settings, tokens: Tokens, repeats: int, say: Say
) -> tuple[Row, tuple[str, ...]]:
    """A hit from disk by a new engine, the block files' pages dropped beforehand.

    What it takes beyond the same hit in memory, by the same engine, is judged against one
    sequential read of the same files, as cold.
    """
    folder = settings.cache_dir
    assert folder is not None
    writer = _Engine(path, settings)
    writer.run(writer.request(tokens[:PREFIX], 0, "restart"))
    writer.close()
    files = sorted(folder.glob("*/blocks/*/*"))
    size = sum(file.stat().st_size for file in files)
    hits, warm, reads = [], [], []
    for number in range(repeats):
        say(f"round {number + 1} of {repeats}: hit after a restart")
        reader = _Engine(path, settings)
        try:
            # One decode call, as warm-up.
            reader.run(reader.request(tokens[-GRID:], 1, "warm-up"))
            reader.empty()
            _drop_pages(files)
            (run,) = reader.run(reader.request(_hit(tokens, 0), 1, "restart"))
            _expect(run.found.disk >= PREFIX, "the hit did not come from disk")
            hits.append(run.first_token)
            reader.empty()
            (run,) = reader.run(reader.request(_hit(tokens, 1), 1, "restart"))
            _expect(run.found.memory >= PREFIX, "the hit did not come from memory")
            warm.append(run.first_token)
            read = []
            for direct in (0, getattr(os, "O_DIRECT", 0)):  # buffered or direct, the faster
                _drop_pages(files)
                read.append(_read_all(files, direct))
            reads.append(min(read))
        finally:
            reader.close()
    more = [hit - memory for hit, memory in zip(hits, warm, strict=True)]
    hit, read_time, extra = map(statistics.median, (hits, reads, more))
    row = Row(
        f"hit after a restart, {PREFIX} + {SUFFIX}",
        hit,
        statistics.median(warm) + read_time,
        _paired(more, reads),
        1.2,
    )
    return row, (
        f"after a restart {size / 1e6:.0f} MB come from disk: one cold sequential read takes "
        f"{read_time * 1e3:.1f} ms ({size / read_time / 1e9:.2f} GB/s), the hit "
        f"{extra * 1e3:.1f} ms more than from memory",
    )


def _drop_pages(files: Sequence[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _read_all(files: Sequence[Path], flags: int) -> float:
    """Seconds of one sequential read of files, opened with ``flags``."""
    buffer = mmap.mmap(-1, 8 << 20)  # page aligned, as direct reads need it
    buffer.write(bytes(len(buffer)))  # its pages are there before the clock runs
    view = memoryview(buffer)
    began = time.perf_counter()
    for file in files:
        descriptor = os.open(file, os.O_RDONLY | flags)
        while os.readv(descriptor, [view]):
            pass
        os.close(descriptor)
    return time.perf_counter() - began


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise EngineError(f"the measurement went wrong: {problem}")


@contextmanager
def _native_seconds() -> Iterator[list[float]]:
    """Times of llama.cpp's decode and sampling calls, to tell them from Python's own work."""
    seconds: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                seconds.append(time.perf_counter() - began)

        return measured

    names = ("llama_decode", "llama_sampler_sample")
    plain = {name: getattr(lib, name) for name in names}
    for name, call in plain.items():
        setattr(lib, name, timed(call))
    try:
        yield seconds
    finally:
        for name, call in plain.items():
            setattr(lib, name, call)


def _python_share(steps: Sequence[float], native: Sequence[float]) -> float:
    """Seconds of a decode step that are not spent inside llama.cpp."""
    return (sum(steps) - sum(native[-2 * len(steps) :])) / len(steps)
