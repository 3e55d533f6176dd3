"""Keys of cached blocks: a hash chain over exact token lists.

A block's key says everything its bytes depend on: the model and how it computes (the root key),
every token before it (the parent's key), its own tokens, and the salt of the segment it lies in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
"""Token ids, shape (n,)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a prompt that belongs to one owner of cache content.

    Blocks are cut where a segment ends, and ``salt`` enters the key of every block inside it, so
    that owners never meet in the cache except in a segment they share.
    """

    owner: str = "local"
    salt: bytes = b""
    end: int | None = None
    """Position (tokens) where the segment ends; ``None``: with the prompt and its answer."""


DEFAULT_SEGMENTS: tuple[Segment, ...] = (Segment(),)
