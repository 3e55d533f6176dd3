"""SQLite databases of ours: made, brought up to date, and moved aside where they are damaged."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from anaphora.cache.files import make_cache_folder

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class _ForeignError(sqlite3.DatabaseError):
    """A database, but not the one wanted, or of a version nobody here knows."""


class Database:
    """The database at ``path``, for one thread. It is opened when it is first needed.

    A damaged file, or one that is another database, is moved aside and a new one begun. One that
    is moved or deleted while it is open is made anew.
    """

    def __init__(
        self,
        path: Path,
        application: int,
        migrations: Sequence[Sequence[str]],
        *,
        patience: float = 1.0,
    ) -> None:
        """
        :param application: says in the file's header whose it is.
        :param migrations: statements from each version of the file to the next.
        :param patience: seconds to wait for another process that works on the same file.
        """
        self.path = path
        self._patience = patience
        self._application = application
        self._migrations = migrations
        self._open: sqlite3.Connection | None = None
        self._inode = 0

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """The result of ``work``, all of it in one transaction.

        Raises ``sqlite3.Error`` or ``OSError`` where the file can't be used now: it is locked, the
        disk is full, its folder can't be written. Then nothing has changed.
        """
        try:
            return self._try(work)
        except sqlite3.DatabaseError as error:
            if not isinstance(error, _ForeignError) and _code(error) not in _DAMAGED:
                raise
            self._move_aside(error)
        return self._try(work)

    def close(self) -> None:
        if self._open is not None:
            with contextlib.suppress(sqlite3.Error):
                self._open.close()
        self._open = None

    def _try(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            database = self._connect()
            with database:  # all or none
                database.execute("BEGIN IMMEDIATE")
                return work(database)
        except BaseException:
            self.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        if self._open is not None:
            with contextlib.suppress(OSError):
                if self.path.stat().st_ino == self._inode:
                    return self._open
            self.close()
        make_cache_folder(self.path.parent)
        # Made here, so that it is its owner's alone.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._inode = self.path.stat().st_ino
        self._open = sqlite3.connect(
            self.path, timeout=self._patience, isolation_level=None, check_same_thread=False
        )
        with self._open:
            self._open.execute("BEGIN IMMEDIATE")  # others may just do the same
            self._migrate(self._open)
        with contextlib.suppress(sqlite3.OperationalError):  # they hold it: they set this, too
            self._open.execute("PRAGMA journal_mode = WAL")
        # A crash of the machine may cost the last rows, never the file.
        self._open.execute("PRAGMA synchronous = NORMAL")
        return self._open

    def _migrate(self, database: sqlite3.Connection) -> None:
        """Bring an empty database, or one of an earlier version, up to date."""

        def value(query: str) -> int:
            return int(database.execute(query).fetchone()[0])

        version = value("PRAGMA user_version")
        ours = value("PRAGMA application_id") == self._application
        empty = value("SELECT count(*) FROM sqlite_master") == 0
        if not (ours or empty) or version > len(self._migrations):
            raise _ForeignError("it is another database, or one of a later version")
        for number, statements in enumerate(self._migrations[version:], start=version + 1):
            for statement in statements:
                database.execute(statement)
            database.execute(f"PRAGMA application_id = {self._application}")
            database.execute(f"PRAGMA user_version = {number}")

    def _move_aside(self, error: Exception) -> None:
        """Rename the file, with those SQLite keeps beside it."""
        path, number = self.path, 1
        while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
            number += 1
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
        logger.error(
            "%s can't be used (%s): it is now %s, and a new one begins", path, error, aside
        )


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
