"""Random days in the life of the llama.cpp engine, checked against cold runs and its own books.

A day is a few engines one after the other on one cache folder, each with few cells and little
memory, and random requests, cancels, pauses and damage. ``ANAPHORA_SOAK=1`` runs many more days.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from anaphora.cache.keys import Segment, Tokens
from anaphora.engine.llamacpp import engine as engine_module
from anaphora.engine.llamacpp.engine import LlamaEngine
from anaphora.engine.llamacpp.load import load_engine
from anaphora.engine.llamacpp.sampler import Sampler
from anaphora.engine.protocol import CacheHints, Done, Failed, Sampling, Started
from anaphora.profiles import Anthropic, Local, OpenAI, Profile
from anaphora.profiles.outline import Boundary, Outline, Ttl
from anaphora.settings import Settings
from tests.conftest import SOAK, TinyModel
from tests.driver import Driver, Result

DAYS = 1000 if SOAK else 40
GRID = 64
NOISE = 1e-3
"""Between logits of one prompt computed in different ways in F32; they differ by about 1e-5. A
wrong KV moves them by more than 1."""

PROFILES: tuple[Profile, ...] = (Local(), Local(), Anthropic(minimum=64), OpenAI(minimum=64))
TRUNK = (Segment("house", b"h", 100),)
OWNERS: tuple[tuple[Segment, ...], ...] = (
    (Segment(),),
    (Segment("a", b"1"),),
    (*TRUNK, Segment("a", b"1")),
    (*TRUNK, Segment("b", b"2")),
    (Segment("house", b"h", 100), Segment("a", b"1", 300), Segment("a", b"3")),
)


@dataclass(frozen=True)
class Kind:
    """What the logits depend on; a reference engine answers for all days of one kind."""

    model: str = "llama"
    exact: bool = False
    kv_type: str = "f32"
    flash_attn: str = "off"

    @property
    def sharp(self) -> bool:
        """Whether noise is far too small to change an answer."""
        return self.kv_type == "f32" and self.flash_attn == "off"


KINDS = (
    *(Kind(),) * 10,
    *(Kind(exact=True),) * 6,
    Kind(model="qwen3moe"),
    Kind(exact=True, kv_type="q8_0"),
    Kind(exact=True, kv_type="q8_0", flash_attn="on"),
    Kind(kv_type="q8_0", flash_attn="on"),
    Kind(model="gemma3"),
    Kind(model="jamba"),
)


class Reference:
    """Cold answers, from an engine that never reads its cache and has room for everything."""

    def __init__(self, kind: Kind, path: Path) -> None:
        self._driver = open_engine(kind, path, cache_dir=None, memory_budget=0, context_size=2048)
        self.ends = frozenset(self._driver.engine.vocabulary.end_of_generation)
        self._known: dict[bytes, tuple[NDArray[np.float32], list[int]]] = {}

    def answer(
        self, prompt: Tokens, sampling: Sampling, count: int
    ) -> tuple[NDArray[np.float32], list[int]]:
        key = prompt.tobytes() + repr(sampling).encode()
        logits, tokens = self._known.get(key, (None, []))
        if logits is None or len(tokens) < count:
            cold = CacheHints(read=False, write=False)
            result = self._driver.run(
                prompt, count, sampling=sampling, cache=cold, want_logits=True
            )
            self._known[key] = logits, tokens = result.logits, result.tokens
        return logits, tokens[:count]

    def close(self) -> None:
        self._driver.close()


def open_engine(kind: Kind, path: Path, **settings: object) -> Driver:
    values: dict[str, Any] = {
        "kv_type": kind.kv_type,
        "flash_attn": kind.flash_attn,
        "exact": kind.exact,
        "threads": 1,
        **settings,
    }
    return Driver(lambda emit, clock: load_engine(path, Settings(**values), emit, clock))


class CountedSampler(Sampler):
    """Knows how many of its like are open."""

    alive = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        CountedSampler.alive += 1

    def close(self) -> None:
        CountedSampler.alive -= self._chain is not None
        super().close()


@dataclass
class Asked:
    """A request and what is known about its way."""

    result: Result
    interrupted: bool = False
    """It lost its sequence in the meantime."""
    cancelled: bool = False


@dataclass
class Day:
    """The settings of one day, and all that happened."""

    random: random.Random
    kind: Kind
    path: Path
    folder: Path
    reference: Reference
    monkeypatch: pytest.MonkeyPatch
    driver: Driver | None = None
    asked: list[Asked] = field(default_factory=list)
    pool: list[Tokens] = field(default_factory=list)
    """Beginnings of prompts."""

    def __post_init__(self) -> None:
        pick = self.random
        self.context_size = pick.choice((256, 384, 600))
        self.cells = int(self.context_size * pick.choice((1, 1.1, 1.5, 2.5)))
        self.disk = pick.random() < 0.7
        self.settings: dict[str, object] = {
            "cache_dir": self.folder if self.disk else None,
            "block_size": pick.choice((64, 128, 256)),
            "parallel": pick.randint(1, 4),
            "reserve_tokens": pick.choice((1, 16, 64)),
            "memory_budget": pick.choice((0, 1 << 20, 3 << 20, 64 << 20)),
            "disk_budget": pick.choice((0, 2 << 20, 256 << 20)),
            "llama": {"n_batch": pick.choice((32, 64, 64, 512)), "n_ubatch": 64},
        }
        numbers = np.random.default_rng(pick.randrange(2**32))
        documents = numbers.integers(0, 256, (2, self.context_size)).astype(np.int32)
        self.pool = list(documents)

    @property
    def engine(self) -> LlamaEngine:
        assert self.driver is not None
        assert isinstance(self.driver.engine, LlamaEngine)
        return self.driver.engine

    # What happens

    def open(self) -> None:
        fit = "anaphora.engine.llamacpp.load._fit"
        self.monkeypatch.setattr(fit, lambda *_: (self.context_size, self.cells))
        self.driver = open_engine(self.kind, self.path, **self.settings)
        suspend = self.engine._suspend

        def note_and_suspend(job: Any) -> None:
            for asked in self.asked:
                asked.interrupted |= asked.result.request.id == job.request.id
            suspend(job)

        self.monkeypatch.setattr(self.engine, "_suspend", note_and_suspend)

    def prompt(self) -> Tokens:
        pick = self.random
        base = pick.choice(self.pool)
        if pick.random() < 0.4:
            base = base[: pick.randint(1, len(base))]
        tail = np.full(pick.choice((0, 0, 1, 7, 40)), pick.randrange(256), dtype=np.int32)
        prompt: Tokens = np.concatenate([base, tail])[: self.context_size]
        return prompt

    def submit(self) -> None:
        assert self.driver is not None
        pick = self.random
        ends = dict.fromkeys(self.reference.ends, -1e9) if pick.random() < 0.7 else {}
        prompt = self.prompt()
        result = self.driver.submit(
            prompt,
            pick.choice((0, 1, 2, 10, 60, 10**9 if ends else 90)),
            sampling=Sampling(temperature=0.0, logit_bias=ends),
            cache=CacheHints(
                pick.choice(OWNERS),
                read=pick.random() < 0.85,
                write=pick.random() < 0.85,
                profile=pick.choice(PROFILES),
                outline=self.outline(len(prompt)),
            ),
            background=pick.random() < 0.2,
            want_logits=True,
        )
        self.asked.append(Asked(result))

    def outline(self, length: int) -> Outline:
        pick = self.random
        places = sorted(pick.randrange(length + 1) for _ in range(pick.randrange(6)))
        marks: tuple[Ttl | None, ...] = (None, "5m", "12h")
        kinds: tuple[Literal["block", "message"], ...] = ("block", "message")
        boundaries = (Boundary(p, pick.choice(kinds), "", pick.choice(marks)) for p in places)
        return Outline(tuple(boundaries), pick.choice((None, "30m")))

    def cancel(self) -> None:
        running = [asked for asked in self.asked if not asked.result.ended]
        if running:
            asked = self.random.choice(running)
            asked.cancelled = True
            self.engine.cancel(asked.result.request.id)

    def step(self) -> None:
        assert self.driver is not None
        for _ in range(self.random.choice((1, 3, 20))):
            self.driver.clock.advance((self.engine.step() or 0.0) * self.random.random() * 1.5)
            self.check_books()

    def idle(self) -> None:
        assert self.driver is not None
        self.driver.wait(*(a.result for a in self.asked if not a.result.request.background))
        self.driver.idle()

    def release(self) -> None:
        self.engine.release_idle()

    def remember_an_answer(self) -> None:
        """The next prompts may go on after one."""
        if self.asked:
            result = self.random.choice(self.asked).result
            self.pool.append(np.array([*result.request.tokens, *result.tokens], dtype=np.int32))

    def restart(self) -> None:
        self.close()
        self.damage()
        self.open()

    def damage(self) -> None:
        files = sorted(self.folder.glob("*/blocks/*/*"))
        if not files or self.random.random() < 0.5:
            return
        for file in self.random.sample(files, min(len(files), 2)):
            data = bytearray(file.read_bytes() or b"-")
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            how = self.random.randrange(3)
            file.write_bytes((data, data[: len(data) // 2], b"")[how])

    def close(self) -> None:
        assert self.driver is not None
        for asked in self.asked:
            asked.cancelled |= not asked.result.ended
        self.driver.close()
        assert CountedSampler.alive == 0
        for asked in self.asked:
            self.check_answer(asked)
        self.asked.clear()

    def live_through(self, events: int) -> None:
        happenings: list[Callable[[], None]] = [
            *(self.submit,) * 6,
            *(self.step,) * 8,
            *(self.cancel, self.idle, self.release, self.remember_an_answer) * 1,
            *((self.restart,) if self.random.random() < 0.7 else ()),
        ]
        self.open()
        for _ in range(events):
            self.random.choice(happenings)()
            self.check_books()
        self.idle()
        self.release()
        self.check_nothing_is_left()
        self.close()

    # What must hold

    def check_books(self) -> None:
        """The engine's books are llama.cpp's, and nobody's sequence is lost."""
        engine = self.engine
        memory = lib.llama_get_memory(engine.context.pointer)
        sequences = engine._sequences
        attention = self.kind.model in ("llama", "qwen3moe")
        for number, live in sequences._lives.items():
            assert live.number == number
            assert live.length == engine._cells.length(number)
            assert lib.llama_memory_seq_pos_max(memory, number) == live.length - 1
            if live.length and attention:
                assert lib.llama_memory_seq_pos_min(memory, number) == 0
            assert live.decoded_from is None or live.decoded_from < live.length
        for number in sequences._free[-8:]:
            assert lib.llama_memory_seq_pos_max(memory, number) == -1
        busy = {live.number for live in sequences._lives.values() if live.busy}
        assert sorted(busy) == sorted(job.live.number for job in engine._active if job.live)
        assert len(engine._active) <= engine._parallel
        if not engine.info.caching:
            return
        assert lib.llama_memory_seq_pos_max(memory, engine.context._scratch) == -1
        stats = engine.cache.stats()
        assert stats.memory_used <= stats.memory_budget
        assert stats.disk_used <= stats.disk_budget

    def check_nothing_is_left(self) -> None:
        engine = self.engine
        assert all(asked.result.ended for asked in self.asked)
        assert not engine._waiting
        assert not engine._background
        assert not engine._active
        assert not engine._sequences._lives
        assert engine._cells.used == 0
        numbers = sorted(engine._sequences._free)
        assert numbers == list(range(len(numbers)))
        assert all(block.live == 0 for block in engine.cache._tiers.index)
        assert not engine.cache._tiers.memory._pinned
        assert CountedSampler.alive == 0

    def check_answer(self, asked: Asked) -> None:
        result = asked.result
        events = Counter(type(event) for event in result.events)
        assert events[Failed] == 0, result.done
        assert events[Done] == 1
        assert isinstance(result.events[-1], Done)
        done, request = result.done, result.request
        assert done.generated_tokens == len(result.tokens)
        if done.reason == "cancelled":
            assert asked.cancelled
            if not events[Started]:
                return
        assert events[Started] == 1
        self.check_counters(asked)
        if done.prompt_logits is None:
            assert done.reason == "cancelled"
            return
        room = self.context_size - len(request.tokens) + 1
        count = min(request.max_tokens, room)
        if done.reason == "cancelled":
            count = min(count, done.generated_tokens)
        logits, tokens = self.reference.answer(request.tokens, request.sampling, count)
        if self.kind.exact:
            assert np.array_equal(done.prompt_logits, logits)
        elif self.kind.sharp:
            assert np.abs(done.prompt_logits - logits).max() < NOISE
        if self.kind.sharp:
            self.check_tokens(request.tokens, request.sampling, result.tokens, tokens)

    def check_counters(self, asked: Asked) -> None:
        started, done = asked.result.started, asked.result.done
        hints = asked.result.request.cache
        count = len(asked.result.request.tokens)
        assert started.prompt_tokens == done.prompt_tokens == count
        assert 0 <= started.read_tokens <= count
        writes = hints.write and self.engine.info.caching
        assert 0 <= started.written_tokens <= (count - started.read_tokens if writes else 0)
        assert started.uncached_tokens == count - started.read_tokens - started.written_tokens
        if isinstance(hints.profile, Local) and writes:
            assert started.uncached_tokens == 0
        assert started.found.total <= count - 1
        assert 0 <= started.found.decoded <= started.found.total
        if not hints.read or not self.engine.info.caching:
            assert started.found.total == started.read_tokens == 0
        if self.kind.exact:
            assert started.found.total % GRID == 0
            assert started.found.decoded == 0
        if asked.interrupted:
            return  # it may have found more, or less, when it went on
        if done.reason == "cancelled":
            assert started.found.total + done.computed_tokens <= count
        else:
            assert started.found.total + done.computed_tokens == count

    def check_tokens(
        self, prompt: Tokens, sampling: Sampling, got: list[int], expected: list[int]
    ) -> None:
        """Equal; or they part at a tie, where noise may decide."""
        if got == expected:
            return
        parting = next(
            (i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b),
            min(len(got), len(expected)),
        )
        assert parting < max(len(got), len(expected))
        whole = np.array([*prompt, *expected[:parting]], dtype=np.int32)
        logits, _ = self.reference.answer(whole, Sampling(temperature=0.0), 0)
        logits = logits.copy()
        for token, bias in sampling.logit_bias.items():
            logits[token] += bias
        first, second = np.sort(logits)[-1:-3:-1]
        assert first - second < NOISE, (parting, got, expected)


@pytest.fixture(scope="module")
def reference(tiny_model: TinyModel) -> Iterator[Callable[[Kind], tuple[Path, Reference]]]:
    made: dict[Kind, tuple[Path, Reference]] = {}

    def get(kind: Kind) -> tuple[Path, Reference]:
        if kind not in made:
            path = tiny_model(kind.model, f32=True)
            made[kind] = path, Reference(kind, path)
        return made[kind]

    yield get
    for _, found in made.values():
        found.close()


@pytest.mark.parametrize("seed", range(DAYS))
def test_a_random_day(
    reference: Callable[[Kind], tuple[Path, Reference]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    pick = random.Random(seed)
    kind = pick.choice(KINDS)
    path, cold = reference(kind)
    monkeypatch.setattr(engine_module, "Sampler", CountedSampler)
    monkeypatch.setattr(CountedSampler, "alive", 0)
    Day(pick, kind, path, tmp_path, cold, monkeypatch).live_through(60)
