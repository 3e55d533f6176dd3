"""The profiles behind the engine protocol: counters follow entries, time follows blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from anaphora.cache.disk import DiskTier
from anaphora.cache.keys import root_key
from anaphora.cache.store import PrefixCache
from anaphora.clock import ManualClock
from anaphora.engine.llamacpp.load import load_engine
from anaphora.engine.protocol import CacheHints, Emit, Engine, Sampling, Started
from anaphora.engine.reference import ReferenceEngine, load
from anaphora.profiles import Anthropic, OpenAI
from anaphora.profiles.decision import Lifetime
from anaphora.profiles.outline import Boundary, Outline
from anaphora.settings import Settings
from tests.driver import Driver, Result

Open = Callable[[], Driver]

TOKENS = np.random.default_rng(11).integers(0, 256, 1500).astype(np.int32)
MARKED = CacheHints(
    profile=Anthropic(minimum=256),
    outline=Outline((Boundary(300, mark="1h"), Boundary(600), Boundary(900, mark="5m"))),
)


@pytest.fixture(params=["llamacpp", "reference"])
def open_driver(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path: Path) -> Iterator[Open]:
    """Opens engines one after the other on one cache folder."""
    drivers: list[Driver] = []

    def make(emit: Emit, clock: ManualClock) -> Engine:
        if request.param == "llamacpp":
            settings = Settings(
                cache_dir=tmp_path,
                memory_budget=64 << 20,
                disk_budget=256 << 20,
                context_size=4096,
                kv_type="f32",
                threads=1,
                llama={"n_batch": 256, "n_ubatch": 256},
            )
            return load_engine(tiny_llama, settings, emit, clock)
        model = load(tiny_llama)
        root = root_key(model.identity)
        disk = DiskTier.open(tmp_path, root, model.identity, 256 << 20, clock)
        cache = PrefixCache(root, memory_budget=64 << 20, disk=disk, clock=clock)
        return ReferenceEngine(model, emit, cache, context_size=4096)

    def open_() -> Driver:
        drivers.append(Driver(make))
        return drivers[-1]

    yield open_
    for driver in drivers:
        driver.close()


def counted(result: Result) -> tuple[int, dict[Lifetime, int], int]:
    started = result.started
    assert started.read_tokens + started.written_tokens + started.uncached_tokens == len(
        result.request.tokens
    )
    return started.read_tokens, dict(started.written_by_lifetime), started.uncached_tokens


def ask(driver: Driver, hints: CacheHints = MARKED, count: int = 1000) -> Result:
    return driver.run(TOKENS[:count], 0, cache=hints)


def test_breakpoints_are_written_once_and_read_from_then_on(open_driver: Open) -> None:
    driver = open_driver()
    assert counted(ask(driver)) == (0, {"1h": 300, "5m": 600}, 100)
    again = ask(driver)
    assert counted(again) == (900, {}, 100)
    assert again.done.computed_tokens == 1


def test_what_counts_as_unread_may_be_there_all_the_same(open_driver: Open) -> None:
    driver = open_driver()
    ask(driver)
    outline = Outline((Boundary(900, match="thinking", mark="5m"),))
    other = ask(driver, replace(MARKED, outline=outline))
    assert counted(other) == (0, {"5m": 900}, 100)
    assert other.done.computed_tokens == 1
    assert counted(ask(driver, CacheHints())) == (0, {"unlimited": 1000}, 0)


def test_entries_expire_by_the_clock_and_survive_a_restart(open_driver: Open) -> None:
    driver = open_driver()
    ask(driver)
    driver.clock.advance(299)
    assert counted(ask(driver))[0] == 900
    driver.close()
    restarted = open_driver()
    restarted.clock.advance(299 + 300)
    assert counted(ask(restarted)) == (300, {"5m": 600}, 100)
    assert restarted.run(TOKENS[:1000], 0).done.computed_tokens == 1


def test_who_leaves_before_the_answer_begins_writes_nothing(open_driver: Open) -> None:
    driver = open_driver()
    leaving = driver.submit(TOKENS, 4, cache=MARKED)
    while not leaving.of(Started):
        driver.engine.step()
    assert not leaving.ended
    driver.engine.cancel(leaving.request.id)
    assert counted(leaving) == (0, {"1h": 300, "5m": 600}, 600)
    assert counted(ask(driver)) == (0, {"1h": 300, "5m": 600}, 100)


def test_who_waits_for_the_same_prefix_reads_it(open_driver: Open) -> None:
    driver = open_driver()
    first = driver.submit(TOKENS[:1000], 0, cache=MARKED)
    second = driver.submit(TOKENS[:1000], 0, cache=MARKED)
    driver.wait(first, second)
    assert counted(first) == (0, {"1h": 300, "5m": 600}, 100)
    assert counted(second) == (900, {}, 100)


def test_an_answer_is_never_written(open_driver: Open) -> None:
    driver = open_driver()
    ends = dict.fromkeys(driver.engine.vocabulary.end_of_generation, -1e9)
    sampling = Sampling(temperature=0.0, logit_bias=ends)
    first = driver.run(TOKENS[:1000], 40, sampling=sampling, cache=MARKED)
    longer = np.concatenate([TOKENS[:1000], np.array(first.tokens[:-1], np.int32), TOKENS[:100]])
    outline = Outline((*MARKED.outline.boundaries, Boundary(1039), Boundary(1139, mark="5m")))
    second = driver.run(longer, 0, cache=replace(MARKED, outline=outline))
    assert counted(second) == (900, {"5m": 239}, 0)
    assert second.done.computed_tokens == 100


def test_background_requests_read_and_write_nothing_for_anybody(open_driver: Open) -> None:
    driver = open_driver()
    settled = driver.submit(TOKENS[:1000], 0, cache=MARKED, background=True)
    driver.wait(settled)
    assert counted(settled) == (0, {}, 1000)
    first = ask(driver)
    assert counted(first) == (0, {"1h": 300, "5m": 600}, 100)
    assert first.done.computed_tokens == 1
    driver.clock.advance(200)
    driver.wait(driver.submit(TOKENS[:1000], 0, cache=MARKED, background=True))
    driver.clock.advance(100)
    assert counted(ask(driver))[0] == 300, "not refreshed either"


def test_openais_turns_read_the_turn_before(open_driver: Open) -> None:
    driver = open_driver()
    ends = [Boundary(500, "message"), Boundary(900, "message")]
    rules = OpenAI(minimum=256)
    turns = [CacheHints(profile=rules, outline=Outline(tuple(ends[:n]), "30m")) for n in (1, 2)]
    assert counted(ask(driver, turns[0], 510)) == (0, {"30m": 500}, 10)
    assert counted(ask(driver, turns[1])) == (500, {"30m": 400}, 100)
    assert counted(ask(driver, turns[1])) == (900, {}, 100)


def test_a_damaged_block_ends_the_entry_before_counters_go_out(
    open_driver: Open, tmp_path: Path
) -> None:
    driver = open_driver()
    ask(driver)
    driver.close()
    damage_last_block(tmp_path)
    restarted = open_driver()
    assert counted(ask(restarted)) == (300, {"5m": 600}, 100)
    stats = restarted.engine.stats()
    assert stats is not None
    assert stats.broken_promises == stats.misses.damaged == 1


def damage_last_block(folder: Path) -> None:
    """Of the only chain there is: its tail has the smallest payload."""
    files = [path for path in folder.glob("*/blocks/*/*") if path.is_file()]
    last = min(files, key=lambda path: path.stat().st_size)
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
