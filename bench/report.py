"""What a measurement found, as a table or JSON, and whether it is good enough."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table

_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    name: str
    values: tuple[float | None, ...]
    """One for each of the report's columns; ``None`` where there is none."""
    unit: str
    judged: float | None = None
    """What is held against the bar; without one the row is only told."""
    bar: float | None = None
    at_least: bool = False
    """Whether it must be at least the bar; otherwise at most."""

    @property
    def passed(self) -> bool:
        if self.judged is None or self.bar is None:
            return True
        return self.judged >= self.bar if self.at_least else self.judged <= self.bar


@dataclass(frozen=True, slots=True)
class Report:
    """All of a run."""

    title: str
    columns: tuple[str, ...]
    judged: str
    """What the judged values are: a ratio, say."""
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def show(self, as_json: bool) -> None:
        if as_json:
            print(json.dumps({**asdict(self), "passed": self.passed}, indent=2))
            return
        out = Console(highlight=False, emoji=False, width=_WIDTH)
        table = Table("", *self.columns, self.judged, "bar", "", box=box.SIMPLE)
        for column in table.columns[1:-2]:
            column.justify = "right"
        table.title, table.title_justify = self.title, "left"
        for row in self.rows:
            cells = [_number(value, row.unit) for value in row.values]
            cells.append("" if row.judged is None else f"{row.judged:.3f}")
            if row.bar is not None:
                cells.append(f"{'>=' if row.at_least else '<='} {row.bar:g}")
                cells.append("[green]ok[/green]" if row.passed else "[red]missed[/red]")
            table.add_row(row.name, *cells)
        out.print(table)
        for note in self.notes:
            out.print(f"  {note}", markup=False)


def paired(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """Median of the ratios within each round: a machine may change its speed between rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:,.1f} {unit}" if isinstance(value, float) else f"{value:,} {unit}"
