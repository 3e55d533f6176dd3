"""The vocabulary of a GGUF model, read through llama.cpp's own tokenizer."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Any

from llama_cpp import llama_cpp

from anaphora.errors import EngineError


class LlamaVocabulary:
    """Implements :class:`anaphora.vocabulary.Vocabulary` on a loaded ``llama_model``.

    The caller owns ``model``, and closes this object before it frees it: other threads may be in
    the middle of a call.
    """

    def __init__(self, model: Any) -> None:
        vocab = llama_cpp.llama_model_get_vocab(model)
        self._vocab = vocab
        self._size = int(llama_cpp.llama_vocab_n_tokens(vocab))
        self._bos = _token_or_none(llama_cpp.llama_vocab_bos(vocab))
        self._eos = _token_or_none(llama_cpp.llama_vocab_eos(vocab))
        self._add_bos = bool(llama_cpp.llama_vocab_get_add_bos(vocab)) and self._bos is not None
        self._pieces: list[bytes | None] = [None] * self._size
        self._lock = threading.Lock()
        self._closed = False

        attributes = [llama_cpp.llama_vocab_get_attr(vocab, token) for token in range(self._size)]
        control = [
            token
            for token, attribute in enumerate(attributes)
            if attribute & (llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN)
        ]
        texts: dict[str, int] = {}
        for token in control:
            if text := _text(vocab, token):
                texts.setdefault(text, token)
        self._control = MappingProxyType(texts)
        self._strips_left = frozenset(
            t for t in control if attributes[t] & llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP
        )
        self._strips_right = frozenset(
            t for t in control if attributes[t] & llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP
        )
        self._end_of_generation = frozenset(
            token for token in range(self._size) if llama_cpp.llama_vocab_is_eog(vocab, token)
        )
        # An unknown token is what some tokenizers answer to unknown characters: harmless.
        self._forbidden = frozenset(
            t for t in control if attributes[t] & llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
        )

    @property
    def size(self) -> int:
        return self._size

    @property
    def bos(self) -> int | None:
        return self._bos

    @property
    def eos(self) -> int | None:
        return self._eos

    @property
    def add_bos(self) -> bool:
        return self._add_bos

    @property
    def end_of_generation(self) -> frozenset[int]:
        return self._end_of_generation

    @property
    def control(self) -> Mapping[str, int]:
        return self._control

    @property
    def strips_left(self) -> frozenset[int]:
        return self._strips_left

    @property
    def strips_right(self) -> frozenset[int]:
        return self._strips_right

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text``, which must be well-formed Unicode; it may hold NUL characters.

        User-defined tokens (``<think>`` in some models) are matched, control tokens never.
        """
        data = text.encode()
        if not data:
            return []
        # A token covers at least a byte, and some tokenizers put a space in front.
        capacity = len(data) + 2
        buffer = (llama_cpp.llama_token * capacity)()
        count = self._tokenize(data, buffer, capacity)
        if count < 0:
            capacity = -count
            buffer = (llama_cpp.llama_token * capacity)()
            count = self._tokenize(data, buffer, capacity)
        tokens: list[int] = buffer[:count]
        if self._forbidden.isdisjoint(tokens):
            return tokens
        return [part for token in tokens for part in self._spell(token)]

    def piece(self, token: int) -> bytes:
        piece = self._pieces[token]
        if piece is None:
            piece = self._pieces[token] = self._read_piece(token)
        return piece

    def close(self) -> None:
        """No native call is running or will be made once this returns."""
        with self._lock:
            self._closed = True

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise EngineError("the model is closed: load it again")
            yield

    def _tokenize(self, data: bytes, buffer: Any, capacity: int) -> int:
        with self._open():
            return int(
                llama_cpp.llama_tokenize(
                    self._vocab, data, len(data), buffer, capacity, False, False
                )
            )

    def _read_piece(self, token: int) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            with self._open():
                length = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, size, 0, False)
            if length >= 0:
                return buffer.raw[:length]
            size = -length

    def _spell(self, token: int) -> list[int]:
        """``token``, or the characters of its text where it is a control token.

        A tokenizer that merges by scores or looks whole words up can arrive at a control token
        from plain text even with parsing off.
        """
        if token not in self._forbidden:
            return [token]
        spelled: list[int] = []
        for character in _text(self._vocab, token):
            data = character.encode()
            units = [data] if data in self._characters else [bytes([byte]) for byte in data]
            spelled += [self._characters[unit] for unit in units if unit in self._characters]
        return spelled

    @cached_property
    def _characters(self) -> Mapping[bytes, int]:
        """The token of every character, or byte of one, that has a token of its own."""
        return {
            piece: token
            for token in range(self._size)
            if token not in self._forbidden and 0 < len(piece := self.piece(token)) <= 4
        }


class LoadedVocabulary(LlamaVocabulary):
    """A vocabulary that owns its model, which was loaded for it alone."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._model = model

    def close(self) -> None:
        super().close()
        if self._model:
            llama_cpp.llama_model_free(self._model)
            self._model = None


def _text(vocab: Any, token: int) -> str:
    return str(llama_cpp.llama_vocab_get_text(vocab, token).decode(errors="replace"))


def _token_or_none(token: int) -> int | None:
    return None if token == llama_cpp.LLAMA_TOKEN_NULL else int(token)
