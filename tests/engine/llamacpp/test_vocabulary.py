from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anaphora import bundled
from tests.prompt.families import FAMILIES, Loaded, write_vocabulary

TEXTS = ("Hello\0 wörld", "👩‍👩‍👧‍👦 漢字", " leading", "123456\n\n\n", "\0", "the <s></s> <unk>")


@pytest.fixture(scope="module")
def bpe() -> Iterator[Loaded]:
    """The bundled model's byte-level BPE vocabulary."""
    loaded = Loaded(bundled.source_path())
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    folder = tmp_path_factory.mktemp("vocabulary")
    loaded = Loaded(write_vocabulary(folder / "v.gguf", "phi-3", FAMILIES["phi-3"]), "")
    yield loaded
    loaded.close()


def test_bundled_vocabulary_is_what_its_file_says(bpe: Loaded) -> None:
    vocabulary = bpe.vocabulary
    assert vocabulary.size == 49152
    assert (vocabulary.bos, vocabulary.eos, vocabulary.add_bos) == (1, 2, False)
    assert vocabulary.control["<|im_start|>"] == 1
    assert vocabulary.control["<|im_end|>"] == 2
    assert vocabulary.end_of_generation >= {0, 2}
    assert not vocabulary.strips_left | vocabulary.strips_right


def test_swallowing_control_tokens_are_known(sentencepiece: Loaded) -> None:
    vocabulary = sentencepiece.vocabulary
    assert vocabulary.add_bos
    names = {text for text, token in vocabulary.control.items() if token in vocabulary.strips_right}
    assert names == {"</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>"}


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_spell_the_text(bpe: Loaded, sentencepiece: Loaded, text: str) -> None:
    assert bpe.show(bpe.vocabulary.encode(text)) == text
    assert sentencepiece.show(sentencepiece.vocabulary.encode(text)) == " " + text


# The bundled vocabulary lacks the bytes of some control characters and of planes nobody uses;
# SentencePiece writes "▁" for a space.
@given(
    text=st.text(
        st.characters(max_codepoint=0x1FFFF, exclude_categories=["C"], exclude_characters="▁")
    )
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_spelled_without_control_tokens(
    bpe: Loaded, sentencepiece: Loaded, text: str
) -> None:
    for one, start in ((bpe, ""), (sentencepiece, " ")):
        tokens = one.vocabulary.encode(text)
        assert not one.control_in(tokens)
        assert one.show(tokens) == (start + text if text else "")


def test_empty_text_has_no_tokens(bpe: Loaded, sentencepiece: Loaded) -> None:
    assert bpe.vocabulary.encode("") == sentencepiece.vocabulary.encode("") == []


def test_control_token_a_tokenizer_merges_from_text_is_spelled(sentencepiece: Loaded) -> None:
    # This vocabulary has "s>", which merges with "<" into "<s>" even with parsing off.
    tokens = sentencepiece.vocabulary.encode("<s>")
    assert sentencepiece.control_in(tokens) == []
    assert sentencepiece.show(tokens) == " <s>"


def test_control_tokens_have_no_piece(bpe: Loaded) -> None:
    assert bpe.vocabulary.piece(bpe.vocabulary.control["<|im_start|>"]) == b""


def test_threads_share_a_vocabulary(bpe: Loaded) -> None:
    text = bundled.load_test_document(20_000)
    expected = bpe.vocabulary.encode(text)
    with ThreadPoolExecutor(4) as pool:
        assert all(tokens == expected for tokens in pool.map(bpe.vocabulary.encode, [text] * 16))
