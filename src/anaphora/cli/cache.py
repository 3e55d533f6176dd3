"""``anaphora cache``: look at, check and clear the disk cache."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from anaphora.cli.output import AsJson, CacheDir, ModelPath, err, out
from anaphora.scratch import leftovers, remove_leftover
from anaphora.settings import DEFAULT_CACHE_DIR

if TYPE_CHECKING:
    from anaphora.cache.inspect import NamespaceInfo

app = typer.Typer(no_args_is_help=True, help="Look at, check and clear the disk cache.")


@app.command()
def ls(
    cache_dir: CacheDir = DEFAULT_CACHE_DIR, model: ModelPath = None, as_json: AsJson = False
) -> None:
    """List what is cached, a line for each model and way to compute."""
    with err.status("looking"):
        found = _namespaces(cache_dir, model)
    if as_json:
        print(json.dumps([asdict(info) for info in found], indent=2, default=str))
        return
    if found:
        out.print(_table(found))
    else:
        out.print(f"nothing is cached in {cache_dir}", markup=False)
    if left := leftovers(cache_dir.expanduser()):
        out.print(
            f"left by runs that were killed: {', '.join(path.name for path in left)}; "
            "'anaphora cache clear' deletes them",
            markup=False,
            soft_wrap=True,
        )


def _table(found: list[NamespaceInfo]) -> Table:
    table = Table(box=box.SIMPLE)
    longest = max(len(info.path.name) for info in found)
    table.add_column("folder", no_wrap=True, min_width=longest)  # whole, however little room
    for column in ("model", "blocks", "tokens", "size", "last used", "in use by"):
        table.add_column(column)
    for info in found:
        used = datetime.fromtimestamp(info.last_used, UTC).astimezone() if info.last_used else None
        table.add_row(
            info.path.name,
            info.model,
            f"{info.blocks:,}",
            f"{info.tokens:,}",
            f"{info.bytes / 2**20:,.1f} MiB",
            f"{used:%Y-%m-%d %H:%M}" if used else "",
            f"process {info.used_by}" if info.used_by else "",
        )
    return table


@app.command()
def verify(
    cache_dir: CacheDir = DEFAULT_CACHE_DIR,
    model: ModelPath = None,
    remove: Annotated[bool, typer.Option(help="Delete damaged files.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every block and check its seal. Exit code 1 if any is damaged."""
    from anaphora.cache.inspect import verify_namespace

    reports = []
    with err.status("checking") as status:
        for info in _namespaces(cache_dir, model):
            status.update(f"checking {info.path.name}, {info.bytes / 2**20:,.0f} MiB")
            reports.append(verify_namespace(info.path, remove=remove))
    if as_json:
        print(json.dumps([asdict(report) for report in reports], indent=2, default=str))
    else:
        for report in reports:
            removed = f", {report.removed} removed" if report.removed else ""
            out.print(f"{report.path.name}: {report.good} good, {report.damaged} damaged{removed}")
        if not reports:
            out.print(f"nothing is cached in {cache_dir}", markup=False)
    if any(report.damaged > report.removed for report in reports):
        raise typer.Exit(1)


@app.command()
def clear(
    cache_dir: CacheDir = DEFAULT_CACHE_DIR, model: ModelPath = None, as_json: AsJson = False
) -> None:
    """Delete cached blocks: all of them, or one model's. Models stay.

    Without --model, also what demo, bench and selftest left behind where they were killed.
    """
    from anaphora.cache.inspect import clear_namespace

    freed = 0
    with err.status("deleting"):
        for info in _namespaces(cache_dir, model):
            freed += clear_namespace(info.path)
        for path in leftovers(cache_dir.expanduser()) if model is None else ():
            freed += remove_leftover(path)
    if as_json:
        print(json.dumps({"freed_bytes": freed}))
        return
    out.print(f"{freed / 2**20:,.1f} MiB freed")


def _namespaces(cache_dir: Path, model: Path | None) -> list[NamespaceInfo]:
    from anaphora.cache.inspect import list_namespaces
    from anaphora.engine.identity import model_digest

    found = list_namespaces(cache_dir.expanduser())
    if model is None:
        return found
    digest = model_digest(model.expanduser())
    return [info for info in found if info.identity.get("model") == digest]
