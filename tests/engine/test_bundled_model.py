"""What the cache may change on a real model: time, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from anaphora.bundled import load_test_document
from anaphora.cache.keys import Tokens
from anaphora.engine.llamacpp.engine import LlamaEngine
from anaphora.engine.llamacpp.load import load_engine
from anaphora.engine.protocol import CacheHints, Sampling
from anaphora.settings import Settings
from tests.conftest import SOAK
from tests.driver import Driver

pytestmark = pytest.mark.model
Open = Callable[..., Driver]


@pytest.fixture
def open_driver(bundled: Path, tmp_path: Path) -> Iterator[Open]:
    drivers: list[Driver] = []

    def open_(**settings: object) -> Driver:
        values: dict[str, object] = {
            "cache_dir": tmp_path / "cache",
            "memory_budget": 1 << 30,
            "context_size": 4096,
            "parallel": 1,
            **settings,
        }
        driver = Driver(
            lambda emit, clock: load_engine(bundled, Settings(**values), emit, clock)  # type: ignore[arg-type]
        )
        drivers.append(driver)
        return driver

    yield open_
    for driver in drivers:
        driver.close()


def document(driver: Driver) -> Tokens:
    return np.array(driver.engine.vocabulary.encode(load_test_document()), dtype=np.int32)


def release(driver: Driver) -> None:
    driver.idle()
    assert isinstance(driver.engine, LlamaEngine)
    driver.engine.release_idle()


def test_exact_logits_equal_a_cold_runs_bit_for_bit_wherever_the_prefix_lay(
    open_driver: Open,
) -> None:
    driver = open_driver(exact=True)
    text = document(driver)
    prompt = np.concatenate([text[:1500], text[6000:6030]])
    cold = driver.run(prompt, want_logits=True, cache=CacheHints(read=False, write=False)).logits

    driver.run(text[:1700], 20)
    driver.run(text[3000:3100], 20)  # a neighbour
    parted = driver.run(prompt, want_logits=True)
    assert parted.found.total == 1472
    assert np.array_equal(parted.logits, cold)
    release(driver)
    memory = driver.run(prompt, want_logits=True)
    assert memory.found.memory == 1472
    assert np.array_equal(memory.logits, cold)
    driver.close()
    disk = open_driver(exact=True).run(prompt, want_logits=True)
    assert disk.found.disk == 1472
    assert np.array_equal(disk.logits, cold)


def test_exact_answers_over_several_turns_equal_a_cold_twins(open_driver: Open) -> None:
    driver = open_driver(exact=True)
    text = document(driver)
    prompt = list(text[:700])
    for turn in range(4 if SOAK else 2):
        prompt += driver.run(prompt, 60).tokens
        prompt += list(text[5000 + 25 * turn : 5025 + 25 * turn])
        driver.idle()
    hit = driver.run(prompt, 40, want_logits=True)
    cold = driver.run(prompt, 40, want_logits=True, cache=CacheHints(read=False, write=False))
    assert hit.found.total >= len(prompt) - 25 - 64
    assert np.array_equal(hit.logits, cold.logits)
    assert hit.tokens == cold.tokens


def test_greedy_answers_are_the_same_with_and_without_the_cache(open_driver: Open) -> None:
    driver, plain = open_driver(), open_driver(cache_dir=None, memory_budget=0)
    text = document(driver)
    off = CacheHints(read=False, write=False)
    for number, (shared, new) in enumerate(((1000, 23), (777, 100), (1281, 1), (512, 300))):
        prompt = np.concatenate([text[:shared], text[7000 : 7000 + new]])
        driver.run(text[: shared + 90], 0)
        if number % 2:
            release(driver)
        hit = driver.run(prompt, 40)
        assert hit.found.total >= shared
        release(driver)
        assert hit.tokens == plain.run(prompt, 40, cache=off).tokens


def test_an_answer_continued_is_the_answer_never_interrupted(open_driver: Open) -> None:
    driver = open_driver()
    prompt = list(document(driver)[:600])
    whole = driver.run(prompt, 80).tokens
    release(driver)
    half = driver.run(prompt, 40, cache=CacheHints(read=False)).tokens
    rest = driver.run([*prompt, *half], 40)
    assert half + rest.tokens == whole
    assert rest.found.decoded == 39


def test_a_fully_cached_prompt_sampled_twice_gives_two_answers(open_driver: Open) -> None:
    driver = open_driver()
    prompt = document(driver)[:600]
    hot = Sampling(temperature=1.0)
    first, second, third = (driver.run(prompt, 30, sampling=hot) for _ in range(3))
    assert second.found.total == third.found.total == 599
    assert len({tuple(r.tokens) for r in (first, second, third)}) > 1
