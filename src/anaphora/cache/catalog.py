"""The SQLite index of a namespace: block headers, last uses and entries.

It only saves reading the headers of all files at start. Everything in it is sealed, so that a
damaged row is noticed, and the whole file may be lost at any time.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from anaphora.cache.entries import Entry, EntryId
from anaphora.cache.format import FORMAT_VERSION, DamagedError, Header, Seals

FileName = tuple[bytes, str]
"""Block key and part."""

_SCHEMA = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS files (
    key BLOB, part TEXT, header BLOB, last_used REAL, PRIMARY KEY (key, part)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (id TEXT PRIMARY KEY, entry BLOB) WITHOUT ROWID;
PRAGMA user_version = {FORMAT_VERSION};
"""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry as far as the disk can keep it, and the block its position lies in."""

    entry: Entry
    block: bytes

    def encode(self) -> bytes:
        fields = asdict(self.entry) | {"key": self.entry.key.hex(), "block": self.block.hex()}
        return json.dumps(fields, sort_keys=True).encode()

    @staticmethod
    def decode(data: bytes) -> StoredEntry:
        fields = json.loads(data)
        block, key = bytes.fromhex(fields.pop("block")), bytes.fromhex(fields.pop("key"))
        return StoredEntry(Entry(key=key, **fields), block)


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What is written to the index at once."""

    files: Iterable[tuple[Header, float]] = ()
    """With their last use (seconds since the epoch)."""
    dropped_files: Iterable[FileName] = ()
    uses: Iterable[tuple[float, bytes, str]] = ()
    """Last use, block key, part."""
    entries: Iterable[tuple[EntryId, StoredEntry]] = ()
    dropped_entries: Iterable[EntryId] = ()
    only_these_entries: bool = False
    """All other entries go."""


class Catalog:
    """An open index. Every method may raise ``sqlite3.Error``."""

    def __init__(self, path: Path | str, seals: Seals) -> None:
        self._seals = seals
        self._database = sqlite3.connect(path, timeout=1.0, isolation_level=None)
        try:
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version not in (0, FORMAT_VERSION):
                raise sqlite3.DatabaseError("index of another format version")
            self.is_new = version == 0
            self._database.executescript(_SCHEMA)
        except sqlite3.Error:
            self.close()
            raise

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._database.close()

    def files(self) -> Iterator[tuple[Header, float] | None]:
        """Header and last use of every file; ``None`` for a damaged row."""
        for sealed, last_used in self._database.execute("SELECT header, last_used FROM files"):
            try:
                if not isinstance(sealed, bytes) or not isinstance(last_used, float):
                    raise DamagedError("row of the wrong type")
                header = self._seals.open_header(sealed)
            except DamagedError:
                yield None
            else:
                yield header, last_used

    def entries(self) -> Iterator[StoredEntry | None]:
        """Every entry; ``None`` for a damaged row."""
        for (sealed,) in self._database.execute("SELECT entry FROM entries"):
            try:
                if not isinstance(sealed, bytes):
                    raise DamagedError("row of the wrong type")
                data = self._seals.open_entry(sealed)
            except DamagedError:
                yield None
            else:
                yield StoredEntry.decode(data)

    def apply(self, changes: Changes) -> None:
        """Write changes, all or none."""
        database, seals = self._database, self._seals
        database.execute("BEGIN")
        try:
            database.executemany(
                "DELETE FROM files WHERE key = ? AND part = ?", changes.dropped_files
            )
            database.executemany(
                "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)",
                (
                    (header.block.key, header.part, seals.sealed_header(header), last_used)
                    for header, last_used in changes.files
                ),
            )
            database.executemany(
                "UPDATE files SET last_used = ? WHERE key = ? AND part = ?", changes.uses
            )
            if changes.only_these_entries:
                database.execute("DELETE FROM entries")
            database.executemany(
                "DELETE FROM entries WHERE id = ?",
                ((_row_id(entry_id),) for entry_id in changes.dropped_entries),
            )
            database.executemany(
                "INSERT OR REPLACE INTO entries VALUES (?, ?)",
                (
                    (_row_id(entry_id), seals.sealed_entry(stored.encode()))
                    for entry_id, stored in changes.entries
                ),
            )
            database.execute("COMMIT")
        except sqlite3.Error:
            with contextlib.suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            raise


def _row_id(entry_id: EntryId) -> str:
    owner, profile, key, match = entry_id
    return json.dumps([owner, profile, key.hex(), match])
