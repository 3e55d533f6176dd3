"""``anaphora demo`` and ``anaphora bench``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import box
from rich.table import Table

from anaphora.cli.output import AsJson, CacheDir, ModelPath, err, out, prepare_model
from anaphora.scratch import scratch_folder
from anaphora.settings import DEFAULT_CACHE_DIR

if TYPE_CHECKING:
    from anaphora.bench import Report


def demo(
    cache_dir: CacheDir = DEFAULT_CACHE_DIR, model: ModelPath = None, as_json: AsJson = False
) -> None:
    """Ask about a long document three times: cold, again, and after a restart."""
    from anaphora import demo as run_demo

    path, folder = prepare_model(model, cache_dir), cache_dir.expanduser()
    if not as_json:
        out.print(f"Model     {path.name}")
        out.print("Document  CPython's language reference, about 6,000 tokens of it\n")

    def show(asked: run_demo.Asked) -> None:
        if as_json:
            return
        out.print(f"[bold]{asked.title}[/bold]: {asked.question}")
        answer = " ".join(asked.answer.split())
        out.print(f"  {answer}", markup=False)
        out.print(f"  [dim]first token after {asked.seconds:.3f} s[/dim]\n")

    with err.status("asking about the document ..."):
        asked = run_demo.run(path, folder, show)
    if as_json:
        print(json.dumps([asdict(one) for one in asked], indent=2))
        return
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


def bench(
    cache_dir: CacheDir = DEFAULT_CACHE_DIR,
    model: ModelPath = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians are printed.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure the engine against a plain loop over llama.cpp's decode call, in one run."""
    from anaphora import bench as run_bench

    path = prepare_model(model, cache_dir)
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
