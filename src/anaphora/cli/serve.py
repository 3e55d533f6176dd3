"""``anaphora serve``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from anaphora.cli.options import configured
from anaphora.cli.output import err, find_model, out
from anaphora.config import Config
from anaphora.errors import ConfigError

if TYPE_CHECKING:
    from anaphora.model import Model
    from anaphora.roster import Choice, Roster
    from anaphora.serve import Address


@configured()
def serve(config: Config) -> None:
    """Serve a model to the clients of OpenAI and Anthropic.

    Without a model it is the small bundled one. Ends properly on Ctrl-C and SIGTERM.
    """
    from anaphora.model import Model
    from anaphora.roster import Roster
    from anaphora.serve import Server

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("anaphora").setLevel(logging.INFO)
    logging.getLogger("anaphora.llamacpp").setLevel(logging.WARNING)
    settings = config.settings()
    server = Server(config)

    def load(path: Path) -> Model:
        with err.status(f"loading {path.name}"):
            return Model(path, settings)

    roster = Roster(_choices(config), load)
    server.run(roster, lambda: _announce(roster, config, server.address))
    out.print("stopped")


def _choices(config: Config) -> list[Choice]:
    """The models by the names that clients use: their files', unless they are given others."""
    from anaphora.roster import Choice

    path = find_model(config.model, config.cache_dir)
    choices = [Choice(config.alias or path.stem, path)]
    for text in config.swap_model:
        name, given, reference = text.partition("=")
        if not given or "/" in name:  # a path may hold the sign, too
            name, reference = "", text
        path = find_model(reference, config.cache_dir)
        choices.append(Choice(name or path.stem, path))
    names = [choice.name for choice in choices]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two models are called {name!r}: name one of them NAME=MODEL")
    return choices


def _announce(roster: Roster, config: Config, address: Address) -> None:
    info = roster.model.info
    _line("Model", f"{info.model} ({info.kind})")
    for choice in roster.choices[1:]:
        _line("or", f"{choice.name}, when a request names it")
    parallel = config.parallel if info.caching and not config.exact else 1
    _line("Context", f"{info.context_size:,} tokens, {parallel} at a time")
    if info.caching:
        disk = f"{_size(info.disk_budget)} in {config.cache_dir}" if info.disk_budget else "none"
        _line("Cache", f"memory {_size(info.memory_budget)}, disk {disk}")
    else:
        _line("Cache", "off")
    if address.keys_required:
        _line("Keys", "needed")
    else:
        _line("Keys", "none, so only this machine can use the server")
    _line("Address", f"{address.url}/v1")
    body = json.dumps({"messages": [{"role": "user", "content": "Hello!"}]})
    key = " -H 'authorization: Bearer YOUR_KEY'" if address.keys_required else ""
    out.print(
        f"\nTry it:\n  curl {address.url}/v1/chat/completions -H 'content-type: application/json'"
        f"{key} -d '{body}'\n",
        markup=False,
        soft_wrap=True,
    )
    out.file.flush()


def _line(label: str, text: str) -> None:
    out.print(f"{label:<9}{text}", markup=False, soft_wrap=True)


def _size(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:,} bytes"
