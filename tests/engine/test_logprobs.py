"""Log probabilities: what they are, and that they come with the text of their tokens."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from anaphora import GREEDY, Model, Sampling
from anaphora.engine.llamacpp.load import load_engine
from anaphora.engine.logprobs import LEAST, Logprobs, measured
from anaphora.engine.protocol import Request
from anaphora.engine.reference import ReferenceEngine, load
from anaphora.engine.text import TextStream
from anaphora.errors import SettingsError
from anaphora.settings import Settings
from tests.driver import Driver

ENDS = range(260, 263)
"""Control tokens of the tiny models."""
PROMPT = np.arange(40, dtype=np.int32) * 5 % 256
FLAT = np.zeros(300, dtype=np.float32)


@pytest.fixture(params=["llama.cpp", "reference"])
def driver(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Driver]:
    if request.param == "reference":
        driver = Driver(lambda emit, _: ReferenceEngine(load(tiny_llama), emit, context_size=512))
    else:
        settings = Settings(cache_dir=None, memory_budget=1 << 20, context_size=512, threads=1)
        driver = Driver(lambda emit, clock: load_engine(tiny_llama, settings, emit, clock))
    yield driver
    driver.close()


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """As it is written in books; the logits are small enough for that."""
    odds = np.exp(logits.astype(np.float64))
    probabilities: NDArray[np.float64] = odds / odds.sum()
    return np.log(probabilities)


class TestMeasured:
    @given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40), st.integers(0, 20))
    def test_is_the_log_softmax_and_the_likeliest_tokens(
        self, values: list[float], top: int
    ) -> None:
        logits = np.array(values, dtype=np.float32)
        found, expected = measured(0, logits, top), log_softmax(logits)
        assert found.logprob == pytest.approx(expected[0], abs=1e-9)
        order = sorted(range(len(values)), key=lambda token: (-logits[token], token))
        assert [one.token for one in found.top] == order[:top]
        assert [one.logprob for one in found.top] == pytest.approx(expected[order[:top]], abs=1e-9)

    def test_huge_logits_do_not_overflow_and_what_cannot_come_has_a_number(self) -> None:
        logits = np.array([3e38, 3e38, -3e38, -np.inf], dtype=np.float32)
        found = measured(3, logits, 4)
        half = float(np.log(0.5))
        assert found.logprob == LEAST
        assert [one.token for one in found.top] == [0, 1, 2, 3]
        assert [one.logprob for one in found.top] == pytest.approx([half, half, LEAST, LEAST])


def characters(data: bytes) -> list[int]:
    """For each byte, which character of the text of ``data`` it is of."""
    invalid: dict[int, int] = {}

    def note(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        invalid[error.start] = error.end
        return "\N{REPLACEMENT CHARACTER}", error.end

    codecs.register_error("note", note)
    found: list[int] = []
    for number, character in enumerate(data.decode("utf-8", "note")):
        at = len(found)
        end = invalid.get(at, at + len(character.encode()))
        found += [number] * (end - at)
    return found


pieces = st.lists(
    st.one_of(
        st.sampled_from(["a", "b", "ab", "é", "€a", "😀", "", "\n"]).map(str.encode),
        st.sampled_from([b"\xf0\x9f", b"\x98", b"\x80", b"\xe2\x82", b"\xac", b"\xff", b"\x80a"]),
    ),
    max_size=14,
)
stops = st.lists(st.sampled_from(["a", "ab", "€", "😀", "\N{REPLACEMENT CHARACTER}a"]), max_size=3)


@given(pieces, stops)
def test_tokens_are_told_with_the_text_they_begin_in(pieces: list[bytes], stop: list[str]) -> None:
    stream, logprobs, text = TextStream(stop), Logprobs(0), ""
    places = characters(b"".join(pieces))
    starts = [len(b"".join(pieces[:number])) for number in range(len(pieces))]
    told = []

    def hear(more: str, *, over: bool) -> None:
        nonlocal text
        before, text = len(text), text + more
        for one in logprobs.tell(len(more), over=over):
            told.append(one)
            if not over and pieces[one.token]:
                assert before <= one.offset < len(text)

    for number, piece in enumerate(pieces):
        logprobs.add(number, piece, FLAT)
        hear(stream.feed(piece), over=False)
        if stream.stopped is not None:
            break
    else:
        hear(stream.finish(), over=True)
    assert [one.token for one in told] == list(range(len(told)))
    for one in told:
        if pieces[one.token]:
            assert one.offset == places[starts[one.token]]
    if stream.stopped is None:
        assert len(told) == len(pieces)
    else:  # all that begin in the text, and none that begin behind it
        untold = [n for n in range(len(told), len(pieces)) if pieces[n]]
        assert all(places[starts[number]] >= len(text) for number in untold)


class TestEngines:
    def test_they_are_of_the_models_own_distribution(self, driver: Driver) -> None:
        odd = Sampling(1.7, top_k=3, seed=1, repeat_penalty=1.4, logit_bias={7: 100.0})
        result = driver.run(PROMPT, 1, sampling=odd, logprobs=5, want_logits=True)
        assert result.tokens == [7]
        (one,) = result.logprobs
        expected = log_softmax(result.logits)
        assert (one.token, one.offset) == (7, 0)
        assert one.logprob == pytest.approx(expected[7], abs=1e-6)
        assert [c.token for c in one.top] == np.argsort(-expected, kind="stable")[:5].tolist()
        assert [c.logprob for c in one.top] == pytest.approx(np.sort(expected)[::-1][:5], abs=1e-6)

    def test_every_token_has_them_and_greedy_ones_are_the_likeliest(self, driver: Driver) -> None:
        lasting = Sampling(0, logit_bias=dict.fromkeys(ENDS, -1e9))
        result = driver.run(PROMPT, 30, sampling=lasting, logprobs=4)
        found = result.logprobs
        assert [one.token for one in found] == result.tokens
        assert len(found) == 30
        for one in found:
            likeliest = next(c for c in one.top if c.token not in ENDS)
            assert likeliest == (one.token, one.logprob)

    def test_nothing_is_told_where_nobody_asks(self, driver: Driver) -> None:
        result = driver.run(PROMPT, 8, sampling=GREEDY, logprobs=None)
        assert result.logprobs == []

    def test_a_stop_text_and_what_follows_is_not_told(self, driver: Driver) -> None:
        word = driver.engine.vocabulary.encode("so it goes")
        # Whatever the model thinks: the bias forces the same token again and again.
        bias = {word[0]: 1e6}
        stopping = Sampling(0, logit_bias=bias, stop=("sss",))
        result = driver.run(PROMPT, 9, sampling=stopping, logprobs=0)
        assert (result.text, result.done.stop_text, len(result.tokens)) == ("", "sss", 3)
        assert result.logprobs == []
        almost = Sampling(0, logit_bias=bias, stop=("ssst",))
        result = driver.run(PROMPT, 5, sampling=almost, logprobs=0)
        assert (result.text, len(result.logprobs)) == ("sssss", 5)


def test_parts_of_a_character_come_with_it() -> None:
    stream, logprobs, heard = TextStream(), Logprobs(0), []
    for byte in "€".encode():
        logprobs.add(byte, bytes([byte]), FLAT)
        heard.append(len(logprobs.tell(len(stream.feed(bytes([byte]))), over=False)))
    assert heard == [0, 0, 3]


def test_both_engines_agree(tiny_llama: Path) -> None:
    settings = Settings(
        cache_dir=None, memory_budget=1 << 20, context_size=512, threads=1, kv_type="f32"
    )
    makers = (
        lambda emit, clock: load_engine(tiny_llama, settings, emit, clock),
        lambda emit, _: ReferenceEngine(load(tiny_llama), emit, context_size=512),
    )
    answers = []
    for make in makers:
        driver = Driver(make)
        answers.append(driver.run(PROMPT, 12, logprobs=3).logprobs)
        driver.close()
    assert [one.token for one in answers[0]] == [one.token for one in answers[1]]
    for ours, theirs in zip(*answers, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert ours.offset == theirs.offset
        pairs = zip(ours.top, theirs.top, strict=True)
        assert all(a.logprob == pytest.approx(b.logprob, abs=1e-3) for a, b in pairs)


@pytest.mark.parametrize("logprobs", [-1, 21, True, 1.0, "3"])
def test_absurd_numbers_of_candidates_are_refused(logprobs: object) -> None:
    with pytest.raises(SettingsError, match="use 0 to 20"):
        Request("r", PROMPT, 1, logprobs=logprobs)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_the_library_gives_them_with_the_answer(tiny_llama: Path, engine: str) -> None:
    lasting = Sampling(seed=3, logit_bias=dict.fromkeys(ENDS, -1e9))
    with Model.load(
        tiny_llama, cache_dir=None, memory_budget=1 << 20, threads=1, engine=engine
    ) as model:
        plain = model.generate("So it goes", max_tokens=10, sampling=lasting)
        reply = model.generate("So it goes", max_tokens=10, sampling=lasting, logprobs=2)
        turn = model.chat(max_tokens=4, sampling=lasting, logprobs=0).send("So?")
    assert plain.logprobs == ()
    assert reply.text == plain.text
    assert tuple(one.token for one in reply.logprobs) == reply.tokens
    assert {len(one.top) for one in reply.logprobs} == {2}
    assert all(one.logprob <= one.top[0].logprob <= 0 for one in reply.logprobs)
    assert tuple(one.token for one in turn.logprobs) == turn.tokens
