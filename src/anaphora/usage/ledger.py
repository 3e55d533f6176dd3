"""The ledger: a row for every request, in an SQLite database beside the cache.

Serving never waits for it. Records go into a bounded queue, and a thread of its own writes them in
batches. What can't be written is counted as lost and said in the log; it never becomes an error of
a request.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread

from anaphora.clock import Clock, SystemClock
from anaphora.database import Database
from anaphora.prompt.conversation import well_formed
from anaphora.usage.record import LIFETIMES, Record

logger = logging.getLogger(__name__)

_APPLICATION = 0x414E4155
"""Says in the file's header whose it is ("ANAU")."""

_MIGRATIONS = (
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

_INSERT = f"INSERT INTO requests VALUES ({', '.join('?' * (20 + len(LIFETIMES)))})"
_BATCH = 500
_DAY = 86400.0
_BETWEEN_DELETIONS = 3600.0
_PATIENCE = 5.0
"""Seconds to wait for whoever holds the file. Nobody waits for the ledger."""


def default_usage_file(cache_dir: Path) -> Path:
    """Where the ledger of a cache folder is."""
    return cache_dir / "usage.db"


@dataclass(frozen=True, slots=True)
class LedgerStats:
    written: int
    """Records in the database, since the start."""
    lost: Mapping[str, int]
    """Records that never got there, by tenant: the queue was full, or the database couldn't be
    written."""


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
        self._database = Database(path, _APPLICATION, _MIGRATIONS, patience=_PATIENCE)
        self._keep_days = keep_days
        self._clock = clock or SystemClock()
        self._queue: queue.Queue[Record | None] = queue.Queue(queue_size)
        self._lock = Lock()
        self._closed = False
        self._written = 0
        self._lost = Counter[str]()
        self._failing = False
        """Whether the last write failed: a failure that lasts is logged once."""
        self._hopeless = False
        """Whether a write failed at the end: then nothing else is tried, since somebody waits."""
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
            self._lost[record.tenant] += 1

    def stats(self) -> LedgerStats:
        with self._lock:
            return LedgerStats(self._written, dict(self._lost))

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
        self._database.close()

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
            self._hopeless = self._closed
            if not self._failing:
                path = self._database.path
                logger.error("the usage of requests is not recorded in %s: %s", path, error)
        self._failing = not written
        with self._lock:
            if written:
                self._written += len(records)
            else:
                self._lost.update(record.tenant for record in records)

    def _write(self, records: list[Record]) -> None:
        rows = [_row(record) for record in records]
        now = self._clock.now()
        oldest = None
        if self._keep_days is not None and now >= self._next_deletion:
            oldest = now - self._keep_days * _DAY

        def work(database: sqlite3.Connection) -> None:
            database.executemany(_INSERT, rows)
            if oldest is not None:
                database.execute("DELETE FROM requests WHERE time < ?", (oldest,))

        self._database.run(work)
        if oldest is not None:
            self._next_deletion = now + _BETWEEN_DELETIONS


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
