"""The ``anaphora`` command: a thin skin over the library."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from anaphora import __version__
from anaphora.errors import AnaphoraError
from anaphora.scratch import scratch_folder
from anaphora.settings import DEFAULT_CACHE_DIR

if TYPE_CHECKING:  # what a command needs is imported when it runs: "--help" should be instant
    from anaphora.bench import Report
    from anaphora.cache.inspect import NamespaceInfo

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Prompt caching for models you run yourself.",
)
cache_app = typer.Typer(no_args_is_help=True, help="Look at, check and clear the disk cache.")
app.add_typer(cache_app, name="cache")

CacheDir = Annotated[
    Path, typer.Option("--cache-dir", help="Folder of the disk cache.", show_default=True)
]
ModelPath = Annotated[
    Path | None, typer.Option("--model", help="A GGUF file. [default: the bundled model]")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def main() -> None:
    """Run the command; errors a user can cause are one line and exit code 1."""
    try:
        app()
    except AnaphoraError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str) -> NoReturn:
    err.print(f"anaphora: {message}", markup=False, soft_wrap=True)
    sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"anaphora {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command()
def demo(cache_dir: CacheDir = DEFAULT_CACHE_DIR, model: ModelPath = None) -> None:
    """Ask about a long document three times: cold, again, and after a restart."""
    from anaphora import demo as run_demo

    path, folder = _model(model, cache_dir), cache_dir.expanduser()
    out.print(f"Model     {path.name}")
    out.print("Document  CPython's language reference, about 6,000 tokens of it\n")

    def show(asked: run_demo.Asked) -> None:
        out.print(f"[bold]{asked.title}[/bold]: {asked.question}")
        answer = " ".join(asked.answer.split())
        out.print(f"  {answer}", markup=False)
        out.print(f"  [dim]first token after {asked.seconds:.3f} s[/dim]\n")

    with err.status("reading the document for the first time ..."):
        asked = run_demo.run(path, folder, show)
    table = Table("", "first token", "read", "computed", "", box=box.SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in asked:
        factor = asked[0].seconds / row.seconds
        table.add_row(
            row.title,
            f"{row.seconds:.3f} s",
            f"{row.read_tokens:,}",
            f"{row.computed_tokens:,}",
            "" if row is asked[0] else f"[bold]{factor:.0f}x faster[/bold]",
        )
    out.print(table)
    out.print("Read and computed are tokens of the prompt: from the cache, and by the model.")


@app.command()
def bench(
    cache_dir: CacheDir = DEFAULT_CACHE_DIR,
    model: ModelPath = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians are printed.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure the engine against a plain loop over llama.cpp's decode call, in one run."""
    from anaphora import bench as run_bench

    path = _model(model, cache_dir)
    reports = []
    with err.status("loading") as status:
        choices: tuple[Literal["auto", "other"], ...] = ("auto", "other")
        for choice, rounds in zip(choices, (repeats, max(1, repeats // 3)), strict=True):
            with scratch_folder(cache_dir.expanduser(), "bench") as folder:
                reports.append(run_bench.measure(path, folder, choice, rounds, status.update))
    if as_json:
        print(json.dumps([{**asdict(r), "passed": r.passed} for r in reports], indent=2))
    else:
        for report, judged in zip(reports, (True, False), strict=True):
            _print_report(report, judged)
    if not reports[0].passed:
        raise typer.Exit(1)


def _print_report(report: Report, judged: bool) -> None:
    title = f"{report.model}, flash attention {report.flash_attn}, medians of {report.repeats}"
    judgement = ("bar", "") if judged else ()
    table = Table("", "anaphora", "plain loop", "ratio", *judgement, box=box.SIMPLE)
    for column in table.columns[1:4]:
        column.justify = "right"
    table.title, table.title_justify = title, "left"
    for row in report.rows:
        cells = [row.name, _milliseconds(row.anaphora), _milliseconds(row.reference)]
        cells.append(f"{row.ratio:.3f}")
        if judged:
            cells.append(f"{'>=' if row.at_least else '<='} {row.bar:g}")
            cells.append("[green]ok[/green]" if row.passed else "[red]missed[/red]")
        table.add_row(*cells)
    out.print(table)
    for note in report.notes:
        out.print(f"  {note}", markup=False)
    out.print()


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


@cache_app.command("ls")
def cache_ls(
    cache_dir: CacheDir = DEFAULT_CACHE_DIR, model: ModelPath = None, as_json: AsJson = False
) -> None:
    """List what is cached, a line for each model and way to compute."""
    found = _namespaces(cache_dir, model)
    if as_json:
        print(json.dumps([asdict(info) for info in found], indent=2, default=str))
        return
    if not found:
        out.print(f"nothing is cached in {cache_dir}", markup=False)
        return
    columns = ("folder", "model", "blocks", "tokens", "size", "last used", "in use by")
    table = Table(*columns, box=box.SIMPLE)
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
    out.print(table)


@cache_app.command("verify")
def cache_verify(
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


@cache_app.command("clear")
def cache_clear(cache_dir: CacheDir = DEFAULT_CACHE_DIR, model: ModelPath = None) -> None:
    """Delete cached blocks: all of them, or one model's. Models stay."""
    from anaphora.cache.inspect import clear_namespace

    freed = sum(clear_namespace(info.path) for info in _namespaces(cache_dir, model))
    out.print(f"{freed / 2**20:,.1f} MiB freed")


def _namespaces(cache_dir: Path, model: Path | None) -> list[NamespaceInfo]:
    from anaphora.cache.inspect import list_namespaces
    from anaphora.engine.identity import model_digest

    found = list_namespaces(cache_dir.expanduser())
    if model is None:
        return found
    digest = model_digest(model.expanduser())
    return [info for info in found if info.identity.get("model") == digest]


def _model(path: Path | None, cache_dir: Path) -> Path:
    """The model to run: the one named, or the bundled one, prepared on first use."""
    if path is not None:
        return path.expanduser()
    from anaphora.bundled import bundled_model

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("preparing the bundled model (once)", total=None, visible=False)
        return bundled_model(
            cache_dir.expanduser(),
            lambda done, total: progress.update(task, completed=done, total=total, visible=True),
        )


if __name__ == "__main__":
    main()
