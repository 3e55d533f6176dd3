"""The ledger: a row for every request, in an SQLite database beside the cache.

Serving never waits for it. Records go into a bounded queue, and a thread of its own writes them in
batches. What can't be written is counted as lost and said in the log; it never becomes an error of
a request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread

from anaphora.cache.files import make_cache_folder
from anaphora.clock import Clock, SystemClock
from anaphora.prompt.conversation import well_formed
from anaphora.usage.record import LIFETIMES, Record

logger = logging.getLogger(__name__)

_APPLICATION = 0x414E4155
"""Says in the file's header whose it is ("ANAU")."""

_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        f"""
        CREATE TABLE requests (
            id TEXT NOT NULL, time REAL NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL,
            api TEXT NOT NULL, profile TEXT NOT NULL, streamed INTEGER NOT NULL,
            prompt INTEGER NOT NULL, read INTEGER NOT NULL,
            {", ".join(f"written_{lifetime} INTEGER NOT NULL" for lifetime in LIFETIMES)},
            uncached INTEGER NOT NULL, computed INTEGER NOT NULL, output INTEGER NOT NULL,
            queued REAL NOT NULL, first_token REAL NOT NULL, total REAL NOT NULL,
            finish TEXT NOT NULL, miss TEXT,
            cost INTEGER, cost_uncached INTEGER, currency TEXT
        )
        """,
        "CREATE INDEX requests_by_time ON requests (time)",
    ),
)
"""Statements from each version to the next; ``user_version`` says how many versions a file has
seen."""

_INSERT = f"INSERT INTO requests VALUES ({', '.join('?' * (20 + len(LIFETIMES)))})"
_BATCH = 500
_DAY = 86400.0
_BETWEEN_DELETIONS = 3600.0
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def default_usage_file(cache_dir: Path) -> Path:
    """Where the ledger of a cache folder is."""
    return cache_dir / "usage.db"


@dataclass(frozen=True, slots=True)
class LedgerStats:
    written: int
    """Records in the database, since the start."""
    lost: int
    """Records that never got there: the queue was full, or the database couldn't be written."""


class _ForeignError(sqlite3.DatabaseError):
    """A database, but not one of ours, or of a version nobody here knows."""


class Ledger:
    """Writes records to the database at ``path``.

    A damaged file, or one that is no ledger, is moved aside and a new one begun. One that can't be
    opened or written is tried again with the next records.

    :param keep_days: records older than this are deleted; ``None``: none are.
    :param queue_size: how many records may wait to be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep_days: float | None = None,
        queue_size: int = 10_000,
        clock: Clock | None = None,
    ) -> None:
        self._path = path
        self._keep_days = keep_days
        self._clock = clock or SystemClock()
        self._queue: queue.Queue[Record | None] = queue.Queue(queue_size)
        self._lock = Lock()
        self._closed = False
        self._written = self._lost = 0
        self._failing = False
        """Whether the last write failed: a failure that lasts is logged once."""
        self._hopeless = False
        """Whether a write failed at the end: then nothing else is tried, since somebody waits."""
        self._database: sqlite3.Connection | None = None
        self._inode = 0
        self._next_deletion = 0.0
        self._thread = Thread(target=self._run, name="usage ledger", daemon=True)
        self._thread.start()

    def add(self, record: Record) -> None:
        """Have ``record`` written soon. Never waits and never raises; safe from any thread."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(queue.Full):
                    self._queue.put_nowait(record)
                    return
            self._lost += 1

    def stats(self) -> LedgerStats:
        with self._lock:
            return LedgerStats(self._written, self._lost)

    def close(self) -> None:
        """Write what still waits, and end. Records added later are lost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._queue.put(None)  # waits for a place: the thread makes some
        self._thread.join()

    def _run(self) -> None:
        ended = False
        while not ended:
            batch = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < _BATCH:
                    batch.append(self._queue.get_nowait())
            ended = batch[-1] is None
            self._take([record for record in batch if record is not None])
        self._disconnect()

    def _take(self, records: list[Record]) -> None:
        """Write ``records``, or count them as lost."""
        if not records:
            return
        written = False
        try:
            if not self._hopeless:
                self._write(records)
                written = True
        except Exception as error:  # whatever it is, serving goes on
            self._disconnect()
            self._hopeless = self._closed
            if not self._failing:
                logger.error("the usage of requests is not recorded in %s: %s", self._path, error)
        self._failing = not written
        with self._lock:
            if written:
                self._written += len(records)
            else:
                self._lost += len(records)

    def _write(self, records: list[Record]) -> None:
        rows = [_row(record) for record in records]
        try:
            self._insert(rows)
        except sqlite3.DatabaseError as error:
            if not isinstance(error, _ForeignError) and _code(error) not in _DAMAGED:
                raise
            self._disconnect()
            _move_aside(self._path, error)
            self._insert(rows)

    def _insert(self, rows: list[tuple[object, ...]]) -> None:
        database = self._connect()
        now = self._clock.now()
        with database:  # all or none
            database.execute("BEGIN")
            database.executemany(_INSERT, rows)
            if self._keep_days is not None and now >= self._next_deletion:
                oldest = now - self._keep_days * _DAY
                database.execute("DELETE FROM requests WHERE time < ?", (oldest,))
                self._next_deletion = now + _BETWEEN_DELETIONS

    def _connect(self) -> sqlite3.Connection:
        """The open database, opened anew where its file was moved or deleted."""
        if self._database is not None:
            with contextlib.suppress(OSError):
                if self._path.stat().st_ino == self._inode:
                    return self._database
            self._disconnect()
        make_cache_folder(self._path.parent)
        # Made here, so that it is its owner's alone.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._inode = self._path.stat().st_ino
        self._database = _opened(self._path)
        return self._database

    def _disconnect(self) -> None:
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
        self._database = None


def _opened(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=5.0, isolation_level=None)
    try:
        with database:
            database.execute("BEGIN IMMEDIATE")  # others may just do the same
            _migrate(database)
        with contextlib.suppress(sqlite3.OperationalError):  # they hold it: they set this, too
            database.execute("PRAGMA journal_mode = WAL")
        # A crash of the machine may cost the last rows, never the file.
        database.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.Error:
        database.close()
        raise
    return database


def _migrate(database: sqlite3.Connection) -> None:
    """Bring an empty database, or one of an earlier version, up to date."""

    def value(query: str) -> int:
        return int(database.execute(query).fetchone()[0])

    version = value("PRAGMA user_version")
    ours = value("PRAGMA application_id") == _APPLICATION
    empty = value("SELECT count(*) FROM sqlite_master") == 0
    if not (ours or empty) or version > len(_MIGRATIONS):
        raise _ForeignError("it is no usage file, or one of a later version")
    for number, statements in enumerate(_MIGRATIONS[version:], start=version + 1):
        for statement in statements:
            database.execute(statement)
        database.execute(f"PRAGMA application_id = {_APPLICATION}")
        database.execute(f"PRAGMA user_version = {number}")


def _row(record: Record) -> tuple[object, ...]:
    tokens, cost = record.tokens, record.cost
    return (
        well_formed(record.id),
        record.time,
        *(well_formed(text) for text in (record.tenant, record.model, record.api, record.profile)),
        record.streamed,
        tokens.prompt,
        tokens.read,
        *(tokens.written.get(lifetime, 0) for lifetime in LIFETIMES),
        tokens.uncached,
        tokens.computed,
        tokens.output,
        record.queued,
        record.first_token,
        record.total,
        record.finish,
        record.miss,
        *((cost.amount, cost.uncached, cost.currency) if cost else (None, None, None)),
    )


def _move_aside(path: Path, error: Exception) -> None:
    """Rename a database that can't be used, with the files SQLite keeps beside it."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    logger.error("%s can't be used (%s): it is now %s, and a new one begins", path, error, aside)


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
