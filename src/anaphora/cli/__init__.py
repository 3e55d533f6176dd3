"""The ``anaphora`` command: a thin skin over the library.

What a command needs is imported when it runs: ``--help`` should be instant.
"""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from anaphora import __version__
from anaphora.cli import cache, keys
from anaphora.cli.chat import chat
from anaphora.cli.explain import explain
from anaphora.cli.measure import bench, demo
from anaphora.cli.output import fail, out
from anaphora.cli.selftest import selftest
from anaphora.cli.serve import serve
from anaphora.cli.usage import usage
from anaphora.errors import AnaphoraError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Prompt caching for models you run yourself.",
)
for command in (serve, chat, selftest, usage, explain, demo, bench):
    app.command()(command)
app.add_typer(keys.app, name="keys")
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Run the command. What a user did wrong is one line, and exit code 1, or 2 for wrong usage."""
    try:
        sys.exit(app(standalone_mode=False))
    except AnaphoraError as error:
        fail(str(error))
    except typer.TyperException as error:
        _fail_usage(error)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail_usage(error: typer.TyperException) -> NoReturn:
    problem = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    if not problem:  # the help was wanted, and shown
        sys.exit(error.exit_code)
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "anaphora"
    fail(f"{problem} (see '{command} --help')", error.exit_code)


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
