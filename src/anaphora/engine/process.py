"""Runs an engine in a supervised child process, seen like one on a thread of this process.

llama.cpp aborts rather than raises on inner faults, and whatever kills it would kill the server. In
a process of its own it takes down nothing but the requests it works on; it is started again, and
finds what is cached on disk.
"""

from __future__ import annotations

import atexit
import logging
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from anaphora.cache.store import CacheStats
from anaphora.engine.host import Listener, Listeners
from anaphora.engine.llamacpp.load import load_vocabulary
from anaphora.engine.protocol import Done, EngineInfo, Failed, Request, Times
from anaphora.engine.worker import (
    AskStats,
    Cancel,
    Channel,
    Close,
    FromWorker,
    Load,
    LogLine,
    Ready,
    Refused,
    Stats,
    ToWorker,
)
from anaphora.errors import AnaphoraError, EngineError, UnavailableError
from anaphora.settings import Settings
from anaphora.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 30.0
"""Seconds between two attempts to start an engine that doesn't come up or dies at once."""


_PROGRAM = "import sys; from anaphora.engine import worker; sys.exit(worker.main(int(sys.argv[1])))"


class ProcessHost:
    """Owns the process that owns the engine. All methods may be called from any thread.

    When the process dies, what it worked on fails, and it is started again at once. Requests that
    arrive meanwhile wait for that.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        """Start the process; raises what :func:`load_engine` raises there."""
        self._path = path
        self._settings = settings
        self._lock = threading.Lock()
        self._listeners = Listeners()
        self._waiting: list[Request] = []
        """Arrived while there was no process to send them to."""
        self._stats_lock = threading.Lock()
        self._stats: CacheStats | None = None
        self._stats_changed = threading.Event()
        self._closing = threading.Event()
        self._problem: AnaphoraError | None = None
        """Why requests are refused: the engine is closed, or can't be started again."""
        self._served = False
        """Whether the present process has finished a request."""
        worker = _Worker(path, settings)
        try:
            try:
                self._vocabulary = load_vocabulary(path, settings)
            except AnaphoraError:
                worker.ready()  # which knows better what is wrong
                raise
            self.info: EngineInfo = worker.ready()
        except BaseException:
            worker.kill()
            raise
        self.vocabulary: Vocabulary = self._vocabulary
        self._worker: _Worker | None = worker
        self._thread = threading.Thread(
            target=self._supervise, args=(worker,), name="anaphora-supervisor", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        """Whether there is an engine at this moment."""
        return self._worker is not None and self._problem is None

    def submit(self, request: Request, listener: Listener) -> None:
        """Hand a request over. Its last event is Done or Failed, whatever happens."""
        with self._lock:
            error = self._problem or self._listeners.add(request.id, listener)
            if error is None:
                if self._worker is None:
                    self._waiting.append(request)
                else:
                    self._worker.send(request)
        if error is not None:
            listener(Failed(request.id, error))

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if self._worker is not None:
                self._worker.send(Cancel(request_id))
                return
            waited = [request for request in self._waiting if request.id == request_id]
            self._waiting = [request for request in self._waiting if request.id != request_id]
        for request in waited:
            done = Done(request.id, "cancelled", None, len(request.tokens), 0, 0, Times())
            self._listeners.deliver(done)

    def stats(self) -> CacheStats | None:
        """Counts and sizes of the engine's cache, since its process was started.

        Raises :class:`~anaphora.errors.EngineError` where there is no engine.
        """
        with self._stats_lock:
            self._stats_changed.clear()
            with self._lock:
                worker = self._worker
                if worker is None or self._problem is not None:
                    raise self._problem or UnavailableError("the engine is being started again")
                worker.send(AskStats())
            while not self._stats_changed.wait(0.5):
                if self._worker is not worker:
                    raise UnavailableError("the engine is being started again")
            return self._stats

    def close(self) -> None:
        """Cancel what runs, store what is not stored yet, and end the process.

        Called by a listener it can't wait for that, and returns at once.
        """
        atexit.unregister(self.close)
        with self._lock:
            self._closing.set()
            if self._worker is not None:
                self._worker.send(Close())
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._vocabulary.close()

    def _supervise(self, worker: _Worker) -> None:
        """Deliver what comes from the process, and start it again whenever it dies."""
        pause = 0.0
        while True:
            # Not on this thread: what the process answers to requests that waited has to be taken
            # from it while they are being sent.
            reader = threading.Thread(target=self._read, args=(worker,), daemon=True)
            reader.start()
            self._put_to_work(worker)
            reader.join()
            with self._lock:
                self._worker = None  # nothing is sent to it any more
            died = worker.death()
            with self._lock:
                if self._closing.is_set():
                    self._problem = EngineError("the engine is closed")
                lost = self._listeners.ids - {request.id for request in self._waiting}
            error = self._problem or UnavailableError(f"the engine {died}: send the request again")
            if self._problem is None:
                logger.error(
                    "the engine %s; it is started again, and %d requests fail", died, len(lost)
                )
            self._fail(lost, error)
            # One that dies before it has served anything is not tried again without a pause.
            pause = 0.0 if self._served else min(max(1.0, 2 * pause), _LONGEST_PAUSE)
            started = self._start_again(pause)
            if started is None:
                self._fail(self._listeners.ids, EngineError("the engine is closed"))
                return
            worker = started

    def _start_again(self, pause: float) -> _Worker | None:
        """A new process with its engine loaded; ``None``: the host was closed meanwhile."""
        self._served = False
        while not self._closing.wait(pause):
            worker = _Worker(self._path, self._settings)
            try:
                worker.ready()
            except AnaphoraError as error:
                worker.kill()
                pause = min(max(1.0, 2 * pause), _LONGEST_PAUSE)
                logger.error("the engine can't be started: %s; next try in %.0f s", error, pause)
                with self._lock:
                    self._problem = UnavailableError(f"the engine can't be started: {error}")
                    self._waiting.clear()
                    lost = self._listeners.ids
                self._fail(lost, self._problem)
                continue
            logger.warning("the engine is back")
            return worker
        with self._lock:
            self._problem = EngineError("the engine is closed")
        return None

    def _put_to_work(self, worker: _Worker) -> None:
        with self._lock:
            self._problem = None
            self._worker = worker
            for request in self._waiting:
                worker.send(request)
            self._waiting.clear()
            if self._closing.is_set():  # while the process was started
                worker.send(Close())

    def _read(self, worker: _Worker) -> None:
        while (message := worker.receive()) is not None:
            if isinstance(message, Stats):
                self._stats = message.stats
                self._stats_changed.set()
            elif isinstance(message, LogLine):
                message.write()
            elif not isinstance(message, Ready | Refused):
                self._served = self._served or isinstance(message, Done)
                self._listeners.deliver(message)

    def _fail(self, request_ids: set[str], error: AnaphoraError) -> None:
        for request_id in request_ids:
            self._listeners.deliver(Failed(request_id, error))


class _Worker:
    """One child process, from its start to its end."""

    def __init__(self, path: Path, settings: Settings) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: nothing in the working directory is imported instead of what is installed.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._channel = Channel(ours.detach())
        level = logging.getLogger("anaphora").getEffectiveLevel()
        self.send(Load(path, settings, level))

    def ready(self) -> EngineInfo:
        """Wait until the engine is loaded; raises why it is not."""
        while (message := self.receive()) is not None:
            if isinstance(message, LogLine):
                message.write()
            elif isinstance(message, Ready):
                return message.info
            elif isinstance(message, Refused):
                raise message.error
        raise EngineError(f"the engine {self.death()} while it loaded the model")

    def send(self, message: ToWorker) -> None:
        """Whether it arrives is seen by what comes back, or by the end."""
        with suppress(OSError):
            self._channel.send(message)

    def receive(self) -> FromWorker | None:
        """The next message; ``None``: there will be no more."""
        try:
            message: FromWorker = self._channel.receive()
        except (EOFError, OSError):
            return None
        return message

    def death(self) -> str:
        """Wait for the end, and say what it was."""
        self._channel.close()
        code = self._process.wait()
        if code < 0:
            return f"was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"ended with exit code {code}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._channel.close()
