"""``anaphora selftest``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.table import Table

from anaphora.cli.options import ENGINE, configured
from anaphora.cli.output import AsJson, err, find_model, out
from anaphora.config import Config

if TYPE_CHECKING:
    from anaphora.selftest import Check

_NEEDED = tuple(
    name for name in ENGINE if name not in ("ctx_size", "exact", "chat_template", "disk_budget")
)


@configured(_NEEDED)
def selftest(config: Config, as_json: AsJson = False) -> None:
    """Check on this machine that a restored prompt gives the logits of a computed one.

    Exit code 1 if it does not.
    """
    from anaphora import selftest as run_selftest

    path = find_model(config.model, config.cache_dir)
    with err.status("loading the model") as status:
        report = run_selftest.run(path, config.cache_dir, config.settings(), status.update)
    if as_json:
        rows = [{**asdict(check), "passed": check.passed} for check in report.checks]
        print(json.dumps({**asdict(report), "checks": rows, "passed": report.passed}, indent=2))
    elif not report.caching:
        out.print(f"{report.model} is a {report.kind} model and runs without the prompt cache:")
        out.print("there is nothing to check")
    else:
        out.print(
            f"{report.model}, {report.checks[0].prompt_tokens:,} tokens, "
            f"cold: first token after {report.cold_seconds:.3f} s"
        )
        out.print(_table(report.checks))
        out.print("Differences are the largest of any logit from the cold run.")
    if not report.passed:
        raise typer.Exit(1)


def _table(checks: tuple[Check, ...]) -> Table:
    table = Table(
        "mode", "restored from", "tokens", "first token", "difference", "limit", "", box=box.SIMPLE
    )
    for column in table.columns[2:6]:
        column.justify = "right"
    for check in checks:
        table.add_row(
            check.mode,
            check.source,
            f"{check.reused_tokens:,}",
            f"{check.seconds:.3f} s",
            f"{check.difference:.2g}",
            f"{check.limit:.2g}",
            "[green]ok[/green]" if check.passed else "[red]wrong[/red]",
        )
    return table
