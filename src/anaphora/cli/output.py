"""What commands share: where they print, and how a model to run is found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

CacheDir = Annotated[
    Path, typer.Option("--cache-dir", help="Folder of the disk cache.", show_default=True)
]
ModelPath = Annotated[
    Path | None, typer.Option("--model", help="A GGUF file. Default: the bundled model.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# Where no terminal ends a line, tables are as wide as they need to be.
out = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 1000)
err = Console(stderr=True, highlight=False, emoji=False)


def fail(message: str, code: int = 1) -> NoReturn:
    """One line on stderr, and the exit code."""
    err.print(f"anaphora: {message}", markup=False, soft_wrap=True)
    sys.exit(code)


def find_model(name: str | None, cache_dir: Path) -> Path:
    """The model file called ``name``: a path, one of the Hub, or the bundled one."""
    from anaphora import hub

    if name is None or not name.startswith(hub.PREFIX):
        return prepare_model(None if name is None else Path(name), cache_dir)
    model = hub.HubModel.parse(name)
    err.print(f"looking for {model}", markup=False)
    return hub.fetch(model)


def prepare_model(path: Path | None, cache_dir: Path) -> Path:
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
