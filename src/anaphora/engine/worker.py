"""The child process of :class:`~anaphora.engine.process.ProcessHost`, and what is said to it.

Messages are pickled over a socket pair, one for each request and event as they come.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from anaphora.cache.store import CacheStats
from anaphora.engine.host import EngineHost
from anaphora.engine.protocol import EngineInfo, Event, Request
from anaphora.errors import AnaphoraError, EngineError
from anaphora.settings import Settings


@dataclass(frozen=True, slots=True)
class Load:
    """The first message: the model to load."""

    path: Path
    settings: Settings
    log_level: int


@dataclass(frozen=True, slots=True)
class Cancel:
    id: str


@dataclass(frozen=True, slots=True)
class AskStats:
    pass


@dataclass(frozen=True, slots=True)
class Close:
    """Store what is not stored yet, and end."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Refused:
    """The model can't be loaded."""

    error: AnaphoraError


@dataclass(frozen=True, slots=True)
class Stats:
    stats: CacheStats | None


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log record of the child."""

    logger: str
    level: int
    text: str

    def write(self) -> None:
        """Log it in this process."""
        logging.getLogger(self.logger).log(self.level, "%s", self.text)


ToWorker = Load | Request | Cancel | AskStats | Close
FromWorker = Ready | Refused | Event | Stats | LogLine


class _Forward(logging.Handler):
    """Hands log records to the parent."""

    def __init__(self, parent: _Parent) -> None:
        super().__init__()
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        self._parent.send(LogLine(record.name, record.levelno, self.format(record)))


class Channel:
    """One end of the socket pair. Not thread safe, but one thread may send while one receives."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)

    def send(self, message: object) -> None:
        # Connection.send has a pickler of its own, for what only multiprocessing passes on; the
        # plain one takes half the time.
        self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> Any:
        """The next message. Raises ``EOFError`` or ``OSError`` at the end."""
        return pickle.loads(self._connection.recv_bytes())

    def close(self) -> None:
        self._connection.close()


class _Parent:
    """The way to the parent. Any thread may send."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def send(self, message: FromWorker) -> None:
        try:
            with self._lock:
                self._channel.send(message)
        except OSError:
            os._exit(1)

    def receive(self) -> ToWorker:
        """The next message. Without a parent there is nobody left to work for.

        That ends the process on the spot, as whatever ended the parent did with it: the next
        server must not find the cache folder in use. What is on disk is whole at any moment.
        """
        try:
            message: ToWorker = self._channel.receive()
        except (EOFError, OSError):
            os._exit(1)
        return message


def main(descriptor: int) -> int:
    """Serve the parent at the other end of ``descriptor`` until it says to close."""
    # Ctrl-C and what a service manager sends go to all processes: the parent says when to end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = _Parent(Channel(descriptor))
    first = parent.receive()
    assert isinstance(first, Load)
    logging.basicConfig(level=first.log_level, handlers=[_Forward(parent)])
    host: list[EngineHost] = []
    closing = threading.Event()
    loaded = threading.Event()

    def listen() -> None:
        while True:
            message = parent.receive()
            if isinstance(message, Close):
                closing.set()
            loaded.wait()
            _obey(message, host[0], parent)

    threading.Thread(target=listen, daemon=True).start()
    try:
        host.append(_load(first))
    except AnaphoraError as error:
        parent.send(Refused(error))
        return 0
    except Exception as error:
        logging.getLogger(__name__).exception("the model could not be loaded")
        parent.send(Refused(EngineError(f"the model could not be loaded: {error!r}")))
        return 0
    parent.send(Ready(host[0].info))
    loaded.set()
    host[0].join()
    return 0 if closing.is_set() else 1


def _load(message: Load) -> EngineHost:
    from anaphora.engine.llamacpp.load import load_engine

    return EngineHost(lambda emit: load_engine(message.path, message.settings, emit))


def _obey(message: ToWorker, host: EngineHost, parent: _Parent) -> None:
    match message:
        case Request():
            host.submit(message, parent.send)
        case Cancel():
            host.cancel(message.id)
        case AskStats():
            try:
                parent.send(Stats(host.stats()))
            except EngineError:  # it is ending
                parent.send(Stats(None))
        case Close():
            host.close()
