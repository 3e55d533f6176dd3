"""The llama.cpp engine on tiny random models: scheduling, cells, and what the cache may change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from anaphora.cache.keys import Segment, Tokens
from anaphora.engine.llamacpp.engine import LlamaEngine
from anaphora.engine.llamacpp.load import load_engine
from anaphora.engine.protocol import (
    CacheHints,
    Done,
    Failed,
    Generated,
    Request,
    Sampling,
    Started,
)
from anaphora.errors import (
    ContextMemoryError,
    ModelFileError,
    ModelNotFoundError,
    PromptError,
    PromptTooLongError,
    SettingsError,
)
from anaphora.settings import Adapter, Settings
from tests.conftest import TinyModel
from tests.driver import Driver

Open = Callable[..., Driver]


@pytest.fixture
def tokens() -> Tokens:
    """A prompt of plain byte tokens."""
    return np.random.default_rng(7).integers(0, 256, 3000).astype(np.int32)


@pytest.fixture
def open_driver(tiny_llama: Path, tmp_path: Path) -> Iterator[Open]:
    """Opens engines on one cache folder and closes what is still open."""
    drivers: list[Driver] = []

    def open_(path: Path = tiny_llama, **settings: object) -> Driver:
        values: dict[str, object] = {
            "cache_dir": tmp_path / "cache",
            "memory_budget": 64 << 20,
            "disk_budget": 256 << 20,
            "context_size": 4096,
            "kv_type": "f32",
            "threads": 1,
            **settings,
        }
        driver = Driver(
            lambda emit, clock: load_engine(path, Settings(**values), emit, clock)  # type: ignore[arg-type]
        )
        drivers.append(driver)
        return driver

    yield open_
    for driver in drivers:
        driver.close()


def engine_of(driver: Driver) -> LlamaEngine:
    assert isinstance(driver.engine, LlamaEngine)
    return driver.engine


class TestHits:
    def test_the_same_prompt_again_computes_one_token(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver()
        cold = driver.run(tokens[:1000])
        warm = driver.run(tokens[:1000])
        assert (cold.done.computed_tokens, warm.done.computed_tokens) == (1000, 1)
        assert (cold.started.read_tokens, cold.started.written_tokens) == (0, 1000)
        assert (warm.started.read_tokens, warm.started.written_tokens) == (1000, 0)
        assert warm.found.live == 999
        assert warm.tokens == cold.tokens

    def test_the_next_turn_reads_all_of_the_turn_before_even_at_once(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver()
        ends = dict.fromkeys(driver.engine.vocabulary.end_of_generation, -1e9)
        sampling = Sampling(temperature=0.0, logit_bias=ends)
        first = driver.run(tokens[:1000], 8, sampling=sampling)
        held = [*tokens[:1000].tolist(), *first.tokens[:-1]]
        second = driver.run([*held, *tokens[1100:1200].tolist()], 0)
        assert second.started.read_tokens == second.found.live == len(held)
        assert engine_of(driver).cache.stats().broken_promises == 0

    def test_a_prompt_that_parts_inside_a_block_reuses_up_to_there(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver()
        driver.run(tokens[:1000])
        other = np.concatenate([tokens[:700], tokens[2000:2100]])
        live = driver.run(other)
        assert (live.found.live, live.done.computed_tokens) == (700, 100)
        driver.idle()
        engine_of(driver).release_idle()
        third = np.concatenate([tokens[:650], tokens[2200:2300]])
        stored = driver.run(third)
        assert (stored.found.memory, stored.done.computed_tokens) == (650, 100)
        assert stored.started.read_tokens == 650

    def test_live_cells_and_blocks_of_different_reach_are_combined(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver(parallel=2)
        driver.run(tokens[:1500])
        driver.idle()
        engine_of(driver).release_idle()
        driver.run(np.concatenate([tokens[:400], tokens[2000:2050]]))
        both = driver.run(tokens[:1500], want_logits=True)
        assert both.found.live == 400
        assert both.found.memory == 1099
        cold = open_driver(cache_dir=None).run(tokens[:1500], want_logits=True)
        assert np.abs(both.logits - cold.logits).max() < 1e-4

    def test_a_restart_hits_from_disk(self, open_driver: Open, tokens: Tokens) -> None:
        first = open_driver()
        cold = first.run(tokens[:1000], 16)
        first.close()
        second = open_driver()
        warm = second.run(tokens[:1000], 16)
        assert warm.found.disk == 999
        assert warm.started.read_tokens == 1000
        assert warm.tokens == cold.tokens
        again = second.run(tokens[:1000], 16)
        assert again.found.live == 999

    def test_owners_do_not_meet_except_in_a_shared_segment(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver()
        a = CacheHints((Segment("a", b"1"),))
        b = CacheHints((Segment("b", b"2"),))
        driver.run(tokens[:600], cache=a)
        assert driver.run(tokens[:600], cache=b).found.total == 0
        assert driver.run(tokens[:600], cache=a).found.total == 599
        trunk = Segment("house", b"h", 300)
        driver.run(tokens[:600], cache=CacheHints((trunk, Segment("a", b"1"))))
        shared = driver.run(tokens[:600], cache=CacheHints((trunk, Segment("b", b"2"))))
        assert shared.found.total == 300
        driver.idle()
        engine_of(driver).release_idle()
        stored = driver.run(tokens[:600], cache=CacheHints((trunk, Segment("c", b"3"))))
        assert stored.found.memory == 300

    @pytest.mark.parametrize(
        "ends", [(), (5,), (5, 3, None), (5, 5, None), (None, None), (0, None)]
    )
    def test_segments_out_of_order_are_refused(self, ends: tuple[int | None, ...]) -> None:
        with pytest.raises(SettingsError, match="order"):
            CacheHints(tuple(Segment(end=end) for end in ends))

    def test_without_reading_everything_is_computed_and_without_writing_nothing_stays(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver()
        driver.run(tokens[:600], cache=CacheHints(write=False))
        assert driver.run(tokens[:600]).found.total == 0
        assert driver.run(tokens[:600], cache=CacheHints(read=False)).found.total == 0
        assert driver.run(tokens[:600], cache=CacheHints(write=False)).found.live == 599
        assert driver.run(tokens[:600]).found.total == 599

    def test_the_answer_continues_as_if_it_had_never_stopped(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver()
        whole = driver.run(tokens[:500], 40)
        fresh = open_driver(cache_dir=None)
        half = fresh.run(tokens[:500], 20)
        rest = fresh.run([*tokens[:500], *half.tokens], 20)
        assert half.tokens + rest.tokens == whole.tokens
        assert rest.found.live == 519
        assert rest.found.decoded == 19
        assert rest.done.computed_tokens == 1

    def test_decoded_kv_stays_marked_through_every_tier(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        first = open_driver()
        ends = dict.fromkeys(first.engine.vocabulary.end_of_generation, -1e9)
        endless = Sampling(temperature=0.0, logit_bias=ends)
        answer = first.run(tokens[:500], 300, sampling=endless).tokens
        first.close()
        second = open_driver()
        hit = second.run([*tokens[:500], *answer, 1], 1)
        assert hit.found.disk == 799
        assert hit.found.decoded == 299

    def test_no_tokens_wanted_fills_the_cache(self, open_driver: Open, tokens: Tokens) -> None:
        driver = open_driver()
        warmed = driver.run(tokens[:600], 0)
        assert warmed.done.reason == "length"
        assert warmed.tokens == []
        assert driver.run(tokens[:600]).found.live == 599


class TestExact:
    @pytest.mark.parametrize("flash_attn", ["off", "on"])
    @pytest.mark.parametrize("where", ["live", "memory", "disk"])
    @pytest.mark.parametrize(("length", "parting"), [(1000, 1000), (1000, 700), (961, 961)])
    def test_logits_after_a_hit_are_those_of_a_cold_run(
        self,
        open_driver: Open,
        tokens: Tokens,
        where: str,
        flash_attn: str,
        length: int,
        parting: int,
    ) -> None:
        prompt = np.concatenate([tokens[:parting], tokens[2000 : 2000 + length - parting]])
        cold = open_driver(exact=True, flash_attn=flash_attn, cache_dir=None)
        expected = cold.run(prompt, want_logits=True).logits
        driver = open_driver(exact=True, flash_attn=flash_attn)
        driver.run(tokens[:1100], 20)
        driver.run(tokens[2500:2700], 20)  # a neighbour
        driver.idle()
        if where == "live":
            driver.run(tokens[:1100], 0)
        elif where == "memory":
            engine_of(driver).release_idle()
        else:
            driver.close()
            driver = open_driver(exact=True, flash_attn=flash_attn)
        hit = driver.run(prompt, want_logits=True)
        assert getattr(hit.found, where) == hit.found.total == min(parting, length - 1) // 64 * 64
        assert np.array_equal(hit.logits, expected)

    def test_after_generated_turns_the_answer_is_prefilled_again(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver(exact=True)
        prompt = list(tokens[:500])
        for turn in range(3):
            prompt += driver.run(prompt, 70).tokens
            prompt += list(tokens[1000 + 30 * turn : 1030 + 30 * turn])
            driver.idle()
        hit = driver.run(prompt, want_logits=True)
        assert hit.found.decoded == 0
        assert hit.found.total >= len(prompt) - 30 - 64
        cold = open_driver(exact=True, cache_dir=None).run(prompt, want_logits=True)
        assert np.array_equal(hit.logits, cold.logits)

    @pytest.mark.parametrize("flash_attn", ["off", "on"])
    def test_a_live_prefix_and_the_rest_of_a_stored_block_are_combined(
        self, open_driver: Open, tokens: Tokens, flash_attn: str
    ) -> None:
        driver = open_driver(exact=True, flash_attn=flash_attn)
        driver.run(tokens[:700], 0)
        driver.run(tokens[:100], 0)
        hit = driver.run(tokens[:700], want_logits=True)
        assert hit.found.total == 640
        cold = open_driver(exact=True, flash_attn=flash_attn, cache_dir=None)
        assert np.array_equal(hit.logits, cold.run(tokens[:700], want_logits=True).logits)

    @pytest.mark.parametrize("flash_attn", ["off", "on"])
    @pytest.mark.parametrize("first", [300, 310])
    def test_tokens_computed_off_the_grid_at_a_segments_end_are_not_passed_on(
        self, open_driver: Open, tokens: Tokens, first: int, flash_attn: str
    ) -> None:
        hints = CacheHints((Segment("house", b"h", 300), Segment("a", b"1")))
        driver = open_driver(exact=True, flash_attn=flash_attn)
        for length in (first, 600, 700):
            hit = driver.run(tokens[:length], 0, cache=hints, want_logits=True)
            driver.idle()
            engine_of(driver).release_idle()
        assert hit.found.memory == 576
        cold = open_driver(exact=True, flash_attn=flash_attn, cache_dir=None)
        expected = cold.run(tokens[:700], 0, cache=hints, want_logits=True)
        assert np.array_equal(hit.logits, expected.logits)

    def test_an_interrupted_answer_leaves_no_decoded_kv_behind(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver(exact=True)
        answer = driver.submit(tokens[:500], 100, background=True)
        while len(answer.tokens) < 80:
            driver.engine.step()
        hit = driver.run([*tokens[:500], *answer.tokens], want_logits=True)
        assert (hit.found.live, hit.found.decoded) == (448, 0)
        cold = open_driver(exact=True, cache_dir=None)
        expected = cold.run([*tokens[:500], *answer.tokens[:80]], want_logits=True)
        assert np.array_equal(hit.logits, expected.logits)

    def test_exact_blocks_and_others_do_not_mix(self, open_driver: Open, tokens: Tokens) -> None:
        plain = open_driver()
        plain.run(tokens[:600])
        plain.close()
        assert open_driver(exact=True).run(tokens[:600]).found.total == 0


class TestKeys:
    """What a block's bytes depend on makes a miss; what they don't depend on still hits."""

    @pytest.mark.parametrize(
        "changed",
        [
            {"kv_type": "f16"},
            {"kv_type": "f32,f16"},
            {"flash_attn": "on"},
            {"llama": {"rope_freq_base": 5000.0}},
            {"llama": {"rope_freq_scale": 0.5}},
            {"llama": {"rope_scaling_type": "yarn"}},
            {"llama": {"yarn_ext_factor": 0.5}},
            {"llama": {"yarn_attn_factor": 0.5}},
            {"llama": {"yarn_beta_fast": 16.0}},
            {"llama": {"yarn_beta_slow": 2.0}},
            {"llama": {"yarn_orig_ctx": 2048}},
            {"llama": {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 1e-4}}},
        ],
        ids=str,
    )
    def test_settings_on_the_list_miss(
        self, open_driver: Open, tokens: Tokens, changed: dict[str, object]
    ) -> None:
        first = open_driver()
        first.run(tokens[:600])
        first.close()
        other = open_driver(**changed)
        assert other.run(tokens[:600]).found.total == 0
        other.close()
        assert open_driver().run(tokens[:600]).found.disk == 599

    @pytest.mark.parametrize(
        "changed",
        [
            {"context_size": 2048},
            {"parallel": 1},
            {"threads": 2},
            {"block_size": 128},
            {"llama": {"n_batch": 512}},
            {"llama": {"n_ubatch": 128}},
            {"llama": {"n_threads_batch": 2}},
            {"llama": {"load_mode": "none"}},
            {"llama": {"override_tensor": "blk=CPU"}},
            {"memory_budget": 32 << 20},
            {"reserve_tokens": 64},
            {"disk_budget": 64 << 20},
        ],
        ids=str,
    )
    def test_settings_off_the_list_still_hit(
        self, open_driver: Open, tokens: Tokens, changed: dict[str, object]
    ) -> None:
        first = open_driver()
        cold = first.run(tokens[:600])
        first.close()
        warm = open_driver(**changed).run(tokens[:600])
        assert warm.found.disk == 599
        assert warm.tokens == cold.tokens

    def test_another_version_of_the_package_still_hits(
        self, open_driver: Open, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = open_driver()
        first.run(tokens[:600])
        first.close()
        monkeypatch.setattr("anaphora.__version__", "999.0")
        assert open_driver().run(tokens[:600]).found.disk == 599

    @pytest.mark.parametrize("exact", [False, True])
    def test_another_build_of_llama_cpp_misses_only_where_exact(
        self, open_driver: Open, tokens: Tokens, monkeypatch: pytest.MonkeyPatch, exact: bool
    ) -> None:
        first = open_driver(exact=exact)
        first.run(tokens[:600])
        first.close()
        monkeypatch.setattr("llama_cpp.llama_cpp.llama_version", lambda: b"another")
        other = open_driver(exact=exact)
        assert other.run(tokens[:600]).found.total == (0 if exact else 599)
        other.close()
        monkeypatch.undo()
        assert open_driver(exact=exact).run(tokens[:600]).found.disk == (576 if exact else 599)

    def test_another_version_of_llama_cpps_states_misses(
        self, open_driver: Open, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = open_driver()
        first.run(tokens[:600])
        first.close()
        monkeypatch.setattr("llama_cpp.llama_cpp.LLAMA_STATE_SEQ_VERSION", 999)
        other = open_driver()
        assert other.run(tokens[:600]).found.total == 0
        other.close()
        monkeypatch.undo()
        assert open_driver().run(tokens[:600]).found.disk == 599

    def test_another_model_another_epoch_and_another_salt_miss(
        self,
        open_driver: Open,
        tiny_model: TinyModel,
        tokens: Tokens,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        first = open_driver()
        first.run(tokens[:600])
        first.close()
        other = open_driver(path=tiny_model("llama", f32=True, seed=9))
        assert other.run(tokens[:600]).found.total == 0
        salted = open_driver()
        assert salted.run(tokens[:600], cache=CacheHints((Segment(salt=b"x"),))).found.total == 0
        salted.close()
        monkeypatch.setattr("anaphora.engine.llamacpp.load.EPOCH", "another")
        assert open_driver().run(tokens[:600]).found.total == 0

    def test_every_combination_of_adapters_has_its_own_blocks(
        self, open_driver: Open, tiny_adapter: Path, tokens: Tokens
    ) -> None:
        def answer(*adapters: Adapter) -> tuple[int, list[int]]:
            driver = open_driver(adapters=adapters)
            result = driver.run(tokens[:600], 16)
            driver.close()
            return result.found.total, result.tokens

        found, plain = answer()
        assert found == 0
        found, adapted = answer(Adapter(tiny_adapter))
        assert found == 0
        assert adapted != plain
        assert answer(Adapter(tiny_adapter, 0.5))[0] == 0
        assert answer(Adapter(tiny_adapter)) == (599, adapted)
        assert answer() == (599, plain)


class TestSampling:
    def test_a_cached_prompt_sampled_twice_gives_two_answers(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver()
        hot = Sampling(temperature=1.0)
        first, second = (driver.run(tokens[:600], 24, sampling=hot) for _ in range(2))
        assert second.found.live == 599
        assert first.tokens != second.tokens

    def test_a_seed_gives_the_same_answer_cold_and_cached(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver()
        seeded = Sampling(temperature=1.0, seed=5)
        first, second = (driver.run(tokens[:600], 24, sampling=seeded) for _ in range(2))
        assert first.tokens == second.tokens

    def test_settings_of_the_chain_have_their_effect(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver()
        greedy = driver.run(tokens[:100], 12).tokens
        for sampling in (
            Sampling(temperature=1.0, top_k=1),
            Sampling(temperature=1.0, top_p=1e-6),
            Sampling(temperature=1.0, min_p=1.0),
            Sampling(temperature=1e-6, seed=1),
        ):
            assert driver.run(tokens[:100], 12, sampling=sampling).tokens == greedy
        banned = Sampling(temperature=0.0, logit_bias={greedy[0]: -1e9})
        assert greedy[0] not in driver.run(tokens[:100], 12, sampling=banned).tokens
        forced = Sampling(temperature=0.0, logit_bias={65: 1e9})
        assert driver.run(tokens[:100], 12, sampling=forced).tokens == [65] * 12
        tired = Sampling(temperature=0.0, logit_bias={65: 30.0}, presence_penalty=100.0)
        repeated = driver.run(tokens[:100], 12, sampling=tired).tokens
        assert len(set(repeated)) == 12

    @pytest.mark.parametrize(
        "values",
        [
            {"temperature": -1.0},
            {"temperature": float("nan")},
            {"top_p": 2.0},
            {"min_p": -0.1},
            {"top_k": -1},
            {"repeat_penalty": 0.0},
            {"logit_bias": {1: float("inf")}},
            {"logit_bias": {1: float("nan")}},
            {"logit_bias": {1: 1e300}},
            {"logit_bias": {"1": 1.0}},
            {"top_k": 2.5},
            {"seed": 1.5},
            {"penalty_window": 1.5},
            {"stop": "one"},
            {"stop": (1,)},
        ],
        ids=str,
    )
    def test_values_out_of_range_are_refused(self, values: dict[str, object]) -> None:
        with pytest.raises(SettingsError, match="use"):
            Sampling(**values)  # type: ignore[arg-type]

    def test_the_lowest_temperature_is_greedy(self, open_driver: Open, tokens: Tokens) -> None:
        driver = open_driver()
        cold = Sampling(temperature=1e-40)
        assert driver.run(tokens[:100], sampling=cold).tokens == driver.run(tokens[:100]).tokens

    def test_a_stop_text_that_spans_tokens_ends_the_answer_and_is_not_part_of_it(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver()
        force = {ord("a"): 1e9}
        plain = driver.run(tokens[:100], 9, sampling=Sampling(temperature=0.0, logit_bias=force))
        assert plain.text == "a" * 9
        stopped = driver.run(
            tokens[:100], 9, sampling=Sampling(temperature=0.0, logit_bias=force, stop=("aaaa",))
        )
        assert (stopped.text, stopped.done.reason, stopped.done.stop_text) == ("", "stop", "aaaa")
        assert stopped.done.generated_tokens == 4


class TestManyAtOnce:
    def test_requests_that_share_a_prefix_compute_it_once(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver(parallel=4)
        prompts = [np.concatenate([tokens[:1500], tokens[2000 + i : 2010 + i]]) for i in range(6)]
        results = [driver.submit(prompt) for prompt in prompts]
        driver.wait(*results)
        assert sum(r.done.computed_tokens for r in results) <= 1500 + 6 * 10 + 64
        for prompt, result in zip(prompts, results, strict=True):
            alone = open_driver(cache_dir=None)
            assert alone.run(prompt).tokens == result.tokens
            alone.close()

    def test_sequences_continuing_one_prefix_share_its_cells(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver(parallel=8)
        driver.run(tokens[:1500], 0)
        results = [
            driver.submit([*tokens[:1500], *tokens[2000 + i : 2010 + i]], 50) for i in range(8)
        ]
        while not all(r.of(Generated) for r in results):
            driver.engine.step()
        assert engine_of(driver)._cells.used < 1500 + 8 * 60 + 64
        driver.wait(*results)

    def test_an_engine_that_is_never_idle_saves_what_it_serves(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver(parallel=2)
        ends = dict.fromkeys(driver.engine.vocabulary.end_of_generation, -1e9)
        endless = Sampling(temperature=0.0, logit_bias=ends)
        busy = driver.submit(tokens[2900:2950], 1000, sampling=endless)
        for number in range(6):
            driver.run([*tokens[:1536], *tokens[2000 + number :][:10]], 2)
        assert not busy.ended
        stats = driver.engine.stats()
        assert stats is not None
        assert stats.disk_parts >= 6
        assert len(engine_of(driver).cache.match(tokens[:1536]).pieces) >= 6

    def test_an_unrelated_request_does_not_wait_for_a_long_prefill(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver(parallel=2)
        slow = driver.submit(tokens[:2900], 4)
        while not slow.of(Started):
            driver.engine.step()
        quick = driver.submit(tokens[2900:2950], 4)
        driver.wait(quick)
        assert not slow.ended
        driver.wait(slow)

    def test_nobody_waits_for_a_prefill_that_may_not_be_shared(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver(llama={"n_ubatch": 64, "n_batch": 64})
        secret = driver.submit(tokens[:2000], cache=CacheHints(write=False))
        driver.engine.step()
        other = driver.submit(tokens[:2000])
        driver.engine.step()
        assert other.of(Started)
        driver.wait(secret, other)

    def test_more_requests_at_once_than_a_batch_has_tokens(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver(parallel=6, llama={"n_batch": 2, "n_ubatch": 1})
        results = [driver.submit(tokens[20 * i : 20 * i + 20], 5) for i in range(6)]
        driver.wait(*results)
        assert [result.tokens for result in results] == [
            open_driver(cache_dir=None).run(result.request.tokens, 5).tokens for result in results
        ]

    @pytest.mark.parametrize("memory_budget", [64 << 20, 0])
    def test_requests_that_outgrow_the_cells_are_parked_and_go_on(
        self, open_driver: Open, tokens: Tokens, monkeypatch: pytest.MonkeyPatch, memory_budget: int
    ) -> None:
        prompts = [tokens[i * 300 : i * 300 + 300] for i in range(3)]
        ample = open_driver(cache_dir=None)
        ends = dict.fromkeys(ample.engine.vocabulary.end_of_generation, -1e9)
        endless = Sampling(temperature=0.0, logit_bias=ends)
        expected = [ample.run(prompt, 500, sampling=endless).tokens for prompt in prompts]
        # 1,024 cells for three sequences that end up with 800 tokens each.
        monkeypatch.setattr("anaphora.engine.llamacpp.load._fit", lambda *_: (1024, 1024))
        tight = open_driver(
            cache_dir=None, parallel=3, reserve_tokens=16, memory_budget=memory_budget
        )
        results = [tight.submit(prompt, 500, sampling=endless) for prompt in prompts]
        tight.wait(*results)
        assert [r.tokens for r in results] == expected
        assert all(len(r.of(Started)) == 1 for r in results)
        recomputed = sum(r.done.computed_tokens for r in results) - 900
        assert (recomputed > 0) == (memory_budget == 0)

    def test_nobody_is_parked_while_there_are_cells(
        self, open_driver: Open, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("anaphora.engine.llamacpp.load._fit", lambda *_: (600, 600))
        tight = open_driver(cache_dir=None, memory_budget=0, parallel=2, reserve_tokens=1)
        results = [tight.submit(tokens[i * 250 : i * 250 + 250], 40) for i in range(2)]
        tight.wait(*results)
        assert [r.done.computed_tokens for r in results] == [250, 250]


class TestCancelling:
    def test_an_aborted_prefill_leaves_its_finished_blocks(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver(llama={"n_ubatch": 64, "n_batch": 64})
        first = driver.submit(tokens[:2000], 4)
        while engine_of(driver)._cells.used < 700:
            driver.engine.step()
        driver.engine.cancel(first.request.id)
        assert first.done.reason == "cancelled"
        computed = first.done.computed_tokens
        again = driver.submit(tokens[:2000], 4)
        driver.wait(again)
        assert again.found.live == computed
        assert again.started.read_tokens == computed // 256 * 256

    def test_cancelling_works_in_every_state_and_frees_everything(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver(parallel=1)
        running = driver.submit(tokens[:300], 500)
        waiting = driver.submit(tokens[300:600], 5)
        while len(running.of(Generated)) < 3:
            driver.engine.step()
        driver.engine.cancel(waiting.request.id)
        driver.engine.cancel(running.request.id)
        driver.engine.cancel("unknown")
        assert waiting.events[-1].__class__ is running.events[-1].__class__ is Done
        assert waiting.of(Started) == []
        assert driver.run(tokens[600:900], 5).done.reason == "length"
        driver.idle()
        engine_of(driver).release_idle()
        assert engine_of(driver)._cells.used == 0
        assert engine_of(driver)._active == []

    def test_closing_ends_every_request(self, open_driver: Open, tokens: Tokens) -> None:
        driver = open_driver(parallel=1)
        results = [driver.submit(tokens[:500], 50) for _ in range(3)]
        driver.engine.step()
        driver.close()
        assert [r.done.reason for r in results] == ["cancelled"] * 3


class TestBackground:
    def test_background_work_waits_and_steps_aside(self, open_driver: Open, tokens: Tokens) -> None:
        driver = open_driver(llama={"n_ubatch": 64, "n_batch": 64}, parallel=1)
        settle = driver.submit(tokens[:1500], 0, background=True)
        front = driver.run(tokens[2000:2200], 4)
        assert not settle.events
        while engine_of(driver)._cells.used < 600:
            driver.engine.step()
        second = driver.run(tokens[2200:2400], 4)
        assert front.done.reason == second.done.reason == "length"
        assert not settle.ended
        driver.idle()
        assert settle.done.reason == "length"
        assert driver.run(tokens[:1500]).found.total == 1499

    def test_an_interrupted_answer_goes_on_where_it_stopped(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver(parallel=1)
        expected = open_driver(cache_dir=None).run(tokens[:300], 40).tokens
        answer = driver.submit(tokens[:300], 40, background=True)
        for interruption in range(3):
            while len(answer.tokens) < 8 * (interruption + 1):
                driver.engine.step()
            driver.run(tokens[1000 + 100 * interruption :][:100], 2)
        driver.wait(answer)
        assert answer.tokens == expected

    def test_an_engine_that_is_never_idle_writes_a_little_after_each_request(
        self, open_driver: Open, tokens: Tokens, tmp_path: Path
    ) -> None:
        driver = open_driver(parallel=1)
        results = [driver.submit(tokens[700 * i : 700 * i + 700], 4) for i in range(4)]
        driver.wait(*results)
        files = list((tmp_path / "cache").glob("*/blocks/*/*"))
        assert 1 <= len(files) < 12  # of all blocks, not the last request's

    def test_background_requests_do_not_pile_up(self, open_driver: Open, tokens: Tokens) -> None:
        driver = open_driver()
        front = driver.submit(tokens[:500], 30)
        settles = [driver.submit(tokens[i : i + 9], 0, background=True) for i in range(100)]
        assert [s.ended for s in settles] == [True] * 36 + [False] * 64
        driver.wait(front)
        driver.idle()
        assert {s.done.reason for s in settles[36:]} == {"length"}

    def test_everything_is_on_disk_soon_after_the_engine_falls_idle(
        self, open_driver: Open, tokens: Tokens, tmp_path: Path
    ) -> None:
        driver = open_driver()
        driver.run(tokens[:1000], 4)
        began = driver.clock.now()
        driver.idle()
        assert driver.clock.now() - began < 10
        assert engine_of(driver).cache.unwritten == 0
        files = list((tmp_path / "cache").glob("*/blocks/*/*"))
        assert len(files) == 4


class TestOtherKinds:
    @pytest.mark.parametrize("kind", ["gemma3", "mamba", "jamba"])
    def test_other_kinds_of_memory_run_with_the_cache_off(
        self, open_driver: Open, tiny_model: TinyModel, tokens: Tokens, kind: str
    ) -> None:
        driver = open_driver(path=tiny_model(kind), kv_type="f16")
        assert not driver.engine.info.caching
        (warning,) = driver.engine.info.warnings
        assert "cache off" in warning
        first, second = driver.submit(tokens[:900], 12), driver.submit(tokens[:900], 12)
        driver.wait(first, second)
        assert first.tokens == second.tokens
        assert second.found.total == 0
        assert second.started.read_tokens == 0

    @pytest.mark.parametrize("kind", ["gemma3", "mamba", "jamba"])
    def test_their_answers_may_be_longer_than_what_was_set_aside(
        self, open_driver: Open, tiny_model: TinyModel, tokens: Tokens, kind: str
    ) -> None:
        driver = open_driver(path=tiny_model(kind), kv_type="f16", reserve_tokens=8)
        ends = dict.fromkeys(driver.engine.vocabulary.end_of_generation, -1e9)
        endless = Sampling(temperature=0.0, logit_bias=ends)
        assert driver.run(tokens[:50], 60, sampling=endless).done.generated_tokens == 60

    def test_experts_with_plain_attention_are_cached(
        self, open_driver: Open, tiny_model: TinyModel, tokens: Tokens
    ) -> None:
        driver = open_driver(path=tiny_model("qwen3moe"))
        cold = driver.run(tokens[:900], 12)
        assert driver.run(tokens[:900], 12).tokens == cold.tokens

    def test_the_first_token_after_a_restart_uses_as_many_experts_as_any(
        self, open_driver: Open, tiny_model: TinyModel, tokens: Tokens
    ) -> None:
        path = tiny_model("qwen3moe", f32=True)
        first = open_driver(path=path)
        cold = first.run(tokens[:45], 12, want_logits=True)
        first.close()
        hit = open_driver(path=path).run(tokens[:45], 12, want_logits=True)
        assert hit.found.disk == 44
        assert np.abs(hit.logits - cold.logits).max() < 1e-4
        assert hit.tokens == cold.tokens


class TestBadInput:
    def test_prompts_no_model_can_be_given(self, open_driver: Open, tokens: Tokens) -> None:
        driver = open_driver(context_size=512)
        for prompt, error in (
            ([], PromptError),
            ([999_999], PromptError),
            ([-1], PromptError),
            (tokens[:513], PromptTooLongError),
            (np.zeros((2, 2)), PromptError),
        ):
            result = driver.submit(prompt)
            (failed,) = result.events
            assert isinstance(failed, Failed)
            assert isinstance(failed.error, error)
            assert "\n" not in str(failed.error)
        assert driver.run(tokens[:512], 5).done.generated_tokens == 1
        assert driver.run(tokens[:510], 5).done.generated_tokens == 3

    def test_a_negative_number_of_tokens(self, open_driver: Open, tokens: Tokens) -> None:
        driver = open_driver()
        (failed,) = driver.submit(tokens[:9], -1).events
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, PromptError)

    def test_a_prompt_changed_after_it_was_handed_over_changes_nothing(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver(llama={"n_ubatch": 64, "n_batch": 64})
        theirs = tokens[:600].copy()
        request = Request("one", theirs, 0)
        driver.engine.submit(request)
        driver.engine.step()
        theirs[:] = 0
        driver.idle()
        hit = driver.run(tokens[:600], want_logits=True)
        assert hit.found.total == 599
        cold = open_driver(cache_dir=None).run(tokens[:600], want_logits=True)
        assert np.abs(hit.logits - cold.logits).max() < 1e-4

    def test_a_bias_for_a_token_that_is_not_there_is_refused(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        result = open_driver().submit(tokens[:9], sampling=Sampling(logit_bias={99_999: 1.0}))
        assert isinstance(result.events[-1], Failed)

    def test_model_files_that_are_none(
        self, open_driver: Open, tmp_path: Path, tiny_llama: Path
    ) -> None:
        foreign = tmp_path / "foreign.gguf"
        foreign.write_bytes(b"PK\x03\x04" + bytes(5000))
        truncated = tmp_path / "truncated.gguf"
        truncated.write_bytes(tiny_llama.read_bytes()[:-5000])
        for path, error in (
            (tmp_path / "missing.gguf", ModelNotFoundError),
            (tmp_path, ModelNotFoundError),
            (foreign, ModelFileError),
            (truncated, ModelFileError),
        ):
            with pytest.raises(error) as caught:
                open_driver(path=path)
            assert "\n" not in str(caught.value)

    def test_a_context_that_fits_no_memory(self, open_driver: Open) -> None:
        with pytest.raises(ContextMemoryError, match="smaller context"):
            open_driver(context_size=2_000_000_000)

    @pytest.mark.parametrize(
        ("settings", "says"),
        [
            ({"kv_type": "q8_0,q8_0", "flash_attn": "off"}, "flash"),
            ({"kv_type": "q99"}, "kv_type"),
            ({"llama": {"n_ctx": 5}}, "passed through"),
            ({"llama": {"n_batch": "many"}}, "integer"),
            ({"llama": {"offload_kqv": 3}}, "true or false"),
            ({"llama": {"split_mode": "diagonal"}}, "use none"),
            ({"llama": {"override_tensor": "(=CPU"}}, "override_tensor"),
            ({"llama": {"override_tensor": "blk=TPU9"}}, "buffer type"),
            ({"llama": {"tensor_split": "a,b"}}, "numbers"),
            ({"llama": {"n_ubatch": 100}, "exact": True}, "multiple of 64"),
        ],
        ids=str,
    )
    def test_settings_that_cannot_work(
        self, open_driver: Open, settings: dict[str, object], says: str
    ) -> None:
        with pytest.raises(SettingsError, match=says) as caught:
            open_driver(**settings)
        assert "\n" not in str(caught.value)

    def test_a_quantized_type_alone_sets_only_k_without_flash_attention(
        self, open_driver: Open, tokens: Tokens
    ) -> None:
        driver = open_driver(kv_type="q8_0", flash_attn="off")
        cold = driver.run(tokens[:600])
        driver.idle()
        engine_of(driver).release_idle()
        assert driver.run(tokens[:600]).tokens == cold.tokens
        both = open_driver(kv_type="q8_0", flash_attn="on")
        assert both.run(tokens[:600]).done.reason == "length"
