"""What the ledger keeps of a request. Never a word of its prompt or its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from anaphora.engine.protocol import FinishReason

Lifetime = Literal["5m", "30m", "1h", "12h", "unlimited"]
"""How long written tokens are promised to stay; ``unlimited``: until their space is needed."""

LIFETIMES: tuple[Lifetime, ...] = get_args(Lifetime)

Api = Literal["chat", "completions", "messages", "responses"]

Finish = FinishReason | Literal["failed"]
"""How a request ended."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of one request. Read, written and uncached ones add up to the prompt."""

    prompt: int = 0
    read: int = 0
    """Read from the cache, as the profile counts it."""
    written: Mapping[Lifetime, int] = field(default_factory=dict)
    """Written to the cache, by lifetime."""
    computed: int = 0
    """Tokens of the prompt that were really computed."""
    output: int = 0

    @property
    def uncached(self) -> int:
        """Neither read nor written."""
        return self.prompt - self.read - sum(self.written.values())


@dataclass(frozen=True, slots=True)
class Cost:
    """Money, in billionths of a unit of ``currency``: whole numbers, so that sums stay exact."""

    amount: int
    uncached: int
    """What the request would have cost without a cache."""
    currency: str


@dataclass(frozen=True, slots=True)
class Record:
    """One request, as a row of the ledger."""

    id: str
    time: float
    """When it arrived, in seconds since the Unix epoch."""
    tenant: str
    model: str
    api: Api
    profile: str
    streamed: bool
    tokens: TokenCounts
    queued: float
    """Seconds until it began."""
    first_token: float
    """Seconds until the first token of the answer; 0 where there was none."""
    total: float
    """Seconds until it ended."""
    finish: Finish
    miss: str | None = None
    """Why not more was read, in a word; ``None``: nothing was missed, or nobody knows."""
    cost: Cost | None = None
    """``None``: no price is known."""
