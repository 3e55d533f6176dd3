"""The reference engine's transformer, vocabulary and sampler."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp
from numpy.typing import NDArray

from anaphora import bundled
from anaphora.engine.llamacpp import logs
from anaphora.engine.llamacpp.vocabulary import LlamaVocabulary
from anaphora.engine.protocol import Sampling
from anaphora.engine.reference.loader import ReferenceModel, load
from anaphora.engine.reference.model import Floats, softmax
from anaphora.engine.reference.sampler import Sampler
from anaphora.errors import ModelFileError, ModelNotFoundError
from tests.conftest import TinyModel

TOLERANCE = 1e-3
"""Between logits of llama.cpp and of the reference engine, both in float32. Seen: 2e-4; the logits'
own standard deviation is about 3."""


class LlamaCpp:
    """llama.cpp in full precision: one sequence, float32 KV, no flash attention."""

    def __init__(self, path: Path) -> None:
        logs.route()
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = 2048
        parameters.kv_unified = True
        parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F32
        parameters.n_threads = parameters.n_threads_batch = 1  # more spin while they wait
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        self.vocabulary = LlamaVocabulary(self._model)

    def close(self) -> None:
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def forget(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def logits(self, tokens: list[int]) -> Floats:
        """Of the token that follows all tokens since :meth:`forget`."""
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        batch = llama_cpp.llama_batch_get_one(array, len(tokens))
        assert llama_cpp.llama_decode(self._context, batch) == 0
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (self.vocabulary.size,)).copy()


class Reference:
    """The reference engine's transformer with the same interface."""

    def __init__(self, model: ReferenceModel) -> None:
        self._transformer = model.transformer
        self.forget()

    def forget(self) -> None:
        self._cache, self._held = self._transformer.new_cache(2048), 0

    def logits(self, tokens: list[int]) -> Floats:
        array = np.array(tokens, np.int32)
        vectors = self._transformer.forward(array, self._held, self._cache)
        self._held += len(tokens)
        return self._transformer.logits(vectors[-1])


def greedy(model: LlamaCpp | Reference, tokens: list[int], count: int) -> tuple[list[int], Floats]:
    """``count`` tokens and the logits each was chosen from."""
    model.forget()
    chosen: list[int] = []
    logits: list[NDArray[np.float32]] = []
    for _ in range(count):
        logits.append(model.logits(tokens))
        tokens = [int(logits[-1].argmax())]
        chosen += tokens
    return chosen, np.array(logits)


def agree(llama: LlamaCpp, reference: Reference, tokens: list[int], count: int) -> None:
    expected, expected_logits = greedy(llama, tokens, count)
    chosen, logits = greedy(reference, tokens, count)
    assert chosen == expected
    assert np.abs(logits - expected_logits).max() < TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": True},
        {"rope_frequencies": True},
        {"heads": 4, "kv_heads": 4},
        {"tensors_per_file": 8},
        {"heads": 6, "kv_heads": 2, "layers": 3},
    ],
)
def test_every_variant_of_llama_agrees_with_llama_cpp(
    tiny_model: TinyModel, options: dict[str, int]
) -> None:
    path = tiny_model("llama", f32=True, **options)
    llama = LlamaCpp(path)
    try:
        prompt = np.random.default_rng(0).integers(0, 256, 300).tolist()
        agree(llama, Reference(load(path)), prompt, 30)
    finally:
        llama.close()


def test_half_precision_weights_are_read(tiny_model: TinyModel, tiny_llama: Path) -> None:
    tokens = np.arange(50, dtype=np.int32)
    logits = []
    for path in (tiny_llama, tiny_model("llama")):
        transformer = load(path).transformer
        vectors = transformer.forward(tokens, 0, transformer.new_cache(50))
        logits.append(transformer.logits(vectors))
    assert 0 < np.abs(logits[0] - logits[1]).max() < 0.1


@pytest.mark.parametrize("cuts", [[0, 1, 2, 3], [0, 64, 65, 127], [0, 100]])
def test_cutting_the_prompt_changes_nothing_but_the_last_bits(
    tiny_llama: Path, cuts: list[int]
) -> None:
    transformer = load(tiny_llama).transformer
    tokens = np.random.default_rng(1).integers(0, 256, 128).astype(np.int32)
    whole = transformer.new_cache(128)
    vectors = transformer.forward(tokens, 0, whole)
    cut = transformer.new_cache(128)
    for start, end in zip(cuts, [*cuts[1:], 128], strict=True):
        last = transformer.forward(tokens[start:end], start, cut)
    np.testing.assert_allclose(cut, whole, rtol=0, atol=1e-4)
    np.testing.assert_allclose(last[-1], vectors[-1], rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def full_precision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundled") / "f32.gguf"
    bundled.requantize(bundled.source_path(), path, llama_cpp.LLAMA_FTYPE_ALL_F32)
    return path


@pytest.fixture(scope="module")
def llama(full_precision: Path) -> Iterator[LlamaCpp]:
    model = LlamaCpp(full_precision)
    yield model
    model.close()


@pytest.fixture(scope="module")
def reference(full_precision: Path) -> ReferenceModel:
    return load(full_precision)


@pytest.mark.model
def test_a_greedy_answer_of_the_bundled_model_agrees_with_llama_cpp(
    llama: LlamaCpp, reference: ReferenceModel
) -> None:
    prompt = reference.vocabulary.encode("The capital of France is")
    agree(llama, Reference(reference), prompt, 300)


@pytest.mark.model
@pytest.mark.parametrize(
    "prompt",
    [
        "def quicksort(xs):\n",
        "Once upon a time, in a small village",
        bundled.load_test_document(4_000),
    ],
    ids=["code", "tale", "document"],
)
def test_every_token_of_an_answer_by_llama_cpp_is_the_one_chosen_here(
    llama: LlamaCpp, reference: ReferenceModel, prompt: str
) -> None:
    """The same as comparing two answers, but all of ours in one pass, so ten times faster."""
    tokens = reference.vocabulary.encode(prompt)
    expected, expected_logits = greedy(llama, tokens, 300)
    transformer = reference.transformer
    read = np.array(tokens + expected[:-1], np.int32)
    vectors = transformer.forward(read, 0, transformer.new_cache(len(read)))
    logits = transformer.logits(vectors[len(tokens) - 1 :])
    assert logits.argmax(axis=-1).tolist() == expected
    assert np.abs(logits - expected_logits).max() < TOLERANCE


SAMPLES = (
    "a b Z 1 23 456 é ß ﬁ 日 本 語 한 😀 👩‍👩‍👧 's 'LL don't ! ?? $ + <= - … « ° № € ٣ Ⅷ ½ _ ~ ` ^ "
    "| http://x.y/z?q=1 the in he CamelCase <|im_end|> <|endoftext|> <|im_start|>"
)
WORDS = SAMPLES.split()
BLANKS = [" ", "  ", "\n", "\t", "\r\n", "\x0b", "\x1c", "\x00", "\u0085", "\u00a0", "\u3000"]
BLANKS += ["\u200b", "\u2028", "\u180e", "\u0301", "\U0001d7d8", "\u2014"]


def texts(count: int) -> Iterator[str]:
    chosen = random.Random(0)
    for _ in range(count):
        yield "".join(chosen.choices(WORDS + 2 * BLANKS, k=chosen.randint(0, 12)))


def same_vocabulary(path: Path, count: int) -> None:
    llama = LlamaCpp(path)
    try:
        ours, theirs = load(path).vocabulary, llama.vocabulary
        for name in ("size", "bos", "eos", "add_bos", "control", "end_of_generation"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.strips_left == theirs.strips_left
        assert ours.strips_right == theirs.strips_right
        assert [ours.piece(t) for t in range(ours.size)] == [
            theirs.piece(t) for t in range(ours.size)
        ]
        for text in texts(count):
            tokens = ours.encode(text)
            assert tokens == theirs.encode(text), text
            assert b"".join(map(ours.piece, tokens)).decode() == text
            assert not set(tokens) & set(ours.control.values())
    finally:
        llama.close()


@pytest.mark.model
def test_tokens_of_the_bundled_model_agree_with_llama_cpp() -> None:
    same_vocabulary(bundled.source_path(), 3_000)


@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_tokens_agree_with_llama_cpp_for_every_pre_tokenizer(
    tiny_model: TinyModel, pre: str
) -> None:
    same_vocabulary(tiny_model("llama", pre=pre), 500)


def test_user_defined_tokens_stay_whole(tiny_model: TinyModel) -> None:
    path = tiny_model("llama", user_defined=True)
    same_vocabulary(path, 200)
    vocabulary = load(path).vocabulary
    (think,) = vocabulary.encode("<think>")
    assert vocabulary.piece(think) == b"<think>"
    assert vocabulary.encode("a<think>b") == [*vocabulary.encode("a"), think, ord("b")]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("mamba", {}, "architecture 'mamba'"),
        ("llama", {"pre": "falcon"}, "'falcon' pre-tokenizer"),
    ],
)
def test_a_model_of_another_kind_is_refused_in_one_line(
    tiny_model: TinyModel, kind: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message) as error:
        load(tiny_model(kind, **options))
    assert "\n" not in str(error.value)


def test_a_missing_and_a_truncated_model_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        load(tmp_path / "none.gguf")
    part = tmp_path / "part.gguf"
    part.write_bytes(tiny_llama.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="truncated"):
        load(part)


LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.06, 0.04], np.float32))


def frequencies(
    sampling: Sampling, tokens: tuple[int, ...] = (), draws: int = 4_000
) -> list[float]:
    sampler = Sampler(sampling)
    drawn = Counter(sampler.sample(LOGITS, tokens) for _ in range(draws))
    return [drawn[token] / draws for token in range(len(LOGITS))]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(seed=1), [0.5, 0.25, 0.15, 0.06, 0.04]),
        (Sampling(seed=1, temperature=0.0), [1, 0, 0, 0, 0]),
        (Sampling(seed=1, temperature=0.5), [0.7316, 0.1829, 0.0658, 0.0105, 0.0047]),
        (Sampling(seed=1, top_k=2), [2 / 3, 1 / 3, 0, 0, 0]),
        (Sampling(seed=1, top_p=0.8), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0, 0]),
        (Sampling(seed=1, top_p=0.0), [1, 0, 0, 0, 0]),
        (Sampling(seed=1, min_p=0.4), [2 / 3, 1 / 3, 0, 0, 0]),
        (Sampling(seed=1, logit_bias={0: -100.0, 4: 100.0}), [0, 0, 0, 0, 1]),
        (Sampling(temperature=0.0, logit_bias={2: 5.0}), [0, 0, 1, 0, 0]),
    ],
)
def test_tokens_are_drawn_from_the_distribution_asked_for(
    sampling: Sampling, expected: list[float]
) -> None:
    assert frequencies(sampling) == pytest.approx(expected, abs=0.03)


def test_penalties_look_at_the_latest_tokens_only() -> None:
    greedy = Sampling(temperature=0.0, presence_penalty=1.0, penalty_window=2)
    assert Sampler(greedy).sample(LOGITS, (0, 3, 3)) == 0
    assert Sampler(greedy).sample(LOGITS, (3, 3, 0)) == 1
    repeated = Sampling(temperature=0.0, frequency_penalty=0.4)
    assert Sampler(repeated).sample(LOGITS, (0,)) == 0
    assert Sampler(repeated).sample(LOGITS, (0, 0)) == 1
    both_signs = np.array([2.0, 1.5, -1.0, -1.5], np.float32)
    halved = Sampling(temperature=0.0, repeat_penalty=2.0)
    assert Sampler(halved).sample(both_signs, (0,)) == 1
    assert Sampler(halved).sample(both_signs[2:], (0,)) == 1


def test_a_seed_repeats_a_drawing_and_none_does_not() -> None:
    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(seed=seed))
        return [sampler.sample(LOGITS, ()) for _ in range(50)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)


def test_sampling_leaves_the_logits_alone() -> None:
    before = LOGITS.copy()
    Sampler(Sampling(logit_bias={0: 1.0}, repeat_penalty=2.0)).sample(LOGITS, (0, 1))
    np.testing.assert_array_equal(LOGITS, before)
    assert softmax(LOGITS).sum() == pytest.approx(1.0)
