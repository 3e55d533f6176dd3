"""The reference engine behind its protocol, and what the cache may and may not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from anaphora.cache.disk import DiskTier
from anaphora.cache.keys import DEFAULT_SEGMENTS, Segment, Tokens, root_key
from anaphora.cache.store import PrefixCache
from anaphora.clock import ManualClock
from anaphora.engine.protocol import (
    GREEDY,
    CacheHints,
    Done,
    Engine,
    Event,
    Failed,
    Found,
    Generated,
    Request,
    Sampling,
    Started,
)
from anaphora.engine.reference import ReferenceEngine, ReferenceModel, load
from anaphora.engine.text import TextStream
from anaphora.errors import PromptError, PromptTooLongError

BLOCK = 256
TOLERANCE = 1e-4
"""Between logits of a hit off the chunks' grid and a cold run's. Seen: 1e-5."""


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> ReferenceModel:
    return load(tiny_llama)


class Session:
    """An engine, driven step by step, and what it said."""

    def __init__(
        self, model: ReferenceModel, cache: PrefixCache | None = None, block_size: int = BLOCK
    ) -> None:
        self.events: list[Event] = []
        self.engine: Engine = ReferenceEngine(
            model, self.events.append, cache, block_size=block_size, context_size=2048
        )
        self._requests = 0

    def request(
        self,
        tokens: Tokens,
        max_tokens: int = 0,
        sampling: Sampling = GREEDY,
        background: bool = False,
        segments: tuple[Segment, ...] = DEFAULT_SEGMENTS,
        read: bool = True,
        write: bool = True,
    ) -> str:
        """Submit; returns the id."""
        self._requests += 1
        name = f"request {self._requests}"
        hints = CacheHints(segments, read, write)
        self.engine.submit(
            Request(name, tokens, max_tokens, sampling, hints, background, want_logits=True)
        )
        return name

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def overwrite_cells(self) -> None:
        """So that what is right in them later came from the cache."""
        self.run(prompt(1500, seed=200), write=False)

    def until_idle(self) -> None:
        while self.engine.step() is not None:
            pass

    def run(self, tokens: Tokens, max_tokens: int = 0, **options: object) -> Answer:
        name = self.request(tokens, max_tokens, **options)  # type: ignore[arg-type]
        self.until_idle()
        return self.answer(name)

    def answer(self, name: str) -> Answer:
        return Answer([event for event in self.events if event.id == name])


class Answer:
    """The events of one request that did not fail."""

    def __init__(self, events: list[Event]) -> None:
        assert isinstance(events[-1], Done)
        self.done = events[-1]
        self.started = next((e for e in events if isinstance(e, Started)), None)
        generated = [event for event in events if isinstance(event, Generated)]
        assert len(events) == len(generated) + 1 + (self.started is not None)
        self.tokens = [token for event in generated for token in event.tokens]
        self.text = "".join(event.text for event in generated)
        assert len(self.tokens) == self.done.generated_tokens

    @property
    def found(self) -> Found:
        assert self.started is not None
        return self.started.found

    @property
    def logits(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        assert self.done.prompt_logits is not None
        return self.done.prompt_logits

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens read, written and computed."""
        assert self.started is not None
        return self.started.read_tokens, self.started.written_tokens, self.done.computed_tokens


def prompt(length: int, seed: int = 0, after: Tokens | None = None) -> Tokens:
    """Random tokens, behind the tokens ``after``; their first one says the seed."""
    tokens = np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)
    tokens[0] = seed
    return tokens if after is None else np.concatenate([after, tokens])


def memory_cache(
    model: ReferenceModel, budget: int = 64 << 20, block_size: int = BLOCK
) -> PrefixCache:
    return PrefixCache(root_key(model.identity), memory_budget=budget, block_size=block_size)


def disk_cache(model: ReferenceModel, folder: Path) -> PrefixCache:
    root = root_key(model.identity)
    disk = DiskTier.open(folder, root, model.identity, 1 << 30, ManualClock())
    return PrefixCache(root, memory_budget=64 << 20, disk=disk, block_size=BLOCK)


@pytest.fixture
def cached(model: ReferenceModel) -> Iterator[Session]:
    session = Session(model, memory_cache(model))
    yield session
    session.engine.close()


@pytest.fixture(scope="module")
def cold(model: ReferenceModel) -> Callable[..., Answer]:
    """Runs a request on an engine of its own, without a cache."""
    return lambda tokens, max_tokens=0, **options: Session(model).run(tokens, max_tokens, **options)


# The protocol


def test_an_answer_is_what_repeated_decoding_by_hand_gives(
    model: ReferenceModel, cold: Callable[..., Answer]
) -> None:
    tokens = prompt(300)
    answer = cold(tokens, 20)
    transformer = model.transformer
    cells = transformer.new_cache(400)
    last = transformer.forward(tokens, 0, cells)[-1]
    expected: list[int] = []
    for position in range(300, 320):
        expected.append(int(transformer.logits(last).argmax()))
        last = transformer.forward(np.array(expected[-1:], np.int32), position, cells)[-1]
    assert answer.tokens == expected
    assert answer.done.reason == "length"
    stream = TextStream()
    assert answer.text == "".join(stream.feed(model.vocabulary.piece(t)) for t in expected)
    assert answer.counts == (0, 0, 300)


def test_the_same_seed_gives_the_same_answer_and_another_another(
    cold: Callable[..., Answer],
) -> None:
    first, again, other = (
        cold(prompt(50), 30, sampling=Sampling(temperature=2.0, seed=seed)) for seed in (-1, -1, 2)
    )
    assert first.tokens == again.tokens != other.tokens


def test_an_end_token_ends_the_answer_and_is_no_part_of_it(
    model: ReferenceModel, cold: Callable[..., Answer]
) -> None:
    end = min(model.vocabulary.end_of_generation)
    answer = cold(prompt(10), 5, sampling=Sampling(temperature=0.0, logit_bias={end: 1e6}))
    assert (answer.done.reason, answer.tokens, answer.text) == ("end", [], "")
    assert answer.done.times.first_token == 0


def test_a_stop_text_that_spans_tokens_ends_the_answer(
    model: ReferenceModel, cold: Callable[..., Answer]
) -> None:
    letters = dict.fromkeys(b"abc", 100.0)
    sampling = Sampling(temperature=1.5, seed=3, logit_bias=letters)
    whole = cold(prompt(10), 40, sampling=sampling)
    stop = whole.text[10:14]
    before = whole.text[: whole.text.index(stop)]
    stopped = Sampling(temperature=1.5, seed=3, logit_bias=letters, stop=("xyz", stop))
    answer = cold(prompt(10), 40, sampling=stopped)
    assert (answer.text, answer.done.reason, answer.done.stop_text) == (before, "stop", stop)
    assert len(answer.tokens) == len(before) + len(stop)


def test_text_held_back_for_a_stop_text_comes_at_the_end(cold: Callable[..., Answer]) -> None:
    only_a = Sampling(temperature=0.0, logit_bias={ord("a"): 1e6}, stop=("aaaaaaaa",))
    answer = cold(prompt(10), 5, sampling=only_a)
    assert (answer.text, answer.done.reason) == ("aaaaa", "length")


def test_the_context_ends_an_answer(cold: Callable[..., Answer]) -> None:
    answer = cold(prompt(2040), 100)
    assert answer.done.reason == "length"
    assert len(answer.tokens) == 9  # the last one needs no cell


def test_no_tokens_wanted_fills_the_cache_and_generates_nothing(cached: Session) -> None:
    answer = cached.run(prompt(300))
    assert (answer.tokens, answer.done.reason) == ([], "length")
    assert cached.run(prompt(300)).found.memory == 299


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (prompt(2049), PromptTooLongError),
        (np.empty(0, np.int32), PromptError),
        (np.array([5, 263], np.int32), PromptError),
        (np.array([-1], np.int32), PromptError),
    ],
)
def test_an_impossible_prompt_fails_at_once_in_one_line(
    cached: Session, tokens: Tokens, error: type[Exception]
) -> None:
    cached.request(tokens)
    (event,) = cached.events
    assert isinstance(event, Failed)
    assert type(event.error) is error
    assert "\n" not in str(event.error)
    assert cached.run(prompt(10), 1).done.reason == "length"


def test_a_negative_number_of_tokens_fails_at_once(cached: Session) -> None:
    cached.request(prompt(10), -1)
    (event,) = cached.events
    assert isinstance(event, Failed)
    assert isinstance(event.error, PromptError)


def test_requests_are_served_in_order_and_background_ones_last(cached: Session) -> None:
    names = [
        cached.request(prompt(20, seed=1), 2, background=True),
        cached.request(prompt(20, seed=2), 2),
        cached.request(prompt(20, seed=3), 2),
    ]
    cached.until_idle()
    ends = [event.id for event in cached.events if isinstance(event, Done)]
    assert ends == [names[1], names[2], names[0]]


def test_times_add_up(cached: Session) -> None:
    times = cached.run(prompt(600), 5).done.times
    assert 0 < times.prefill < times.first_token <= times.total
    assert times.queued + times.restore + times.prefill + times.decode <= times.total


# What is computed and what is read


@pytest.mark.parametrize("common", [256, 512])
def test_a_hit_at_a_block_end_equals_a_cold_run_bit_for_bit(
    cached: Session, cold: Callable[..., Answer], common: int
) -> None:
    trunk = prompt(common, seed=1)
    cached.run(prompt(100, seed=2, after=trunk), 10)
    cached.overwrite_cells()
    question = prompt(200, seed=3, after=trunk)
    hit, expected = cached.run(question, 30), cold(question, 30)
    assert hit.found == Found(memory=common)
    assert hit.counts == (common, 200, 200)
    np.testing.assert_array_equal(hit.logits, expected.logits)
    assert hit.tokens == expected.tokens


@pytest.mark.parametrize("common", [1, 255, 257, 300, 411])
def test_a_hit_that_parts_inside_a_block_is_trimmed_there(
    cached: Session, cold: Callable[..., Answer], common: int
) -> None:
    trunk = prompt(common, seed=1)
    cached.run(prompt(400, seed=2, after=trunk))
    cached.overwrite_cells()
    question = prompt(100, seed=3, after=trunk)
    hit, expected = cached.run(question, 30), cold(question, 30)
    assert hit.found == Found(memory=common)
    assert hit.counts == (common, 100, 100)
    np.testing.assert_allclose(hit.logits, expected.logits, rtol=0, atol=TOLERANCE)
    assert hit.tokens == expected.tokens


def test_a_repeated_prompt_reads_all_and_computes_one_token(
    cached: Session, cold: Callable[..., Answer]
) -> None:
    first = cached.run(prompt(700), 10)
    cached.overwrite_cells()
    again = cached.run(prompt(700), 10)
    assert first.counts == (0, 700, 700)
    assert again.counts == (700, 0, 1)
    np.testing.assert_allclose(again.logits, first.logits, rtol=0, atol=TOLERANCE)
    assert again.tokens == first.tokens == cold(prompt(700), 10).tokens


def test_a_conversation_reads_its_own_answers(cached: Session, cold: Callable[..., Answer]) -> None:
    history = prompt(300)
    for turn in range(3):
        answer = cached.run(history, 40)
        assert answer.tokens == cold(history, 40).tokens
        held = np.concatenate([history, np.array(answer.tokens, np.int32)])
        history = prompt(30, seed=turn + 1, after=held)
        cached.overwrite_cells()
        following = cached.run(history)
        assert following.found.total == len(held) - 1  # the last token never had a cell
        assert following.found.decoded == len(held) - 1 - 300  # and what builds on decoded ones


def test_tokens_of_a_decoded_answer_are_told_from_prefilled_ones(cached: Session) -> None:
    answer = cached.run(prompt(300), 40)
    held = np.concatenate([prompt(300), np.array(answer.tokens, np.int32)])
    assert cached.run(held).found == Found(memory=339, decoded=39)
    parted = np.concatenate([held[:310], prompt(20, seed=9)])
    assert cached.run(parted).found == Found(memory=310, decoded=10)
    assert cached.run(prompt(20, seed=9, after=held[:300])).found == Found(memory=300)


def test_owners_do_not_meet_in_the_cache_except_in_a_shared_segment(cached: Session) -> None:
    def segments(owner: str) -> tuple[Segment, ...]:
        return Segment("shared", b"", 300), Segment(owner, owner.encode())

    tokens = prompt(700)
    cached.run(tokens, segments=segments("a"))
    assert cached.run(tokens, segments=segments("a")).counts == (700, 0, 1)
    other = cached.run(tokens, segments=segments("b"))
    assert other.found == Found(memory=300)
    assert other.counts == (300, 400, 400)


def test_hints_keep_a_request_from_reading_or_from_writing(cached: Session) -> None:
    assert cached.run(prompt(300), write=False).counts == (0, 0, 300)
    assert cached.run(prompt(300), read=False).counts == (0, 300, 300)
    assert cached.run(prompt(300), read=False).counts == (0, 300, 300)
    assert cached.run(prompt(300)).counts == (300, 0, 1)


def test_the_next_request_does_not_wait_for_idle_time_to_find_the_last_one(
    cached: Session,
) -> None:
    first, second = cached.request(prompt(600)), cached.request(prompt(600))
    cached.until_idle()
    assert cached.answer(first).found.total == 0
    assert cached.answer(second).found == Found(memory=599)


def test_with_no_room_for_blocks_answers_are_the_same(
    model: ReferenceModel, cold: Callable[..., Answer]
) -> None:
    session = Session(model, memory_cache(model, budget=0))
    for _ in range(2):
        answer = session.run(prompt(600), 10)
        assert answer.found == Found()
        np.testing.assert_array_equal(answer.logits, cold(prompt(600)).logits)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_cache_has_kept_logits_equal_a_cold_run(
    model: ReferenceModel, cold: Callable[..., Answer], seed: int
) -> None:
    """Prompts that share beginnings of any length, in a cache too small for all of them."""
    random = np.random.default_rng(seed)
    session = Session(model, memory_cache(model, budget=8 * (128 << 10)))
    known = [prompt(5)]
    reused = 0
    for n in range(30):
        trunk = known[random.integers(len(known))]
        trunk = trunk[: random.integers(1, len(trunk) + 1)]
        tokens = prompt(int(random.integers(1, 300)), seed=n, after=trunk)[:1500]
        name = session.request(tokens, 20, background=bool(random.integers(2)))
        session.steps(int(random.integers(1, 40)))
        if random.integers(4) == 0:
            session.engine.cancel(name)
        session.until_idle()
        answer = session.answer(name)
        session.overwrite_cells()
        if answer.done.prompt_logits is not None:
            expected = cold(tokens)
            np.testing.assert_allclose(answer.logits, expected.logits, rtol=0, atol=TOLERANCE)
            reused += answer.found.total
            held = np.concatenate([tokens, np.array(answer.tokens, np.int32)])
            known.append(held)
    assert reused > 1000


# Cancelling and stepping aside


def test_a_cancelled_prefill_keeps_its_finished_blocks(
    cached: Session, cold: Callable[..., Answer]
) -> None:
    name = cached.request(prompt(1000), 10)
    cached.steps(4)  # start, three chunks
    cached.engine.cancel(name)
    answer = cached.answer(name)
    assert (answer.done.reason, answer.done.computed_tokens) == ("cancelled", 3 * 256)
    hit = cached.run(prompt(1000), 10)
    assert hit.found == Found(memory=3 * 256)
    assert hit.counts == (3 * 256, 232, 232)
    np.testing.assert_array_equal(hit.logits, cold(prompt(1000)).logits)


def test_a_prefill_cancelled_inside_a_block_keeps_the_blocks_before_it(
    model: ReferenceModel,
) -> None:
    session = Session(model, memory_cache(model, block_size=512), block_size=512)
    name = session.request(prompt(1000))
    session.steps(4)
    session.engine.cancel(name)
    assert session.run(prompt(1000)).counts == (512, 488, 488)
    session.engine.close()


def test_cancelling_while_waiting_or_not_known_is_harmless(cached: Session) -> None:
    running, waiting = cached.request(prompt(600), 5), cached.request(prompt(20), 5)
    cached.steps(1)
    cached.engine.cancel(waiting)
    cached.engine.cancel("nobody")
    cached.until_idle()
    assert cached.answer(waiting).done.reason == "cancelled"
    assert cached.answer(waiting).started is None
    assert cached.answer(running).done.reason == "length"


def test_cancelling_an_answer_keeps_what_it_has_said(cached: Session) -> None:
    name = cached.request(prompt(20), 50)
    cached.steps(6)  # start, prompt and first token, four more
    cached.engine.cancel(name)
    cached.until_idle()
    answer = cached.answer(name)
    assert (answer.done.reason, len(answer.tokens)) == ("cancelled", 5)
    held = np.concatenate([prompt(20), np.array(answer.tokens, np.int32)])
    assert cached.run(held).found == Found(memory=24, decoded=4)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 9])
def test_a_background_request_steps_aside_and_loses_nothing(
    cached: Session, cold: Callable[..., Answer], steps: int
) -> None:
    background = cached.request(prompt(600, seed=1), 10, background=True)
    cached.steps(steps)
    urgent = cached.request(prompt(300, seed=2), 5)
    cached.until_idle()
    ends = [event.id for event in cached.events if isinstance(event, Done)]
    assert ends == [urgent, background]
    assert cached.answer(urgent).tokens == cold(prompt(300, seed=2), 5).tokens
    answer = cached.answer(background)
    assert answer.tokens == cold(prompt(600, seed=1), 10).tokens
    assert answer.done.computed_tokens <= 600 + 1


def test_a_parked_request_can_be_cancelled(cached: Session) -> None:
    background = cached.request(prompt(600, seed=1), 10, background=True)
    cached.steps(2)
    cached.request(prompt(300, seed=2), 5)
    cached.steps(2)
    cached.engine.cancel(background)
    cached.until_idle()
    assert cached.answer(background).done.reason == "cancelled"
    assert cached.run(prompt(600, seed=1)).found == Found(memory=256)


def test_closing_cancels_what_is_in_flight(model: ReferenceModel) -> None:
    session = Session(model, memory_cache(model))
    names = [session.request(prompt(600, seed=n), 5, background=n == 2) for n in range(3)]
    session.steps(2)
    session.engine.close()
    assert [session.answer(name).done.reason for name in names] == ["cancelled"] * 3


# Across restarts


def test_a_restarted_engine_reads_from_disk(
    model: ReferenceModel, cold: Callable[..., Answer], tmp_path: Path
) -> None:
    before = Session(model, disk_cache(model, tmp_path))
    said = before.run(prompt(600), 40)
    before.engine.close()

    after = Session(model, disk_cache(model, tmp_path))
    question = prompt(100, seed=5, after=prompt(600)[:512])
    hit = after.run(question, 10)
    assert hit.found == Found(disk=512)
    assert hit.counts == (512, 100, 100)
    np.testing.assert_array_equal(hit.logits, cold(question).logits)
    assert hit.tokens == cold(question, 10).tokens
    assert after.run(question).found == Found(memory=611)

    held = np.concatenate([prompt(600), np.array(said.tokens, np.int32)])
    assert after.run(held).found == Found(memory=512, disk=127, decoded=39)
    after.engine.close()


def test_what_was_in_flight_when_the_engine_closed_is_read_after_a_restart(
    model: ReferenceModel, tmp_path: Path
) -> None:
    before = Session(model, disk_cache(model, tmp_path))
    before.request(prompt(1000), 10)
    before.steps(3)
    before.engine.close()
    after = Session(model, disk_cache(model, tmp_path))
    assert after.run(prompt(1000)).counts == (512, 488, 488)
    after.engine.close()


def test_damaged_blocks_are_computed_again(
    model: ReferenceModel, cold: Callable[..., Answer], tmp_path: Path
) -> None:
    before = Session(model, disk_cache(model, tmp_path))
    before.run(prompt(1000))
    before.engine.close()
    blocks = sorted(tmp_path.rglob("*.base"))
    assert len(blocks) == 4
    for block in blocks[:2]:
        content = bytearray(block.read_bytes())
        content[len(content) // 2] ^= 1
        block.write_bytes(content)

    after = Session(model, disk_cache(model, tmp_path))
    answer = after.run(prompt(1000), 10)
    assert answer.started is not None
    assert answer.found.total <= 512
    assert answer.started.read_tokens <= 512
    np.testing.assert_array_equal(answer.logits, cold(prompt(1000)).logits)
    assert after.run(prompt(1000)).counts == (1000, 0, 1)
    after.engine.close()


def test_another_model_never_reads_these_blocks(
    model: ReferenceModel, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    other = load(tiny_model("llama", f32=True, seed=1))
    assert root_key(other.identity) != root_key(model.identity)
    before = Session(model, disk_cache(model, tmp_path))
    before.run(prompt(600))
    before.engine.close()
    after = Session(other, disk_cache(other, tmp_path))
    answer = after.run(prompt(600))
    assert answer.found == Found()
    np.testing.assert_array_equal(answer.logits, Session(other).run(prompt(600)).logits)
    after.engine.close()
