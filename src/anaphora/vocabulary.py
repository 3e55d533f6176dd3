"""What the prompt layer and the engines need to know of a model's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Vocabulary(Protocol):
    """A model's vocabulary. Implementations are safe to use from several threads."""

    @property
    def size(self) -> int: ...

    @property
    def bos(self) -> int | None: ...

    @property
    def eos(self) -> int | None: ...

    @property
    def add_bos(self) -> bool:
        """Whether the model expects a BOS token in front of every prompt."""
        ...

    @property
    def end_of_generation(self) -> frozenset[int]:
        """Tokens that end an answer (EOS, end of turn, ...)."""
        ...

    @property
    def control(self) -> Mapping[str, int]:
        """Text of every control token, to its id. User text must never become one of these."""
        ...

    @property
    def strips_left(self) -> frozenset[int]:
        """Control tokens that swallow white space before them."""
        ...

    @property
    def strips_right(self) -> frozenset[int]:
        """Control tokens that swallow white space after them."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text`` as one whole. Control tokens are never parsed; no BOS is added."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes ``token`` stands for; ``b""`` for control tokens."""
        ...
