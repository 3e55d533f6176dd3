"""Every setting of a model and its cache, in one object."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Literal, NoReturn

from anaphora.errors import SettingsError

DEFAULT_CACHE_DIR = Path("~/.cache/anaphora")

MOST_THREADS = 512
"""llama.cpp's own limit."""

FlashAttention = Literal["auto", "on", "off"]
EnginePlace = Literal["thread", "process"]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter applied for as long as the model is loaded."""

    path: Path
    scale: float = 1.0

    def __post_init__(self) -> None:
        number = isinstance(self.scale, int | float) and math.isfinite(self.scale)
        if not isinstance(self.path, Path) or not number:
            raise SettingsError(f"{self!r}: use a pathlib.Path and a number")


@dataclass(frozen=True, slots=True)
class Settings:
    """Defaults need no thought; ``None`` means: chosen from what the machine and the model are."""

    cache_dir: Path | None = DEFAULT_CACHE_DIR
    """Folder of the disk tier; ``None``: memory only."""
    memory_budget: int | None = None
    """Bytes of the memory tier. Default: a quarter of the memory available at start. With a disk
    tier it has room for 8 blocks at least, which pass through it.
    """
    disk_budget: int | None = None
    """Bytes of the disk tier, for this model. Default: half of the space that is free or its
    own already, at most 64 GiB.
    """
    block_size: int = 256
    """Tokens per cached block; a multiple of 64."""
    exact: bool = False
    """One request at a time, and a hit's logits equal a cold run's bit for bit."""
    context_size: int | None = None
    """Tokens one sequence can hold. Default: what the model was trained for, if memory allows."""
    engine: EnginePlace = "thread"
    """Where llama.cpp runs: on a ``thread`` of this process, or in a ``process`` of its own, which
    is started again when it dies."""
    parallel: int = 4
    """Requests computed at the same time."""
    reserve_tokens: int = 1024
    """Cells set aside for an answer at the start; longer answers grow in steps."""
    threads: int | None = None
    gpu_layers: int | None = None
    """Layers on the GPU. Default: all of them in a build that can, none in one that can't."""
    kv_type: str = "f16"
    """``K[,V]``, for example ``q8_0`` or ``q8_0,f16``."""
    flash_attn: FlashAttention = "auto"
    """``auto``: on with a GPU, off on the CPU. Part of the cache's identity: it changes layout."""
    chat_template: Path | None = None
    """A Jinja file used instead of the model's own template."""
    adapters: tuple[Adapter, ...] = ()
    llama: Mapping[str, object] = field(default_factory=dict)
    """llama.cpp's own model and context parameters by name, passed through."""

    def __post_init__(self) -> None:
        for name in ("block_size", "parallel", "reserve_tokens"):
            self._expect(name, int, "an integer")
        for name in ("memory_budget", "disk_budget", "context_size", "threads", "gpu_layers"):
            self._expect(name, (int, NoneType), "an integer or None")
        for name in ("cache_dir", "chat_template"):
            self._expect(name, (Path, NoneType), "a pathlib.Path or None")
        self._expect("exact", bool, "True or False")
        self._expect("kv_type", str, "a text, for example 'f16'")
        self._expect("adapters", tuple, "a tuple of Adapter")
        self._expect("llama", Mapping, "a dict of llama.cpp parameters")
        if not all(isinstance(adapter, Adapter) for adapter in self.adapters):
            self._refuse("adapters", "a tuple of Adapter")
        if self.block_size < 64 or self.block_size % 64:
            self._refuse("block_size", "a multiple of 64, for example 256")
        if self.parallel < 1:
            self._refuse("parallel", "1 or more")
        if self.context_size is not None and self.context_size < 64:
            self._refuse("context_size", "64 or more tokens")
        if self.reserve_tokens < 1:
            self._refuse("reserve_tokens", "1 or more")
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            self._refuse("threads", f"1 to {MOST_THREADS}")
        if self.flash_attn not in ("auto", "on", "off"):
            self._refuse("flash_attn", "auto, on or off")
        if self.engine not in ("thread", "process"):
            self._refuse("engine", "thread or process")
        for name in ("memory_budget", "disk_budget"):
            budget = getattr(self, name)
            if budget is not None and budget < 0:
                self._refuse(name, "0 or more bytes")

    def _expect(self, name: str, kind: type | tuple[type, ...], what: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self._refuse(name, what)

    def _refuse(self, name: str, what: str) -> NoReturn:
        raise SettingsError(f"is {getattr(self, name)!r}: use {what}", setting=name)
