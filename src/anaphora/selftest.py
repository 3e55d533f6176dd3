"""``anaphora selftest``: does a restored prompt give the logits of a computed one?

A document is read cold, then again from every place the cache can have it: the engine's own cells,
memory, and, from a newly loaded model, disk. Each time the logits behind the prompt are compared
with the cold run's.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from anaphora.bundled import load_test_document
from anaphora.cache.keys import Tokens
from anaphora.engine.host import EngineHost
from anaphora.engine.llamacpp.load import load_engine
from anaphora.engine.protocol import Done, Event, Failed, Found, Request, Started
from anaphora.errors import EngineError
from anaphora.prompt.tokens import encode_text
from anaphora.scratch import scratch_folder
from anaphora.settings import Settings

Say = Callable[[str], None]
Logits = NDArray[np.float32]

_CONTEXT = 2048
_PROMPT = 1500
"""Tokens: some blocks and a tail, and a tail off every grid."""
_ENOUGH = 0.9
"""The part of the prompt a hit must at least find."""
_NEAR = 0.1
"""How far a hit may be from the cold run, as a part of how far another document is."""


@dataclass(frozen=True, slots=True)
class Check:
    """One way to get the prompt's beginning, and what came of it."""

    mode: str
    """``exact`` or ``default``."""
    source: str
    """``cells``, ``memory`` or ``disk``."""
    prompt_tokens: int
    reused_tokens: int
    seconds: float
    """Time to first token."""
    difference: float
    """Largest difference of a logit from the cold run's."""
    other: float
    """The same for a cold run on another document, as a measure."""
    must_equal: bool
    """Whether equality bit for bit is promised."""

    @property
    def limit(self) -> float:
        """The largest difference that is right."""
        return 0.0 if self.must_equal else _NEAR * self.other

    @property
    def passed(self) -> bool:
        found = self.reused_tokens >= _ENOUGH * self.prompt_tokens
        return found and self.other > 0 and self.difference <= self.limit


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    kind: str
    caching: bool
    """Without it there is nothing to check."""
    cold_seconds: float
    """Time to first token of the cold run."""
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def run(path: Path, cache_dir: Path, settings: Settings, say: Say) -> Report:
    """Check the model at ``path`` with ``settings``, in the exact mode and in the default one.

    Blocks go to a folder of this run's own inside ``cache_dir``. Raises what loading a model does.
    """
    checks: list[Check] = []
    report = None
    for exact in (False, True):
        with scratch_folder(cache_dir, "selftest") as folder:
            used = replace(
                settings,
                cache_dir=folder,
                disk_budget=None,
                context_size=_CONTEXT,
                parallel=1,
                exact=exact,
            )
            report = _run(path, used, say)
            checks += report.checks
            if not report.caching:
                break
    assert report is not None
    return replace(report, checks=tuple(checks))


@dataclass(frozen=True, slots=True)
class _Answer:
    found: Found
    seconds: float
    logits: Logits


def _run(path: Path, settings: Settings, say: Say) -> Report:
    mode = "exact" if settings.exact else "default"
    say("loading the model")
    with _loaded(path, settings) as host:
        info = host.info
        if not info.caching:
            return Report(info.model, info.kind, False, 0.0, ())
        size = min(_PROMPT, info.context_size * 3 // 4)
        text = encode_text(host.vocabulary, load_test_document())
        prompt, other = text[:size], text[size : 2 * size]
        say(f"{mode}: reading {size:,} tokens cold")
        cold = _ask(host, "cold", prompt)
        hits = {"cells": _ask(host, "cells", prompt)}
        say(f"{mode}: reading another document")
        foreign = _ask(host, "other", other)  # and there is no room for both in the cells
        hits["memory"] = _ask(host, "memory", prompt)
    say("loading the model again")
    with _loaded(path, settings) as host:
        hits["disk"] = _ask(host, "disk", prompt)
    on_cpu = not lib.llama_supports_gpu_offload() or settings.gpu_layers == 0
    checks = [
        Check(
            mode,
            source,
            size,
            _found(hit.found, source),
            hit.seconds,
            _distance(hit.logits, cold.logits),
            _distance(foreign.logits, cold.logits),
            must_equal=settings.exact and on_cpu,
        )
        for source, hit in hits.items()
    ]
    return Report(info.model, info.kind, True, cold.seconds, tuple(checks))


@contextmanager
def _loaded(path: Path, settings: Settings) -> Iterator[EngineHost]:
    host = EngineHost(lambda emit: load_engine(path, settings, emit))
    try:
        yield host
    finally:
        host.close()


def _ask(host: EngineHost, name: str, tokens: Tokens) -> _Answer:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    host.submit(Request(name, tokens, max_tokens=1, want_logits=True), events.put)
    found = Found()
    while True:
        match events.get():
            case Started(found=found):
                pass
            case Failed(error=error):
                raise error
            case Done(prompt_logits=logits, times=times):
                if logits is None:
                    raise EngineError("the engine ended the request without logits")
                return _Answer(found, times.first_token, logits)


def _found(found: Found, source: str) -> int:
    """Tokens that came from where they should."""
    return {"cells": found.live, "memory": found.memory, "disk": found.disk}[source]


def _distance(left: Logits, right: Logits) -> float:
    """Largest difference; infinite where one has no number."""
    distance = float(np.max(np.abs(left - right)))
    return distance if np.isfinite(distance) else float("inf")
