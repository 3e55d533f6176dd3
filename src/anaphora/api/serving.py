"""The asyncio face of a loaded model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

from anaphora.api.generation import Prepared
from anaphora.api.metrics import Metrics
from anaphora.engine.protocol import Done, Event, Failed, Generated, Started
from anaphora.errors import AnaphoraError, EngineError, OverloadedError, ShuttingDownError
from anaphora.model import Model

_LONGEST_RETRY = 60
_SETTLE_AFTER = 0.25


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer that is complete."""

    text: str
    started: Started
    done: Done


class Answer:
    """A request in flight: iterate over :meth:`events`, and :meth:`close` it in any case."""

    def __init__(self, serving: Serving, prepared: Prepared) -> None:
        self.request = prepared.request
        self.next_turn = prepared.next_turn
        self.started: Started | None = None
        self.done: Done | None = None
        self._serving = serving
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._texts: list[str] = []
        self._given = 0
        """How many of the texts were given out."""
        self._error: AnaphoraError | None = None

    @property
    def ended(self) -> bool:
        return self.done is not None or self._error is not None

    @property
    def text(self) -> str:
        """What was generated so far."""
        return "".join(self._texts)

    def receive(self, event: Event) -> None:
        """Called on the engine's thread with every event."""
        with suppress(RuntimeError):  # the loop is closed: nobody is left who waits
            self._loop.call_soon_threadsafe(self._handle, event)

    async def events(self, heartbeat: float) -> AsyncIterator[Started | str | Done | None]:
        """What happens, in order: the start, texts, the end. Texts that come fast are joined.

        ``None`` comes whenever nothing else did for ``heartbeat`` seconds. Raises what made the
        request fail.
        """
        announced = False
        while True:
            if self.started is not None and not announced:
                announced = True
                yield self.started
            elif self._given < len(self._texts):
                text = "".join(self._texts[self._given :])
                self._given = len(self._texts)
                yield text
            elif self._error is not None:
                raise self._error
            elif self.done is not None:
                if self.done.reason == "cancelled":
                    raise ShuttingDownError("the answer was cut short: the server is stopping")
                yield self.done
                return
            elif not await self._wait(heartbeat):
                yield None

    async def whole(self) -> Finished:
        """The finished answer. Raises what made the request fail."""
        async for _ in self.events(_LONGEST_RETRY):
            pass
        if self.started is None or self.done is None:
            raise EngineError("the engine ended the request without an answer")
        return Finished(self.text, self.started, self.done)

    def close(self) -> None:
        """Cancel the request if it is still running. What was computed stays cached."""
        self._serving.leave(self)

    async def _wait(self, seconds: float) -> bool:
        """Wait for an event; False: none came in time."""
        self._changed.clear()
        late = False

        def ring() -> None:
            nonlocal late
            late = True
            self._changed.set()

        timer = self._loop.call_later(seconds, ring)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()
        return not late

    def _handle(self, event: Event) -> None:
        match event:
            case Started():
                self.started = event
                self._serving.begin(self)
            case Generated():
                if event.text:
                    self._texts.append(event.text)
            case Done():
                self.done = event
                self._serving.end(self)
            case Failed():
                self._error = event.error
                self._serving.end(self)
        self._changed.set()


class Serving:
    """Takes requests for one model and sees them through.

    :param max_waiting: how many may wait beside those the engine works on.
    """

    def __init__(self, model: Model, *, max_waiting: int = 256) -> None:
        self.model = model
        self.metrics = Metrics(model.info)
        one_at_a_time = model.settings.exact or not model.info.caching
        self._places = 1 if one_at_a_time else model.settings.parallel
        self._max_waiting = max_waiting
        self._waiting = 0
        self._running = 0
        self._answers: dict[str, Answer] = {}
        """Everything that the engine has not ended yet."""
        self._empty = asyncio.Event()
        self._empty.set()
        self._draining = False
        self._settling: asyncio.Task[None] | None = None
        self._seconds = 1.0
        """How long a request takes, as a running mean."""

    @property
    def ready(self) -> bool:
        return not self._draining and self.model.host.alive

    def admit(self) -> None:
        """Make sure there is a place for another request.

        Raises :class:`~anaphora.errors.OverloadedError` and
        :class:`~anaphora.errors.ShuttingDownError`.
        """
        if self._draining:
            raise ShuttingDownError("the server is stopping: try again later")
        if self._waiting + self._running >= self._places + self._max_waiting:
            raise OverloadedError(self._waiting, self._retry_after())

    async def submit(self, prepare: Callable[[], Prepared], *, quick: bool) -> Answer:
        """Hand what ``prepare`` returns to the engine.

        It runs on another thread, unless it is ``quick``: then the way there and back would take
        longer than the work.

        Raises what :meth:`admit` and ``prepare`` raise.
        """
        self.admit()
        self._unsettle()
        self._queue(+1)
        try:
            prepared = prepare() if quick else await asyncio.to_thread(prepare)
        except BaseException:
            self._queue(-1)
            raise
        answer = Answer(self, prepared)
        self._answers[answer.request.id] = answer
        self._empty.clear()
        self.model.host.submit(answer.request, answer.receive)
        return answer

    def begin(self, answer: Answer) -> None:
        """The engine has begun with ``answer``."""
        self._queue(-1)
        self._run(+1)
        if answer.started is not None:
            self.metrics.count_prompt(answer.started)

    def end(self, answer: Answer) -> None:
        """The engine is done with ``answer``."""
        if answer.started is None:
            self._queue(-1)
        else:
            self._run(-1)
        if answer.done is not None:
            self.metrics.count_answer(answer.done)
            self._seconds += (answer.done.times.total - self._seconds) / 8
        del self._answers[answer.request.id]
        if not self._answers:
            self._empty.set()
            if answer.done is not None and answer.done.reason != "cancelled":
                self._settle(answer)

    def leave(self, answer: Answer) -> None:
        """Nobody waits for ``answer`` any more."""
        if not answer.ended:
            self.model.host.cancel(answer.request.id)

    async def drain(self, grace: float) -> None:
        """Take no more requests, and return when those in flight are over.

        After ``grace`` seconds what still runs is ended with an error.
        """
        self._draining = True
        self._unsettle()
        try:
            await asyncio.wait_for(self._empty.wait(), grace)
        except TimeoutError:
            for request_id in list(self._answers):
                self.model.host.cancel(request_id)
            await self._empty.wait()

    def _settle(self, answer: Answer) -> None:
        """Prepare the next turn of ``answer``'s conversation, if nobody wants anything for a while.

        The next request ends that: it may be the next turn already, and what the engine can't get
        to in idle time must not pile up.
        """
        self._unsettle()
        if not self._draining:
            self._settling = asyncio.create_task(self._next_turn(answer))

    def _unsettle(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None

    async def _next_turn(self, answer: Answer) -> None:
        await asyncio.sleep(_SETTLE_AFTER)
        request = await asyncio.to_thread(answer.next_turn, answer.text)
        if request is None:
            return
        over = asyncio.Event()
        loop = asyncio.get_running_loop()

        def listen(event: Event) -> None:
            if isinstance(event, Done | Failed):
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(over.set)

        self.model.host.submit(request, listen)
        try:
            await over.wait()
        except asyncio.CancelledError:
            self.model.host.cancel(request.id)
            raise

    def _queue(self, change: int) -> None:
        self._waiting += change
        self.metrics.waiting.set(self._waiting)

    def _run(self, change: int) -> None:
        self._running += change
        self.metrics.running.set(self._running)

    def _retry_after(self) -> int:
        """Seconds until those that wait now should have begun."""
        seconds = math.ceil(self._seconds * self._waiting / self._places)
        return min(max(1, seconds), _LONGEST_RETRY)
