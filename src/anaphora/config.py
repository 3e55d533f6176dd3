"""The server's options: one table for the command line, the environment and the TOML file.

An option is called the same everywhere: ``--ctx-size``, ``ANAPHORA_CTX_SIZE``, and ``ctx-size`` in
the file. The command line goes before the environment, that before the file, that before the
default.
"""

# ruff: noqa: RUF009 - _option only wraps dataclasses.field

from __future__ import annotations

import difflib
import logging
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from anaphora.errors import ConfigError, SettingsError
from anaphora.keys import DEFAULT_KEYS_FILE
from anaphora.profiles import DEFAULT_PROFILE, PROFILES, Profile
from anaphora.prompt.volatile import VolatileRules
from anaphora.settings import (
    DEFAULT_CACHE_DIR,
    Adapter,
    EnginePlace,
    FlashAttention,
    Settings,
)

logger = logging.getLogger(__name__)

_PREFIX = "ANAPHORA_"
_CONFIG = _PREFIX + "CONFIG"

Parse = Callable[[object], Any]
"""From a value as it was written, text or TOML's own, to what it means.

Raises ``ValueError`` with what to use instead.
"""


@dataclass(frozen=True, slots=True)
class Option:
    """How an option is read and explained."""

    parse: Parse
    help: str
    metavar: str = "TEXT"
    secret: bool = False
    """Never shown, not even where its value is wrong."""


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("use a text")
    return value.strip()


def _texts(value: object) -> tuple[str, ...]:
    """A list, or one text with commas between."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError("use a list of texts")
    return tuple(_text(item) for item in items)


def _path(value: object) -> Path:
    return Path(_text(value)).expanduser()


def _choice(*choices: str) -> Parse:
    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError(f"use {', '.join(choices[:-1])} or {choices[-1]}")
        return str(value)

    return parse


def _switch(value: object) -> bool:
    switches = {"true": True, "on": True, "yes": True, "1": True}
    switches |= {"false": False, "off": False, "no": False, "0": False}
    found = value if isinstance(value, bool) else switches.get(str(value).strip().lower())
    if found is None:
        raise ValueError("use true or false")
    return found


def _integer(low: int, high: int = 2**31 - 1) -> Parse:
    def parse(value: object) -> int:
        try:
            number = None if isinstance(value, bool | float) else int(value)  # type: ignore[call-overload]
        except (TypeError, ValueError):
            number = None
        if number is None or not low <= number <= high:
            most = "or more" if high == 2**31 - 1 else f"to {high}"
            raise ValueError(f"use a whole number, {low} {most}")
        return int(number)

    return parse


_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}IB": 1024**n for n, letter in enumerate("KMGT", start=1)}
_UNITS |= {f"{letter}B": 1000**n for n, letter in enumerate("KMGT", start=1)}


def _size(value: object) -> int:
    """Bytes, from ``8GiB``, ``500 MB`` or a plain number."""
    text = "" if isinstance(value, bool) else str(value).strip().upper()
    number = text.rstrip("KMGTIB ")
    try:
        size = Decimal(number) * _UNITS[text[len(number) :].strip()]
        if not 0 <= size < 2**63:
            raise ValueError
    except (ArithmeticError, KeyError, ValueError):
        raise ValueError("use a number of bytes or a size such as 8GiB or 500MB") from None
    return int(size)


def _path_or_off(value: object) -> Path | Literal["off"]:
    return "off" if value == "off" else _path(value)


def _volatile(value: object) -> Literal["on", "off"] | VolatileRules:
    """``on``, ``off``, or the tables of a file. Raises :class:`ConfigError` for wrong rules."""
    if isinstance(value, list):
        return VolatileRules.parse(value)
    if value == "on" or value == "off":
        return value
    raise ValueError("use on, off, or [[volatile]] tables in the configuration file")


def _adapters(value: object) -> tuple[Adapter, ...]:
    """``PATH`` or ``PATH:SCALE``, several as :func:`_texts` takes them."""
    adapters = []
    for text in _texts(value):
        path, colon, scale = text.rpartition(":")
        try:
            number = float(scale)
        except ValueError:  # a colon of the path's own
            colon = ""
        if not colon:
            path, number = text, 1.0
        if not path or not math.isfinite(number):
            raise ValueError("use PATH or PATH:SCALE")
        adapters.append(Adapter(Path(path).expanduser(), number))
    return tuple(adapters)


def _parameters(value: object) -> tuple[tuple[str, object], ...]:
    """A TOML table, or texts ``NAME=VALUE`` as :func:`_texts` takes them."""
    if isinstance(value, Mapping):
        return tuple(value.items())
    found: dict[str, object] = {}
    for text in _texts(value):
        name, equals, written = (part.strip() for part in text.partition("="))
        if not (name and equals and written):
            raise ValueError("use NAME=VALUE")
        if name in found:
            raise ValueError(f"use {name} once")
        found[name] = _plain(written)
    return tuple(found.items())


def _rules(value: object) -> tuple[Profile, ...]:
    """Profiles with other settings: TOML tables by name, or texts ``PROFILE.NAME=VALUE``, and
    ``PROFILE.lifetimes.NAME=SECONDS``, as :func:`_parameters` takes them."""
    tables: dict[str, Any] = {}
    for name, item in _parameters(value):
        *path, last = name.split(".")
        table = tables
        for step in path:
            table = table.setdefault(step, {})
            if not isinstance(table, dict):
                raise ValueError(f"use {step} once")
        if last in table:
            raise ValueError(f"use {name} once")
        table[last] = dict(item) if isinstance(item, Mapping) else item
    changed = []
    for name, settings in tables.items():
        if name not in PROFILES or not isinstance(settings, dict):
            raise ValueError(f"use PROFILE.NAME=VALUE, with {', '.join(PROFILES)} as PROFILE")
        known = [item.name for item in fields(PROFILES[name])]
        if not set(settings) <= set(known):
            raise ValueError(f"use {', '.join(known)} of {name}")
        if not isinstance(settings.get("lifetimes", {}), dict):
            raise ValueError(f"use {name}.lifetimes.NAME=SECONDS")
        try:
            changed.append(type(PROFILES[name])(**settings))
        except SettingsError as error:
            raise ValueError(str(error)) from None
    return tuple(changed)


def _plain(text: str) -> object:
    """A switch or a number where ``text`` is written like one."""
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"[+-]?\d{1,19}", text, re.ASCII):
        return int(text)
    if re.fullmatch(r"[+-]?\d*\.?\d+(e[+-]?\d+)?", text, re.ASCII | re.IGNORECASE):
        return float(text)
    return text


def _option(default: Any, parse: Parse, help: str, metavar: str = "TEXT") -> Any:
    return field(default=default, metadata={"option": Option(parse, help, metavar)})


@dataclass(frozen=True, slots=True)
class Config:
    """Every option of the server. ``None``: chosen from what the machine and the model are."""

    model: str | None = _option(
        None, _text, "A GGUF file, or hf:OWNER/REPO[:QUANT]. Default: the bundled model.", "MODEL"
    )
    swap_model: tuple[str, ...] = _option(
        (),
        _texts,
        "A further model, loaded in the other's place when a request names it; may be repeated.",
        "[NAME=]MODEL",
    )

    host: str = _option("127.0.0.1", _text, "Address to listen on.", "HOST")
    port: int = _option(8080, _integer(0, 65535), "Port to listen on; 0 picks one.", "PORT")
    alias: str | None = _option(None, _text, "What the API calls the model.", "NAME")
    api_key: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata={
            "option": Option(
                _texts,
                "A key requests must carry; may be repeated. Rather set ANAPHORA_API_KEY: the "
                "command line can be seen by others.",
                "KEY",
                secret=True,
            )
        },
    )
    keys_file: Path = _option(
        DEFAULT_KEYS_FILE, _path, "File of the keys made by 'anaphora keys'.", "FILE"
    )

    profile: str = _option(
        DEFAULT_PROFILE.name,
        _choice(*PROFILES),
        f"Whose caching rules count: {', '.join(PROFILES)}. A key may have its own.",
        "NAME",
    )
    rules: tuple[Profile, ...] = _option(
        (),
        _rules,
        "A setting of a profile, such as anthropic.minimum=512; may be repeated.",
        "PROFILE.NAME=VALUE",
    )

    ctx_size: int | None = _option(
        None, _integer(64), "Tokens one request can hold. Default: the model's own.", "TOKENS"
    )
    parallel: int = _option(4, _integer(1), "Requests computed at the same time.", "N")
    engine: EnginePlace = _option(
        "thread",
        _choice("thread", "process"),
        "Where llama.cpp runs: on a thread of the server, or in a process of its own, which is "
        "started again when it dies.",
        "PLACE",
    )
    threads: int | None = _option(None, _integer(1), "CPU threads.", "N")
    gpu_layers: int | None = _option(
        None, _integer(-1), "Layers on the GPU. Default: all, in a build for GPUs.", "N"
    )
    kv_type: str = _option("f16", _text, "Type of K[,V], such as q8_0 or q8_0,f16.", "TYPE")
    flash_attn: FlashAttention = _option(
        "auto", _choice("auto", "on", "off"), "Flash attention: auto, on, off.", "WHEN"
    )
    adapter: tuple[Adapter, ...] = _option(
        (), _adapters, "A LoRA adapter for the model; may be repeated.", "PATH[:SCALE]"
    )
    llama: tuple[tuple[str, object], ...] = _option(
        (),
        _parameters,
        "A parameter of llama.cpp's own, such as n_ubatch=1024; may be repeated.",
        "NAME=VALUE",
    )
    chat_template: Path | None = _option(
        None, _path, "A Jinja file instead of the model's own template.", "FILE"
    )

    cache_dir: Path = _option(DEFAULT_CACHE_DIR, _path, "Folder of the disk cache.", "FOLDER")
    memory_budget: int | None = _option(
        None, _size, "Memory for cached blocks. Default: a quarter of what is free.", "SIZE"
    )
    disk_budget: int | None = _option(
        None, _size, "Disk for cached blocks. Default: half of what is free, up to 64GiB.", "SIZE"
    )
    block_size: int = _option(256, _integer(64), "Tokens in a cached block.", "TOKENS")
    exact: bool = _option(
        False, _switch, "One request at a time, and a hit equals a cold run bit for bit."
    )

    store_days: int = _option(
        30, _integer(0, 36500), "How long stored responses can be had; 0: none are stored.", "DAYS"
    )
    store_budget: int = _option(1 << 30, _size, "Disk for stored responses.", "SIZE")
    volatile: Literal["on", "off"] | VolatileRules = _option(
        "on",
        _volatile,
        "Whether rules take volatile text out of prompts: on, off. Rules of one's own are for the "
        "configuration file.",
        "WHEN",
    )
    usage_file: Path | Literal["off"] | None = _option(
        None,
        _path_or_off,
        "File that gets a row for every request, or off. Default: usage.db in the cache dir.",
        "FILE",
    )
    usage_days: int | None = _option(
        None, _integer(1, 36500), "How long its rows are kept. Default: for ever.", "DAYS"
    )
    prices: Path | None = _option(
        None, _path, "A TOML file with prices, by which requests get a cost.", "FILE"
    )
    explain_memory: int = _option(
        64 << 20, _size, "Memory for prompts that misses are explained with; 0: none.", "SIZE"
    )

    queue_size: int = _option(256, _integer(0), "Requests that may wait for a place.", "N")
    max_body: int = _option(32 << 20, _size, "Largest body of a request.", "SIZE")
    strict_model: bool = _option(False, _switch, "Refuse model names other than the true one.")
    strict_max_tokens: bool = _option(
        False, _switch, "Refuse a max_tokens the context has no room for, instead of clamping it."
    )
    allow_host: tuple[str, ...] = _option(
        (), _texts, "A further name the server is called by, * for any; may be repeated.", "HOST"
    )
    allow_origin: tuple[str, ...] = _option(
        (), _texts, "An origin whose pages may call it, * for all; may be repeated.", "ORIGIN"
    )
    drain_seconds: int = _option(
        10, _integer(0, 3600), "How long requests may go on when the server is stopped.", "SECONDS"
    )

    places: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """What the options that were given are called where they were, by field name."""

    @property
    def profiles(self) -> Mapping[str, Profile]:
        """The profiles by name, with their settings."""
        return {**PROFILES, **{profile.name: profile for profile in self.rules}}

    @property
    def volatile_rules(self) -> VolatileRules:
        """The rules in force."""
        match self.volatile:
            case "on":
                return VolatileRules()
            case "off":
                return VolatileRules(built_in=())
        return self.volatile

    def settings(self) -> Settings:
        """The settings of the model and its cache.

        Raises :class:`~anaphora.errors.SettingsError` for values that can't work.
        """
        return Settings(
            cache_dir=self.cache_dir.expanduser(),
            memory_budget=self.memory_budget,
            disk_budget=self.disk_budget,
            block_size=self.block_size,
            exact=self.exact,
            context_size=self.ctx_size,
            engine=self.engine,
            parallel=self.parallel,
            threads=self.threads,
            gpu_layers=self.gpu_layers,
            kv_type=self.kv_type,
            flash_attn=self.flash_attn,
            chat_template=self.chat_template,
            adapters=self.adapter,
            llama=dict(self.llama),
        )

    def as_written(self, error: SettingsError) -> ConfigError:
        """``error`` in the words of whoever gave the option: ``--kv-type is 'q99': use ...``."""
        if error.setting is None:
            return ConfigError(error.problem)
        name = {"context_size": "ctx_size", "adapters": "adapter"}.get(error.setting, error.setting)
        place = self.places.get(name, f"--{spelled(name)}")
        return ConfigError(f"{place} {error.problem}")


FIELDS: Mapping[str, Field[Any]] = {
    item.name: item for item in fields(Config) if "option" in item.metadata
}
"""The options by name; ``metadata["option"]`` holds the :class:`Option`."""


def spelled(name: str) -> str:
    """A field's name as it is written in the file and, behind ``--``, on the command line."""
    return name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a field."""
    return _PREFIX + name.upper()


def load_config(
    given: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None
) -> Config:
    """The options from all places.

    ``given`` are those of the command line by field name; ``file`` is the TOML file, else
    ``ANAPHORA_CONFIG`` names it. An empty variable counts as not set, and one that belongs to no
    option is warned about only, since it may be somebody else's.

    :raises ConfigError: the file can't be read, it holds an unknown key, or a value is wrong.
    """
    if file is None and environ.get(_CONFIG):
        file = Path(environ[_CONFIG])
    found: dict[str, tuple[str, object]] = {}  # what it is called there, and its value
    if file is not None:
        found |= _from_file(file.expanduser())
    found |= _from_environment(environ)
    found |= {name: (f"--{spelled(name)}", value) for name, value in given.items()}
    values = {name: _parsed(name, *written) for name, written in found.items()}
    return Config(**values, places={name: place for name, (place, _) in found.items()})


def _from_file(path: Path) -> dict[str, tuple[str, object]]:
    try:
        with path.open("rb") as file:
            data = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"the configuration {path} can't be read ({error.strerror}): name a TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} is no TOML: {error}") from error
    known = {spelled(name): name for name in FIELDS}
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{key!r} in {path} is no option: {hint}")
    return {known[key]: (f"{key} in {path}", value) for key, value in data.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[str, object]]:
    names = {variable(name): name for name in FIELDS}
    for text in environ:
        if text.startswith(_PREFIX) and text not in names and text != _CONFIG:
            logger.warning("%s is set, but there is no such option", text)
    return {name: (text, environ[text]) for text, name in names.items() if environ.get(text)}


def _parsed(name: str, place: str, value: object) -> Any:
    option: Option = FIELDS[name].metadata["option"]
    try:
        return option.parse(value)
    except ValueError as error:
        shown = "wrong" if option.secret else repr(value)
        raise ConfigError(f"{place} is {shown}: {error}") from None
