"""``anaphora usage``: what was used, what the cache saved."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from anaphora.cli.output import AsJson, CacheDir, out
from anaphora.settings import DEFAULT_CACHE_DIR

if TYPE_CHECKING:
    from anaphora.usage.report import Dimension, Totals

_DAY = "%Y-%m-%d"
_MANY = 100_000
"""Tokens from which on the table counts in millions."""


class By(StrEnum):
    """What a line can be of."""

    day = "day"
    tenant = "tenant"
    model = "model"


def usage(
    by: Annotated[
        list[By] | None,
        typer.Option(help="A line for each; may be repeated. Default: day."),
    ] = None,
    since: Annotated[
        datetime | None, typer.Option(formats=[_DAY], metavar="DAY", help="First day: 2026-11-30.")
    ] = None,
    until: Annotated[
        datetime | None, typer.Option(formats=[_DAY], metavar="DAY", help="Last day, included.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's requests.")] = None,
    cache_dir: CacheDir = DEFAULT_CACHE_DIR,
    usage_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file itself. Default: usage.db in the cache dir."),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what requests used and what the cache saved, also while a server runs."""
    from anaphora.usage.ledger import default_usage_file
    from anaphora.usage.report import totals

    if as_csv and as_json:
        raise typer.BadParameter("choose one of --csv and --json")
    path = (usage_file or default_usage_file(cache_dir)).expanduser()
    first, last = (day.date() if day else None for day in (since, until))
    dimensions: list[Dimension] = [one.value for one in by or [By.day]]
    groups = totals(path, dimensions, since=first, until=last, tenant=tenant)
    if as_csv:
        _print_csv(groups)
        return
    overall = totals(path, since=first, until=last, tenant=tenant)
    if as_json:
        shown = {
            "groups": [_flat(one) for one in groups],
            "totals": [_flat(one) for one in overall],
        }
        print(json.dumps(shown, indent=2))
    elif groups:
        out.print(_table(groups, overall))
    else:
        out.print("no requests")


def _print_csv(groups: Sequence[Totals]) -> None:
    rows = [_flat(one) for one in groups]
    if rows:
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _flat(one: Totals) -> Mapping[str, object]:
    """Money as text, so that nothing rounds it."""
    tokens, money = one.tokens, one.money
    return {
        **{str(dimension): key for dimension, key in one.group.items()},
        "requests": one.requests,
        "prompt_tokens": tokens.prompt,
        "read_tokens": tokens.read,
        **{f"written_{lifetime}_tokens": n for lifetime, n in tokens.written.items()},
        "uncached_tokens": tokens.uncached,
        "computed_tokens": tokens.computed,
        "output_tokens": tokens.output,
        "hit_share": round(one.hit_share, 6),
        "cost": f"{money.amount:f}" if money else None,
        "saved": f"{money.saved:f}" if money else None,
        "currency": money.currency if money else None,
    }


def _table(groups: Sequence[Totals], overall: Sequence[Totals]) -> Table:
    """What fits a terminal; columns of which there is nothing anywhere are left out."""
    rows = [_cells(one) for one in (*groups, *overall)]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for dimension in groups[0].group:
        table.add_column(dimension, overflow="fold", no_wrap=dimension == "day")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for one, row in zip(groups, rows, strict=False):
        table.add_row(*(escape(key) for key in one.group.values()), *(row[c] for c in columns))
    table.add_section()
    beside = [""] * (len(groups[0].group) - 1)
    for row in rows[len(groups) :]:
        table.add_row("total", *beside, *(row[c] for c in columns))
    return table


def _cells(one: Totals) -> Mapping[str, str]:
    tokens, money = one.tokens, one.money
    return {
        "requests": f"{one.requests:,}",
        "prompt": _count(tokens.prompt),
        "read": _count(tokens.read),
        "written": _count(sum(tokens.written.values())),
        "uncached": _count(tokens.uncached) if tokens.uncached else "",
        "computed": _count(tokens.computed),
        "output": _count(tokens.output),
        "hits": f"{one.hit_share:.1%}",
        "cost": escape(f"{money.amount:,.4f} {money.currency}") if money else "",
        "saved": escape(f"{money.saved:,.4f} {money.currency}") if money else "",
    }


def _count(tokens: int) -> str:
    return f"{tokens:,}" if tokens < _MANY else f"{tokens / 1e6:,.2f}M"
