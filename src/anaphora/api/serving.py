"""The asyncio face of the loaded model, and of those that may take its place."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from anaphora.answer.pieces import Call, Piece, merged
from anaphora.answer.reader import Reader
from anaphora.api.books import Books, Origin, Outcome
from anaphora.api.generation import Prepared
from anaphora.api.metrics import Metrics
from anaphora.cache.keys import Tokens
from anaphora.engine.protocol import Done, Event, Failed, Generated, Request, Started
from anaphora.errors import (
    AnaphoraError,
    EngineError,
    OverloadedError,
    ShuttingDownError,
    UnavailableError,
)
from anaphora.model import Model
from anaphora.roster import Choice, Roster

logger = logging.getLogger(__name__)

_LONGEST_RETRY = 60
_SETTLE_AFTER = 0.25
_MOST_UNSETTLED = 32


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer that is complete."""

    pieces: Sequence[Piece]
    started: Started
    done: Done
    reasoning_tokens: int
    """How many of its tokens are reasoning, markers included."""


class Alternative:
    """One of the answers to a request, as the engine makes it."""

    def __init__(self, request: Request, reader: Reader, waited: float = 0.0) -> None:
        """
        :param waited: seconds from the request's submission to this one's.
        """
        self.request = request
        self.waited = waited
        self.started: Started | None = None
        self.done: Done | None = None
        self.generated = 0
        """Tokens so far."""
        self.reasoning_tokens = 0
        """How many of them are reasoning."""
        self._reader = reader
        self._pieces: list[Piece] = []
        self._calls = 0
        self._given = 0
        """How many of the pieces were given out."""
        self._begun = self.over = False
        """Whether its start was given out, and its end."""
        self._error: AnaphoraError | None = None

    @property
    def ended(self) -> bool:
        return self.done is not None or self._error is not None

    @property
    def enough(self) -> bool:
        """Whatever is generated now is not part of the answer."""
        return self._reader.complete and not self.ended

    @property
    def pieces(self) -> list[Piece]:
        """What was answered so far."""
        return merged(self._pieces)

    def handle(self, event: Event) -> None:
        match event:
            case Started():
                self.started = event
            case Generated():
                self.generated += len(event.tokens)
                self._read(event)
            case Done():
                if event.reason == "cancelled" and self.enough:
                    event = replace(event, reason="end")
                self._add(self._reader.finish())
                self.done = event
            case Failed():
                self._error = event.error

    def news(self) -> list[Started | Piece | Done]:
        """What has happened since the last call. Raises what made it fail, once that is all."""
        news: list[Started | Piece | Done] = []
        if self.started is not None and not self._begun:
            self._begun = True
            news.append(self.started)
        news += merged(self._pieces[self._given :])
        self._given = len(self._pieces)
        if news or self.over:
            return news
        if self._error is not None:
            raise self._error
        if self.done is not None:
            if self.done.reason == "cancelled":
                raise ShuttingDownError("the answer was cut short: the server is stopping")
            self.over = True
            news.append(self.done)
        return news

    def _read(self, event: Generated) -> None:
        thinks = self._reader.thinking
        if event.text or event.logprobs:
            self._add(self._reader.feed(event.text, event.logprobs))
        if thinks or self._reader.thinking:
            self.reasoning_tokens += len(event.tokens)

    def _add(self, pieces: list[Piece]) -> None:
        """Calls that have no id of the model's get one."""
        for piece in pieces:
            if isinstance(piece, Call):
                own_id = piece.id or f"call_{self.request.id}_{self._calls}"
                piece = replace(piece, id=own_id)
                self._calls += 1
            self._pieces.append(piece)


class Answer:
    """A request in flight: iterate over :meth:`events`, and :meth:`close` it in any case.

    Where several alternatives are wanted, the first one's prompt is computed, and the others read
    it from the cache.
    """

    def __init__(
        self, serving: Serving, prepared: Prepared, origin: Origin, model: Model, name: str
    ) -> None:
        self.model = model
        self.model_name = name
        self.prepared = prepared
        self.request = prepared.request
        self.origin = origin
        self.alternatives = [Alternative(prepared.request, prepared.reader())]
        """Those the engine knows of."""
        self._serving = serving
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._submitted = perf_counter()
        self._closed = False

    @property
    def started(self) -> Started | None:
        return self.alternatives[0].started

    @property
    def done(self) -> Done | None:
        """The end, with the tokens of all alternatives; ``None``: not yet, or one has failed."""
        ends = [one.done for one in self.alternatives if one.done is not None]
        if len(ends) < len(self.alternatives):
            return None
        cut = any(end.reason == "cancelled" for end in ends)
        total = max(
            one.waited + end.times.total for one, end in zip(self.alternatives, ends, strict=True)
        )
        return replace(
            ends[0],
            reason="cancelled" if cut else ends[0].reason,
            computed_tokens=sum(end.computed_tokens for end in ends),
            generated_tokens=sum(end.generated_tokens for end in ends),
            times=replace(ends[0].times, total=total),
        )

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens so far are reasoning."""
        return sum(one.reasoning_tokens for one in self.alternatives)

    @property
    def outcome(self) -> Outcome:
        """What became of it, once it has ended."""
        seconds = perf_counter() - self._submitted
        generated = sum(one.generated for one in self.alternatives)
        counts = self.started, self.done, generated
        return Outcome(self.request, self.model_name, *counts, seconds)

    def submit(self) -> None:
        """Hand the latest alternative to the engine."""
        alternative = self.alternatives[-1]

        def receive(event: Event) -> None:
            """Called on the engine's thread."""
            with suppress(RuntimeError):  # the loop is closed: nobody is left who waits
                self._loop.call_soon_threadsafe(self._handle, alternative, event)

        self.model.host.submit(alternative.request, receive)

    async def events(self, heartbeat: float) -> AsyncIterator[Started | Piece | Done | None]:
        """What happens, in order: the start, pieces, the end. Texts that come fast are joined.

        ``None`` comes whenever nothing else did for ``heartbeat`` seconds. Raises what made the
        request fail.
        """
        async for _, event in self.choices(heartbeat):
            yield event

    async def choices(
        self, heartbeat: float
    ) -> AsyncIterator[tuple[int, Started | Piece | Done | None]]:
        """The same of all alternatives, with the number of the one that it happens to."""
        while True:
            news = [(n, event) for n, one in enumerate(self.alternatives) for event in one.news()]
            for numbered in news:
                yield numbered
            if not news:
                if not self._owed and all(one.over for one in self.alternatives):
                    return
                if not await self._wait(heartbeat):
                    yield 0, None

    async def whole(self) -> Finished:
        """The finished answer. Raises what made the request fail."""
        async for _ in self.events(_LONGEST_RETRY):
            pass
        if self.started is None or self.done is None:
            raise EngineError("the engine ended the request without an answer")
        return Finished(self.alternatives[0].pieces, self.started, self.done, self.reasoning_tokens)

    def close(self) -> None:
        """Cancel the request if it is still running. What was computed stays cached."""
        self._closed = True
        for one in self.alternatives:
            if not one.ended:
                self.model.host.cancel(one.request.id)

    @property
    def _owed(self) -> int:
        """How many alternatives the engine doesn't know of yet."""
        return self.prepared.generation.choices - len(self.alternatives)

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

    def _handle(self, alternative: Alternative, event: Event) -> None:
        alternative.handle(event)
        if isinstance(event, Started):
            if alternative is self.alternatives[0]:
                self._serving.begin(self)
        elif not isinstance(event, Failed) and not self._closed:
            # The prompt is computed, and in the cache.
            while self._owed:
                self._branch()
        if alternative.enough:
            self.model.host.cancel(alternative.request.id)
        if isinstance(event, Done | Failed) and all(one.ended for one in self.alternatives):
            self._serving.end(self)
        self._changed.set()

    def _branch(self) -> None:
        """Begin with another alternative."""
        number, request = len(self.alternatives), self.request
        seed = request.sampling.seed
        sampling = replace(request.sampling, seed=None if seed is None else seed + number)
        request = replace(request, id=f"{request.id}-{number}", sampling=sampling)
        waited = perf_counter() - self._submitted
        self.alternatives.append(Alternative(request, self.prepared.reader(), waited))
        self.submit()


class Serving:
    """Takes requests for the models of ``roster`` and sees them through.

    One model is loaded at a time. A request for another one waits until those before it are over,
    and those behind it wait until that model is loaded.

    :param max_waiting: how many may wait beside those the engine works on.
    :param books: where requests that reached the engine are kept.
    """

    def __init__(
        self, roster: Roster, *, max_waiting: int = 256, books: Books | None = None
    ) -> None:
        self.roster = roster
        self.books = books or Books()
        self.metrics = Metrics(roster.model.info, self.books.lost_rows)
        self._max_waiting = max_waiting
        self._waiting = 0
        self._running = 0
        self._answers: dict[str, Answer] = {}
        """Everything that the engine has not ended yet."""
        self._turnstile = asyncio.Lock()
        """Whoever needs a model passes here, in the order of arrival."""
        self._loading: asyncio.Task[None] | None = None
        self._users = 0
        """How many need the model that is loaded."""
        self._unused = asyncio.Event()
        self._unused.set()
        self._draining = False
        self._unsettled: deque[Answer] = deque(maxlen=_MOST_UNSETTLED)
        """Answers whose next turns are not prepared yet; the latest last."""
        self._settling: asyncio.Task[None] | None = None
        self._seconds = 1.0
        """How long a request takes, as a running mean."""

    @property
    def ready(self) -> bool:
        """Whether a request would be served now."""
        if self._draining or self._loading is not None or self.roster.loaded is None:
            return False
        return self.roster.model.host.alive

    @asynccontextmanager
    async def model(self, name: str | None) -> AsyncIterator[tuple[Model, str]]:
        """The model called ``name``, which stays loaded inside the context, and its name.

        For a name that no model has it is the one that is loaded. Raises what loading does, and
        :class:`~anaphora.errors.ShuttingDownError`.
        """
        async with self._turnstile:
            if self._loading is not None:  # for somebody who left
                await asyncio.shield(self._loading)
            choice = self.roster.find(name)
            if choice != self.roster.loaded:
                self._unsettle()
                self._unsettled.clear()
                await self._unused.wait()
                self._refuse_when_draining()
                self._loading = asyncio.create_task(self._load(choice))
                await asyncio.shield(self._loading)
            self._refuse_when_draining()
            self._use(+1)
        try:
            yield self.roster.model, choice.name
        finally:
            self._use(-1)

    async def _load(self, choice: Choice) -> None:
        try:
            await asyncio.to_thread(self.roster.load, choice)
        except AnaphoraError as error:  # it names files, which are not the client's business
            logger.error("%s can't be loaded: %s", choice.name, error)
            raise UnavailableError(
                f"the model {choice.name!r} can't be loaded: see the server's log"
            ) from error
        finally:
            self._loading = None
            if self.roster.loaded is not None:
                self.metrics.show(self.roster.model.info)

    def _use(self, change: int) -> None:
        self._users += change
        if self._users:
            self._unused.clear()
        else:
            self._unused.set()

    @property
    def _places(self) -> int:
        """How many requests the engine works on at once."""
        if self.roster.loaded is None:
            return 1
        model = self.roster.model
        one_at_a_time = model.settings.exact or not model.info.caching
        return 1 if one_at_a_time else model.settings.parallel

    def admit(self) -> None:
        """Make sure there is a place for another request.

        Raises :class:`~anaphora.errors.OverloadedError` and
        :class:`~anaphora.errors.ShuttingDownError`.
        """
        self._refuse_when_draining()
        if self._waiting + self._running >= self._places + self._max_waiting:
            raise OverloadedError(self._waiting, self._retry_after())

    async def submit(
        self,
        prepare: Callable[[Model], Prepared],
        *,
        origin: Origin,
        model: str | None,
        quick: bool,
    ) -> Answer:
        """Hand what ``prepare`` makes for the model called ``model`` to the engine.

        ``prepare`` runs on another thread, unless it is ``quick``: then the way there and back
        would take longer than the work.

        Raises what :meth:`admit`, :meth:`model` and ``prepare`` raise.
        """
        tenant = origin.tenant.name
        self.admit()
        self._unsettle()
        self._queue(tenant, +1)
        try:
            async with self.model(model) as (loaded, name):
                prepared = prepare(loaded) if quick else await asyncio.to_thread(prepare, loaded)
                answer = Answer(self, prepared, origin, loaded, name)
                self._use(+1)
        except BaseException:
            self._queue(tenant, -1)
            if not self._users:
                self._settle()
            raise
        self._answers[answer.request.id] = answer
        self._forget_turns_before(answer.request.tokens)
        answer.submit()
        return answer

    def begin(self, answer: Answer) -> None:
        """The engine has begun with ``answer``."""
        origin, started = answer.origin, answer.started
        self._queue(origin.tenant.name, -1)
        self._run(origin.tenant.name, +1)
        if started is not None:
            self.metrics.count_prompt(origin.tenant.name, started)
            self.books.begin(origin, answer.prepared, answer.model_name, started)

    def end(self, answer: Answer) -> None:
        """The engine is done with ``answer``."""
        tenant = answer.origin.tenant.name
        if answer.started is None:
            self._queue(tenant, -1)
        else:
            self._run(tenant, -1)
        if (done := answer.done) is not None:
            self.metrics.count_answer(tenant, done)
            self._seconds += (done.times.total - self._seconds) / 8
        self.books.end(answer.origin, answer.outcome, answer.model.vocabulary)
        del self._answers[answer.request.id]
        self._use(-1)
        if done is not None and done.reason != "cancelled":
            self._unsettled.append(answer)
        if not self._users:
            self._settle()

    async def drain(self, grace: float) -> None:
        """Take no more requests, and return when those in flight are over.

        After ``grace`` seconds what still runs is ended with an error.
        """
        self._draining = True
        self._unsettle()
        try:
            await asyncio.wait_for(self._unused.wait(), grace)
        except TimeoutError:
            for answer in list(self._answers.values()):
                answer.close()
            await self._unused.wait()
        if self._loading is not None:
            await asyncio.wait([self._loading])

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise ShuttingDownError("the server is stopping: try again later")

    def _settle(self) -> None:
        """Prepare the next turns of conversations, if nobody wants anything for a while.

        The next request ends that, and they go on when there is time again. The latest come first,
        and the oldest are forgotten: what there is no idle time for must not pile up.
        """
        self._unsettle()
        if not self._draining:
            self._settling = asyncio.create_task(self._settle_turns())

    async def _settle_turns(self) -> None:
        await asyncio.sleep(_SETTLE_AFTER)
        while self._unsettled:
            answer = self._unsettled[-1]
            try:
                await self._next_turn(answer)
            except Exception:
                logger.exception("the next turn of %s can't be prepared", answer.origin.id)
            with suppress(ValueError):  # so many came since that it is forgotten
                self._unsettled.remove(answer)

    def _forget_turns_before(self, tokens: Tokens) -> None:
        """What goes on now, with a prompt of ``tokens``, needs no preparing any more."""
        for answer in list(self._unsettled):
            before = answer.request.tokens
            if np.array_equal(before, tokens[: len(before)]):
                self._unsettled.remove(answer)

    def _unsettle(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None

    async def _next_turn(self, answer: Answer) -> None:
        first = answer.alternatives[0]
        request = await asyncio.to_thread(answer.prepared.next_turn, first.pieces)
        if request is None:
            return
        over = asyncio.Event()
        loop = asyncio.get_running_loop()

        def listen(event: Event) -> None:
            if isinstance(event, Done | Failed):
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(over.set)

        answer.model.host.submit(request, listen)
        try:
            await over.wait()
        except asyncio.CancelledError:
            answer.model.host.cancel(request.id)
            raise

    def _queue(self, tenant: str, change: int) -> None:
        self._waiting += change
        self.metrics.count_waiting(tenant, change)

    def _run(self, tenant: str, change: int) -> None:
        self._running += change
        self.metrics.count_running(tenant, change)

    def _retry_after(self) -> int:
        """Seconds until those that wait now should have begun."""
        seconds = math.ceil(self._seconds * self._waiting / self._places)
        return min(max(1, seconds), _LONGEST_RETRY)
