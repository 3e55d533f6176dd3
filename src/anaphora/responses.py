"""Stored responses: conversations that a later request continues by an id.

They lie in an SQLite database beside the cache, each tenant's apart from all others'. A response
refers to the one it continues, so nothing is stored twice. What is deleted or expired can't be had
any more; where later responses continue it, its part of their conversation goes with the last of
them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from anaphora.clock import Clock, SystemClock
from anaphora.database import Database
from anaphora.errors import UnavailableError
from anaphora.prompt.conversation import Plain

logger = logging.getLogger(__name__)

T = TypeVar("T")

_APPLICATION = 0x414E4152
"""Says in the file's header whose it is ("ANAR")."""

_MIGRATIONS = (
    (
        """
        CREATE TABLE responses (
            tenant TEXT NOT NULL, id TEXT NOT NULL, previous TEXT,
            created REAL NOT NULL, expires REAL NOT NULL, size INTEGER NOT NULL,
            input TEXT NOT NULL, response TEXT NOT NULL, likeness TEXT NOT NULL,
            deltas TEXT NOT NULL,
            PRIMARY KEY (tenant, id)
        )
        """,
        "CREATE INDEX responses_by_previous ON responses (tenant, previous)",
        "CREATE INDEX responses_by_age ON responses (tenant, created)",
        "CREATE INDEX responses_by_expiry ON responses (expires)",
        "CREATE TABLE held (tenant TEXT PRIMARY KEY, size INTEGER NOT NULL) WITHOUT ROWID",
        """
        CREATE TRIGGER response_comes AFTER INSERT ON responses BEGIN
            INSERT INTO held VALUES (new.tenant, new.size)
            ON CONFLICT (tenant) DO UPDATE SET size = size + new.size;
        END
        """,
        """
        CREATE TRIGGER response_goes AFTER DELETE ON responses BEGIN
            UPDATE held SET size = size - old.size WHERE tenant = old.tenant;
            DELETE FROM held WHERE tenant = old.tenant AND size = 0;
        END
        """,
    ),
)

_LIVING = "SELECT * FROM responses WHERE tenant = ? AND id = ? AND expires > ?"
_IS_LAST = """
    NOT EXISTS (
        SELECT 1 FROM responses AS later
        WHERE later.tenant = responses.tenant AND later.previous = responses.id
    )
"""
"""Whether no other response continues this one."""
_CHAIN = f"""
    WITH RECURSIVE chain AS (
        SELECT *, 0 AS age FROM ({_LIVING})
        UNION ALL
        SELECT responses.*, age + 1 FROM responses, chain
        WHERE responses.tenant = chain.tenant AND responses.id = chain.previous AND age < 100000
    )
    SELECT * FROM chain ORDER BY age DESC
"""
_ROW_BYTES = 512
"""What a response takes beside its texts."""
_DAY = 86400.0


def default_responses_file(cache_dir: Path) -> Path:
    """Where the responses beside a cache folder are."""
    return cache_dir / "responses.db"


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    """One turn of a conversation."""

    id: str
    previous: str | None
    """The response it continues."""
    input: list[Plain]
    """What came with its request: items, as they are listed."""
    response: dict[str, Plain]
    """As it was answered."""
    likeness: Plain = None
    """What later requests can be compared with."""
    deltas: list[int | tuple[int, int]] = field(default_factory=list)
    """The pieces in which its text went out: characters of each, and tokens where how likely they
    were was told."""

    @property
    def items(self) -> list[Plain]:
        """What it adds to the conversation."""
        return [*self.input, *self.response["output"]]


class ResponseStore:
    """The responses in the database at ``path``. All its work is done on a thread of its own.

    A damaged database is moved aside, and a new one begun.

    :param keep_days: how long a response can be had.
    :param budget: bytes of all of them. When they are more, the tenant that has most loses the
        ends of its oldest conversations.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep_days: float = 30.0,
        budget: int = 1 << 30,
        clock: Clock | None = None,
    ) -> None:
        self._database = Database(path, _APPLICATION, _MIGRATIONS)
        self._keep = keep_days * _DAY
        self._budget = budget
        self._clock = clock or SystemClock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")

    async def save(self, tenant: str, stored: StoredResponse) -> bool:
        """Keep ``stored``; False: it can't be. The log says why."""
        try:
            saved = await self._run(lambda database: self._save(database, tenant, stored))
        except (sqlite3.Error, OSError) as error:
            logger.error("a response is not stored in %s: %s", self._database.path, error)
            return False
        if not saved:
            logger.warning(
                "a response is not stored: it is too large, or what it continues is gone"
            )
        return saved

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A response of ``tenant``'s. Raises :class:`~anaphora.errors.UnavailableError`."""
        parameters = (tenant, response_id, self._clock.now())
        rows = await self._read(lambda database: database.execute(_LIVING, parameters).fetchall())
        return _stored(rows[0]) if rows else None

    async def conversation(self, tenant: str, response_id: str) -> list[StoredResponse] | None:
        """A response of ``tenant``'s behind all those it continues; ``None``: there is none.

        Raises as :meth:`find`.
        """
        parameters = (tenant, response_id, self._clock.now())
        rows = await self._read(lambda database: database.execute(_CHAIN, parameters).fetchall())
        turns = [_stored(row) for row in rows]
        return turns if turns and turns[0].previous is None else None

    async def items(self, tenant: str, wanted: Mapping[str, Collection[str]]) -> dict[str, Plain]:
        """Items of ``tenant``'s responses by their ids, as far as they are there.

        Raises as :meth:`find`.

        :param wanted: ids of items by the id of the response they are of.
        """
        return await self._read(lambda database: self._items(database, tenant, wanted))

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response; False: there is none. Raises as :meth:`find`."""
        return await self._read(lambda database: self._delete(database, tenant, response_id))

    def close(self) -> None:
        """Finish what was begun."""
        self._thread.shutdown()
        self._database.close()

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._database.run, work)

    async def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return await self._run(work)
        except (sqlite3.Error, OSError) as error:
            logger.error("the responses in %s can't be used: %s", self._database.path, error)
            raise UnavailableError(
                "stored responses can't be read now: try again, or send the whole conversation"
            ) from error

    def _save(self, database: sqlite3.Connection, tenant: str, stored: StoredResponse) -> bool:
        now = self._clock.now()
        self._forget_expired(database, now)
        if stored.previous is not None:
            before = database.execute(
                "SELECT 1 FROM responses WHERE tenant = ? AND id = ?", (tenant, stored.previous)
            )
            if before.fetchone() is None:
                return False
        values = stored.input, stored.response, stored.likeness, stored.deltas
        texts = [_text(value) for value in values]
        size = _ROW_BYTES + sum(len(text.encode()) for text in texts)
        if size > self._budget:
            return False
        row = (tenant, stored.id, stored.previous, now, now + self._keep, size, *texts)
        database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        self._make_room(database)
        return database.execute(_LIVING, (tenant, stored.id, now)).fetchone() is not None

    def _items(
        self, database: sqlite3.Connection, tenant: str, wanted: Mapping[str, Collection[str]]
    ) -> dict[str, Plain]:
        now = self._clock.now()
        found: dict[str, Plain] = {}
        for response_id, ids in wanted.items():
            for row in database.execute(_LIVING, (tenant, response_id, now)):
                items = _stored(row).items
                found |= {item["id"]: item for item in items if item["id"] in ids}
        return found

    def _delete(self, database: sqlite3.Connection, tenant: str, response_id: str) -> bool:
        now = self._clock.now()
        gone = database.execute(
            "UPDATE responses SET expires = 0 WHERE tenant = ? AND id = ? AND expires > ?",
            (tenant, response_id, now),
        )
        self._forget_expired(database, now)
        return gone.rowcount > 0

    def _forget_expired(self, database: sqlite3.Connection, now: float) -> None:
        """Delete what can't be had any more, unless a later response continues it."""
        forget = f"DELETE FROM responses WHERE expires <= ? AND {_IS_LAST}"
        while database.execute(forget, (now,)).rowcount:
            pass  # now those before them may be the last

    def _make_room(self, database: sqlite3.Connection) -> None:
        largest = "SELECT tenant FROM held ORDER BY size DESC LIMIT 1"
        forget = f"""
            DELETE FROM responses WHERE rowid = (
                SELECT rowid FROM responses WHERE tenant = ({largest}) AND {_IS_LAST}
                ORDER BY created LIMIT 1
            )
        """
        held = "SELECT total(size) FROM held"
        while database.execute(held).fetchone()[0] > self._budget:
            if not database.execute(forget).rowcount:
                break


def _stored(row: tuple[str, ...]) -> StoredResponse:
    _, response_id, previous, _, _, _, *texts = row[:10]
    return StoredResponse(response_id, previous, *(json.loads(text) for text in texts))


def _text(value: Plain) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
