"""Commands that take the server's options, all of them or some."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, get_type_hints

import typer

from anaphora.config import FIELDS, Config, Option, load_config, spelled
from anaphora.errors import SettingsError

P = ParamSpec("P")

ENGINE = (
    "model",
    "ctx_size",
    "threads",
    "gpu_layers",
    "kv_type",
    "flash_attn",
    "adapter",
    "llama",
    "chat_template",
    "cache_dir",
    "memory_budget",
    "disk_budget",
    "block_size",
    "exact",
)
"""The options that say how a model runs, for commands that serve nobody."""

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A TOML file with any of these options. Each can also be a variable, as in "
        "ANAPHORA_CTX_SIZE. The command line goes first, then variables, then the file.",
    ),
]


def configured(
    names: Sequence[str] = tuple(FIELDS),
) -> Callable[[Callable[Concatenate[Config, P], None]], Callable[..., None]]:
    """Give a command the options called ``names``; it gets them as a :class:`Config`.

    ``model`` is an argument. Values stay text until all places they may come from are merged, so
    that a wrong one is reported the same way wherever it was written.
    """

    def decorate(command: Callable[Concatenate[Config, P], None]) -> Callable[..., None]:
        def run(*, config_file: Path | None, **values: Any) -> None:
            given = {name: values.pop(name) for name in names}
            given = {name: value for name, value in given.items() if value not in (None, [])}
            config = load_config(given, os.environ, config_file)
            try:
                command(config, **values)  # type: ignore[call-arg]
            except SettingsError as error:
                raise config.as_written(error) from error

        hints = get_type_hints(command, include_extras=True)
        own = list(inspect.signature(command).parameters.values())[1:]
        parameters = [_parameter(name) for name in names]
        parameters.append(_keyword("config_file", ConfigFile, None))
        parameters += [_keyword(p.name, hints[p.name], p.default) for p in own]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    item = FIELDS[name]
    option: Option = item.metadata["option"]
    if name == "model":
        argument = typer.Argument(help=option.help, metavar=option.metavar)
        return _keyword(name, Annotated[str | None, argument], None)
    flag = f"--{spelled(name)}"
    if isinstance(item.default, bool):
        switch = typer.Option(f"{flag}/--no-{spelled(name)}", help=option.help)
        return _keyword(name, Annotated[bool | None, switch], None)
    shown = item.default if item.default not in (None, ()) else None
    text = f"{option.help} Default: {_size(shown)}." if shown is not None else option.help
    settings = typer.Option(flag, help=text, metavar=option.metavar)
    if item.default == ():
        return _keyword(name, Annotated[list[str] | None, settings], None)
    return _keyword(name, Annotated[str | None, settings], None)


def _size(value: object) -> object:
    """Large whole numbers are sizes."""
    return f"{value >> 20}MiB" if isinstance(value, int) and value >= 1 << 20 else value


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=annotation, default=default)
