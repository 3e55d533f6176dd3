"""The vocabulary of a GGUF model: byte-level BPE, done by the ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as InSequence

from anaphora.errors import ModelFileError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CASELESS_ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = (
    _CASELESS_ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_WORDS % r"\p{N}{1,3}",),
    "qwen2": (_WORDS % r"\p{N}",),
}
"""Name in the file to the expressions that split a text, each splitting the pieces of the last."""

_LOOKS_WHOLE_WORDS_UP = frozenset({"llama-bpe"})

_ENDS_AN_ANSWER = frozenset(
    {"<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>"}
    | {"<|return|>", "<|call|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "</s>"}
    | {"<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<reponame>", "<|file_sep|>"}
)
"""Files name one or two of the tokens that end an answer; llama.cpp knows more by their text."""

_NORMAL, _USER_DEFINED = 1, 4
_SPECIAL = (2, 3)
"""Token types: unknown and control."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The vocabulary as a GGUF file has it (``tokenizer.ggml.*``)."""

    model: str
    pre: str
    texts: Sequence[str]
    """Text of every token; in a byte-level model characters stand for bytes."""
    types: Sequence[int]
    merges: Sequence[str]
    """Pairs separated by a space, the first to merge first."""
    bos: int | None = None
    eos: int | None = None
    ends: Sequence[int] = ()
    """Further tokens that the file says end an answer or a turn."""
    add_bos: bool = False


class BytePairVocabulary:
    """Implements :class:`anaphora.vocabulary.Vocabulary`."""

    def __init__(self, table: TokenTable) -> None:
        """Raises :class:`ModelFileError` where a text cannot be split as the model expects it."""
        if table.model != "gpt2":
            raise ModelFileError(
                f"the model has a {table.model!r} tokenizer and the reference engine knows only "
                "byte-level BPE ('gpt2'): use the llama.cpp engine"
            )
        if table.pre not in _PRE_TOKENIZERS:
            raise ModelFileError(
                f"the model has a {table.pre!r} pre-tokenizer and the reference engine knows only "
                f"{', '.join(_PRE_TOKENIZERS)}: use the llama.cpp engine"
            )
        tokens = list(zip(table.texts, table.types, strict=True))
        self.size = len(tokens)
        self.bos = table.bos
        self.eos = table.eos
        self.add_bos = table.add_bos and table.bos is not None
        self.control: Mapping[str, int] = {
            text: token for token, (text, kind) in enumerate(tokens) if kind in _SPECIAL
        }
        self.end_of_generation = frozenset(
            {token for text, token in self.control.items() if text in _ENDS_AN_ANSWER}
            | {token for token in (table.eos, *table.ends) if token is not None}
        )
        self.strips_left: frozenset[int] = frozenset()
        self.strips_right: frozenset[int] = frozenset()
        self._pieces = [_piece(text, kind) for text, kind in tokens]
        self._tokenizer = _tokenizer(table)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def piece(self, token: int) -> bytes:
        return self._pieces[token]


def _tokenizer(table: TokenTable) -> Tokenizer:
    words = {
        text: token
        for token, (text, kind) in enumerate(zip(table.texts, table.types, strict=True))
        if kind not in _SPECIAL
    }
    try:
        tokenizer = Tokenizer(
            BPE(
                words,
                [_pair(merge) for merge in table.merges],
                ignore_merges=table.pre in _LOOKS_WHOLE_WORDS_UP,
            )
        )
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(f"the model's vocabulary is damaged: {error}") from error
    splits = [Split(Regex(pattern), "isolated") for pattern in _PRE_TOKENIZERS[table.pre]]
    to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = InSequence([*splits, to_bytes])
    # Tokens such as "<think>", added after the training: whole wherever they appear.
    tokenizer.add_tokens(
        [
            AddedToken(text, normalized=False)
            for text, kind in zip(table.texts, table.types, strict=True)
            if kind == _USER_DEFINED
        ]
    )
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 bytes as themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_of_character()


def _piece(text: str, kind: int) -> bytes:
    if kind == _USER_DEFINED:
        return text.encode()
    if kind != _NORMAL:
        return b""
    # A character that stands for no byte is in no sound vocabulary; it means itself.
    return b"".join(
        bytes([_BYTE_OF_CHARACTER[c]]) if c in _BYTE_OF_CHARACTER else c.encode() for c in text
    )
