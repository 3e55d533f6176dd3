"""Runs an engine on a thread of its own and routes its events to whoever submitted the request."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from anaphora.cache.store import CacheStats
from anaphora.engine.protocol import Done, Emit, Engine, EngineInfo, Event, Failed, Request
from anaphora.errors import AnaphoraError, EngineError
from anaphora.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

Listener = Callable[[Event], None]
"""Called on the engine's thread with every event of one request; it must return at once."""


class Listeners:
    """Who hears of which request that runs."""

    def __init__(self) -> None:
        self._by_id: dict[str, Listener] = {}

    @property
    def ids(self) -> set[str]:
        return set(self._by_id)

    def add(self, request_id: str, listener: Listener) -> EngineError | None:
        """``None``, or why that can't be."""
        if request_id in self._by_id:
            return EngineError(f"a request {request_id!r} is running: use another id")
        self._by_id[request_id] = listener
        return None

    def deliver(self, event: Event) -> None:
        """Tell whom it concerns; the last event of a request ends its hearing."""
        if isinstance(event, Done | Failed):
            listener = self._by_id.pop(event.id, None)
        else:
            listener = self._by_id.get(event.id)
        if listener is not None:
            try:
                listener(event)
            except Exception:  # one listener's fault is no other's
                logger.exception("a listener failed")


class Host(Protocol):
    """Where an engine runs. All methods may be called from any thread."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def alive(self) -> bool:
        """Whether requests are served now."""
        ...

    def submit(self, request: Request, listener: Listener) -> None:
        """Hand a request over. Its last event is Done or Failed, whatever happens."""
        ...

    def cancel(self, request_id: str) -> None: ...

    def stats(self) -> CacheStats | None:
        """Counts and sizes of the engine's cache; ``None`` where it has none.

        Raises :class:`~anaphora.errors.EngineError` where there is no engine.
        """
        ...

    def close(self) -> None:
        """Cancel what runs, store what is not stored yet, and end the engine."""
        ...


class EngineHost:
    """Owns the thread that owns the engine. All methods may be called from any thread."""

    def __init__(self, make_engine: Callable[[Emit], Engine]) -> None:
        """Start the thread and make the engine on it; raises what ``make_engine`` raises."""
        self._inbox: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._listeners = Listeners()
        self._ready: queue.SimpleQueue[Engine | BaseException] = queue.SimpleQueue()
        self._dead: AnaphoraError | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, args=(make_engine,), name="anaphora-engine", daemon=True
        )
        self._thread.start()
        engine = self._ready.get()
        if isinstance(engine, BaseException):
            self._thread.join()
            raise engine
        atexit.register(self.close)  # a program that just ends keeps what it computed, too
        self.info: EngineInfo = engine.info
        self.vocabulary: Vocabulary = engine.vocabulary

    @property
    def alive(self) -> bool:
        """Whether requests are served; for good once it is not."""
        return self._dead is None

    def submit(self, request: Request, listener: Listener) -> None:
        """Hand a request over. Its last event is Done or Failed, whatever happens."""
        with self._lock:
            error = self._dead or self._listeners.add(request.id, listener)
            if error is None:
                self._inbox.put(lambda engine: engine.submit(request))
        if error is not None:
            listener(Failed(request.id, error))

    def cancel(self, request_id: str) -> None:
        self._inbox.put(lambda engine: engine.cancel(request_id))

    def stats(self) -> CacheStats | None:
        """Counts and sizes of the engine's cache.

        Raises :class:`~anaphora.errors.EngineError` where the engine is closed.
        """
        answer: queue.SimpleQueue[CacheStats | None] = queue.SimpleQueue()
        with self._lock:
            if self._dead is not None:
                raise self._dead
            self._inbox.put(lambda engine: answer.put(engine.stats()))
        while True:
            try:
                return answer.get(timeout=0.5)
            except queue.Empty:
                if self._dead is not None:  # it ended before it came to this
                    raise self._dead from None

    def close(self) -> None:
        """Cancel what runs, store what is not stored yet, and end the thread.

        Called by a listener it can't wait for that, and returns at once.
        """
        atexit.unregister(self.close)
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def join(self) -> None:
        """Wait for the end of the thread, which :meth:`close` or a failure brings."""
        self._thread.join()

    def _run(self, make_engine: Callable[[Emit], Engine]) -> None:
        try:
            engine = make_engine(self._listeners.deliver)
        except BaseException as error:
            self._ready.put(error)
            return
        self._ready.put(engine)
        try:
            self._serve(engine)
            self._die(EngineError("the engine is closed"))
        except Exception:
            logger.exception("the engine stopped on an unexpected error")
            self._die(
                EngineError("the engine stopped on an unexpected error: load the model again")
            )
            self._fail_all()  # closing would tell them that they were cancelled
        try:
            engine.close()
        except Exception:
            logger.exception("the engine did not close cleanly")
        self._fail_all()

    def _die(self, error: AnaphoraError) -> None:
        """From now on every new request fails with ``error``."""
        with self._lock:
            self._dead = error

    def _fail_all(self) -> None:
        assert self._dead is not None
        for request_id in self._listeners.ids:
            self._listeners.deliver(Failed(request_id, self._dead))

    def _serve(self, engine: Engine) -> None:
        wait: float | None = 0.0
        while True:
            try:
                while True:
                    block = wait is None or wait > 0
                    message = self._inbox.get(block=block, timeout=wait if block else None)
                    if message is None:
                        return
                    message(engine)
                    wait = 0.0
            except queue.Empty:
                wait = engine.step()
