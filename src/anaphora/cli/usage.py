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
    table = Table(box=box.SIMPLE)
    for dimension in groups[0].group:
        table.add_column(dimension, no_wrap=True)
    for column in ("requests", "prompt", "read", "written", "uncached", "computed", "output"):
        table.add_column(column, justify="right")
    for column in ("hits", "cost", "saved"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in groups:
        table.add_row(*(escape(key) for key in one.group.values()), *_cells(one))
    table.add_section()
    for one in overall:
        table.add_row("total", *[""] * (len(groups[0].group) - 1), *_cells(one))
    return table


def _cells(one: Totals) -> list[str]:
    tokens, money = one.tokens, one.money
    written = sum(tokens.written.values())
    prompt = (tokens.prompt, tokens.read, written, tokens.uncached)
    counts = (one.requests, *prompt, tokens.computed, tokens.output)
    amounts = (money.amount, money.saved) if money else ()
    shown = [escape(f"{amount:,.4f} {money.currency}") for amount in amounts if money]
    return [*(f"{n:,}" for n in counts), f"{one.hit_share:.1%}", *(shown or ["", ""])]
