"""Sums over the ledger. Reading works while a server writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, get_args

from anaphora.errors import UsageError
from anaphora.usage.record import LIFETIMES, Lifetime, TokenCounts

Dimension = Literal["day", "tenant", "model"]

DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)

_EXPRESSIONS: Mapping[Dimension, str] = {
    "day": "date(time, 'unixepoch', 'localtime')",
    "tenant": "tenant",
    "model": "model",
}
_COUNTS = ("prompt", "read", *(f"written_{lifetime}" for lifetime in LIFETIMES))
_SUMS = (*_COUNTS, "computed", "output", "cost", "cost_uncached")


@dataclass(frozen=True, slots=True)
class Money:
    """An amount in units of ``currency``, exact."""

    amount: Decimal
    uncached: Decimal
    """What it would have been without a cache."""
    currency: str

    @property
    def saved(self) -> Decimal:
        return self.uncached - self.amount


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of some requests that have the currency in common."""

    group: Mapping[Dimension, str]
    """What else they have in common."""
    requests: int
    tokens: TokenCounts
    money: Money | None
    """``None``: nothing is known of their prices."""

    @property
    def hit_share(self) -> float:
        """How much of the prompts was read from the cache, 0 to 1."""
        return self.tokens.read / self.tokens.prompt if self.tokens.prompt else 0.0


def totals(
    path: Path,
    by: Sequence[Dimension] = (),
    *,
    since: date | None = None,
    until: date | None = None,
    tenant: str | None = None,
) -> list[Totals]:
    """Sums over the ledger at ``path``, one for each group and currency, in order of the groups.

    Days are those of the local time zone. Without ``by`` there is one group.

    :param since: the first day.
    :param until: the last day, itself included.
    :raises UsageError: there is no such file, or it is no ledger.
    """
    conditions, values = [], list[object]()
    if since is not None:
        conditions.append("time >= ?")
        values.append(_midnight(since))
    if until is not None:
        conditions.append("time < ?")
        values.append(_midnight(until + timedelta(days=1)))
    if tenant is not None:
        conditions.append("tenant = ?")
        values.append(tenant)
    keys = [_EXPRESSIONS[dimension] for dimension in by]
    places = ", ".join(str(number) for number in range(1, len(by) + 2))
    query = (
        f"SELECT {', '.join((*keys, 'currency', 'count(*)'))}, "
        f"{', '.join(f'sum({column})' for column in _SUMS)} "
        f"FROM requests {'WHERE ' if conditions else ''}{' AND '.join(conditions)} "
        f"GROUP BY {places} ORDER BY {places}"
    )
    return [_totals(by, row) for row in _rows(path, query, values)]


def _rows(path: Path, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
    if not path.exists():
        raise UsageError(
            f"there is no usage file {path}: name another with --usage-file, or serve a request"
        )
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=5.0)) as database:
            return database.execute(query, values).fetchall()
    except sqlite3.Error as error:
        raise UsageError(
            f"the usage file {path} can't be read ({error}): name another with --usage-file"
        ) from error


def _totals(by: Sequence[Dimension], row: tuple[Any, ...]) -> Totals:
    group = dict(zip(by, row, strict=False))
    currency, requests, *sums = row[len(by) :]
    of = dict(zip(_SUMS, sums, strict=True))
    written: dict[Lifetime, int] = {lifetime: of[f"written_{lifetime}"] for lifetime in LIFETIMES}
    tokens = TokenCounts(of["prompt"], of["read"], written, of["computed"], of["output"])
    money = None
    if currency is not None:
        amount, uncached = (Decimal(of[name]).scaleb(-9) for name in ("cost", "cost_uncached"))
        money = Money(amount, uncached, currency)
    return Totals(group, requests, tokens, money)


def _midnight(day: date) -> float:
    """When a day of the local time zone begins, in seconds since the Unix epoch."""
    return datetime.combine(day, time()).astimezone().timestamp()
