"""Drives an engine step by step on the test's own thread and clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from anaphora.cache.keys import Tokens
from anaphora.clock import ManualClock
from anaphora.engine.protocol import (
    GREEDY,
    CacheHints,
    Done,
    Emit,
    Engine,
    Event,
    Failed,
    Found,
    Generated,
    Grammar,
    Request,
    Sampling,
    Started,
    TokenLogprob,
)

T = TypeVar("T")
_ids = count(1)


@dataclass
class Result:
    """All events of one request."""

    request: Request
    events: list[Event] = field(default_factory=list)

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def ended(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Done | Failed)

    @property
    def started(self) -> Started:
        (event,) = self.of(Started)
        return event

    @property
    def found(self) -> Found:
        return self.started.found

    @property
    def done(self) -> Done:
        last = self.events[-1]
        if isinstance(last, Failed):
            raise last.error
        assert isinstance(last, Done)
        return last

    @property
    def logits(self) -> NDArray[np.float32]:
        logits = self.done.prompt_logits
        assert logits is not None
        return logits

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.of(Generated) for token in event.tokens]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.of(Generated))

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [one for event in self.of(Generated) for one in event.logprobs]


class Driver:
    """Owns an engine made by ``make(emit, clock)``."""

    def __init__(self, make: Callable[[Emit, ManualClock], Engine]) -> None:
        self.clock = ManualClock()
        self._results: dict[str, Result] = {}
        self._closed = False
        self.engine = make(self._route, self.clock)

    def _route(self, event: Event) -> None:
        if event.id in self._results:
            self._results[event.id].events.append(event)

    def submit(
        self,
        tokens: Iterable[int] | Tokens,
        max_tokens: int = 8,
        *,
        sampling: Sampling = GREEDY,
        cache: CacheHints = CacheHints(),  # noqa: B008 - frozen
        background: bool = False,
        want_logits: bool = False,
        grammar: Grammar | None = None,
        logprobs: int | None = None,
        shown: Mapping[int, bytes] | None = None,
    ) -> Result:
        array = np.array(tokens, dtype=np.int32)
        name = f"r{next(_ids)}"
        request = Request(
            name,
            array,
            max_tokens,
            sampling,
            cache,
            background,
            want_logits,
            grammar,
            shown=shown or {},
            logprobs=logprobs,
        )
        result = self._results[name] = Result(request)
        self.engine.submit(request)
        return result

    def wait(self, *results: Result) -> None:
        """Step until these requests have ended."""
        for _ in range(100_000):
            if all(result.ended for result in results):
                return
            self.engine.step()
        raise AssertionError("the requests don't end")

    def run(
        self,
        tokens: Iterable[int] | Tokens,
        max_tokens: int = 8,
        *,
        sampling: Sampling = GREEDY,
        cache: CacheHints = CacheHints(),  # noqa: B008 - frozen
        want_logits: bool = False,
        grammar: Grammar | None = None,
        logprobs: int | None = None,
        shown: Mapping[int, bytes] | None = None,
    ) -> Result:
        """Submit one request and step until it has ended."""
        result = self.submit(
            tokens,
            max_tokens,
            sampling=sampling,
            cache=cache,
            want_logits=want_logits,
            grammar=grammar,
            logprobs=logprobs,
            shown=shown,
        )
        self.wait(result)
        return result

    def idle(self) -> None:
        """Do all idle work there is, as time goes by."""
        for _ in range(100_000):
            wait = self.engine.step()
            if wait is None:
                return
            self.clock.advance(wait)
        raise AssertionError("the engine does not come to rest")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.engine.close()
