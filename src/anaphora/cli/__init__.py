"""The ``anaphora`` command: a thin skin over the library.

What a command needs is imported when it runs: ``--help`` should be instant.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from anaphora import __version__
from anaphora.cli import cache, keys
from anaphora.cli.chat import chat
from anaphora.cli.measure import bench, demo
from anaphora.cli.output import fail, out
from anaphora.cli.selftest import selftest
from anaphora.cli.serve import serve
from anaphora.errors import AnaphoraError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Prompt caching for models you run yourself.",
)
for command in (serve, chat, selftest, demo, bench):
    app.command()(command)
app.add_typer(keys.app, name="keys")
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Run the command; errors a user can cause are one line and exit code 1."""
    try:
        app()
    except AnaphoraError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


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
