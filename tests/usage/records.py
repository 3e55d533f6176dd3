"""Records for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anaphora.usage.record import Cost, Record, TokenCounts

NOON = 1_800_014_400.0

RECORD = Record(
    id="chatcmpl-1",
    time=NOON,
    tenant="acme",
    model="small",
    api="chat",
    profile="local",
    streamed=True,
    tokens=TokenCounts(1000, 600, {"5m": 100, "1h": 200}, computed=450, output=20),
    queued=0.1,
    first_token=0.5,
    total=2.0,
    finish="end",
    cost=Cost(1_250_000_001, 3_000_000_002, "USD"),
)


def record(number: int = 1, **changes: Any) -> Record:
    return replace(RECORD, **{"id": f"chatcmpl-{number}", **changes})
