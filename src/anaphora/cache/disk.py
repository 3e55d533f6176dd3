"""The disk tier: one folder per namespace, a file per part of a block, and an index of them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from anaphora.cache import files
from anaphora.cache.catalog import Catalog, Changes, FileName, StoredEntry
from anaphora.cache.entries import EntryId
from anaphora.cache.format import FORMAT_VERSION, DamagedError, Header, Seals
from anaphora.cache.index import Block
from anaphora.cache.memory import Buffer
from anaphora.cache.recency import Recency
from anaphora.clock import Clock
from anaphora.errors import CacheBusyError, CacheDirectoryError

RETRY_SECONDS = 30.0
"""After a write failed (a full disk, mostly), how long until the next is tried."""

_NOT_DAMAGE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
}
"""Errors that say nothing against what is in the index, and may pass."""

_log = logging.getLogger(__name__)


class File:
    """One part of one block on disk."""

    __slots__ = ("block", "header")

    def __init__(self, block: Block, header: Header) -> None:
        self.block = block
        self.header = header

    @property
    def part(self) -> str:
        return self.header.part

    @property
    def decoded_from(self) -> int | None:
        return self.header.decoded_from

    @property
    def exact(self) -> bool:
        return self.header.exact


@dataclass(slots=True)
class Recovered:
    """What an earlier process left in the namespace."""

    listed: list[tuple[Header, float]] = field(default_factory=list)
    """Files that the index knows, with their last use (seconds since the epoch)."""
    unlisted: list[tuple[Header, float]] = field(default_factory=list)
    """Files that it doesn't, by their own headers."""
    missing: list[Header] = field(default_factory=list)
    """In the index, but the file is gone."""
    entries: list[StoredEntry] = field(default_factory=list)
    damaged: int = 0
    """Files that were not what they should be; they are removed."""
    gone: int = 0
    """Files that the index knows and nothing stands in place of."""
    complete: bool = True
    """Whether the index was whole; else there may have been more entries."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths inside a namespace folder."""

    folder: Path

    @property
    def description(self) -> Path:
        return self.folder / "namespace.json"

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def secret(self) -> Path:
        return self.folder / "mac.key"

    @property
    def index(self) -> Path:
        return self.folder / "index.sqlite"

    @property
    def blocks(self) -> Path:
        return self.folder / "blocks"

    def block(self, key: bytes, part: str) -> Path:
        name = key.hex()
        return self.blocks / name[:2] / f"{name}.{part}"

    def listing(self) -> Iterator[tuple[os.DirEntry[str], FileName | None]]:
        """Everything where block files are, and which file it is by its name."""
        for shelf in _entries(self.blocks):
            for entry in _entries(shelf.path):
                key, _, part = entry.name.partition(".")
                try:
                    name = bytes.fromhex(key), part
                except ValueError:
                    name = b"", ""
                ours = bool(part) and not part.endswith(files.TEMPORARY) and len(name[0]) == 32
                yield entry, name if ours and shelf.name == key[:2] else None


class DiskTier:
    """The files of one namespace. One process at a time has it open."""

    def __init__(self, layout: Layout, lock: int, seals: Seals, budget: int, clock: Clock) -> None:
        """Use :meth:`open`."""
        self.budget = budget
        self.used = 0
        """Bytes of all block files."""
        self.held: Recency[File] = Recency(lambda block: bool(block.disk))
        self.touched: set[Block] = set()
        """Blocks used (with those before them) since the index was last written."""
        self.bytes_written = 0
        self.bytes_read = 0
        self.write_failures = 0
        self._layout = layout
        self._lock = lock
        self._seals = seals
        self._clock = clock
        self._retry_at = self._index_retry_at = float("-inf")
        self._catalog = self._open_catalog()
        self._changed: set[File] = set()
        self._dropped: set[FileName] = set()
        self._entries: dict[EntryId, StoredEntry] = {}
        self._changed_entries: dict[EntryId, StoredEntry | None] = {}
        """``None`` for an entry that ended."""
        self._entries_are_known = False
        """Whether the index has these entries and no others."""

    @staticmethod
    def open(
        cache_dir: Path,
        root: bytes,
        identity: Mapping[str, str],
        budget: int,
        clock: Clock,
        model: str = "",
    ) -> DiskTier:
        """Open the namespace of ``root`` in ``cache_dir``, made if it isn't there.

        ``budget`` in bytes; ``identity`` and ``model`` only describe the namespace to people.
        Raises :class:`CacheBusyError` while another process has it open, and
        :class:`CacheDirectoryError` where it cannot be made or written.
        """
        layout = Layout(Path(cache_dir) / namespace_name(root))
        try:
            for folder in (Path(cache_dir), layout.folder, layout.blocks):
                files.make_cache_folder(folder)
            lock = lock_namespace(layout)
            try:
                _describe(layout, root, identity, model, clock)
                seals = Seals(_secret(layout.secret))
            except OSError:
                os.close(lock)
                raise
        except OSError as error:
            raise CacheDirectoryError(
                f"the cache folder {layout.folder} cannot be used ({error.strerror}): "
                f"{_advice(error)}choose another with --cache-dir"
            ) from error
        return DiskTier(layout, lock, seals, budget, clock)

    # Files

    @property
    def ready(self) -> bool:
        """False for a while after a write failed."""
        return self._clock.now() >= self._retry_at

    def file_bytes(self, buffer: Buffer) -> int:
        """Size of the file that a buffer makes."""
        return self._header(buffer, b"").file_bytes

    def put(self, buffer: Buffer) -> bool:
        """Write a buffer to disk. False: it couldn't be written, and ``ready`` is false now."""
        block, part = buffer.block, buffer.part
        header = self._header(buffer, self._seals.payload(buffer.view))
        path = self._layout.block(block.key, part)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            files.write_block(path, header, self._seals, buffer.memory)
        except (OSError, DamagedError) as error:
            if not self.write_failures:
                _log.warning("cannot write to the cache folder: %s", error)
            self.write_failures += 1
            self._retry_at = self._clock.now() + RETRY_SECONDS
            return False
        older = block.disk.get(part)
        if older is not None:
            self._forget(older)
        self.hold(File(block, header), in_index=False)
        self.bytes_written += header.file_bytes
        return True

    def hold(self, file: File, in_index: bool) -> None:
        """A block has these bytes on disk."""
        file.block.disk[file.part] = file
        self.held.add(file)
        self.used += file.header.file_bytes
        if not in_index:
            self._changed.add(file)

    def read(self, file: File, buffer: Buffer) -> Header:
        """Fill ``buffer`` from disk; returns the file's own header. May run in any thread.

        Raises :class:`DamagedError`, and ``OSError`` where the file is gone or unreadable.
        """
        path = self._layout.block(file.header.block.key, file.part)
        return files.read_block(path, file.header, self._seals, buffer.memory)

    def is_missing(self, file: File) -> bool:
        """Whether nothing is where a file should be."""
        return not os.path.lexists(self._layout.block(file.block.key, file.part))

    def drop(self, file: File) -> None:
        """Delete a file."""
        self._forget(file)
        self._dropped.add((file.block.key, file.part))
        files.remove(self._layout.block(file.block.key, file.part))

    def _forget(self, file: File) -> None:
        del file.block.disk[file.part]
        self.held.remove(file)
        self.used -= file.header.file_bytes
        self._changed.discard(file)

    def _header(self, buffer: Buffer, payload_seal: bytes) -> Header:
        return Header(
            buffer.block.id,
            buffer.part,
            buffer.decoded_from,
            buffer.exact,
            buffer.size,
            payload_seal,
        )

    def close(self) -> None:
        """Let another process have the namespace."""
        self._catalog.close()
        os.close(self._lock)

    # The index

    def recover(self) -> Recovered:
        """What is on disk, without reading a single payload."""
        found = Recovered(complete=not self._catalog.is_new)
        unlisted: dict[FileName, os.DirEntry[str]] = {}
        replaced: set[FileName] = set()
        for entry, name in self._layout.listing():
            if name is None:
                if entry.name.endswith(files.TEMPORARY):
                    files.remove(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                unlisted[name] = entry
            else:
                files.remove(Path(entry.path))
                replaced.add(name)
                found.damaged += 1
        self._recover_index(found, unlisted)
        found.gone = sum((h.block.key, h.part) not in replaced for h in found.missing)
        for (key, part), entry in unlisted.items():
            found.complete = False
            try:
                header = files.read_header(Path(entry.path), self._seals)
                if (header.block.key, header.part) != (key, part):
                    raise DamagedError("a file under another's name")
                found.unlisted.append((header, entry.stat().st_mtime))
            except (OSError, DamagedError) as error:
                if isinstance(error, OSError) and files.is_shortage(error):
                    continue  # another time
                files.remove(Path(entry.path))
                found.damaged += 1
        return found

    def _recover_index(self, found: Recovered, unlisted: dict[FileName, os.DirEntry[str]]) -> None:
        """Take from the index what is whole, and off ``unlisted`` the files it knows."""
        try:
            for row in self._catalog.files():
                if row is None:
                    raise sqlite3.DatabaseError("a row is damaged")
                header, _ = row
                name = header.block.key, header.part
                if unlisted.pop(name, None) is not None:
                    found.listed.append(row)
                else:
                    found.missing.append(header)
                    self._dropped.add(name)
            for stored in self._catalog.entries():
                if stored is None:
                    raise sqlite3.DatabaseError("an entry is damaged")
                found.entries.append(stored)
        except sqlite3.Error as error:
            if _is_damage(error):
                self._replace_catalog(error)
            found.complete = False
            found.unlisted += found.listed
            found.listed.clear()

    def commit(self, entries: Mapping[EntryId, StoredEntry | None]) -> None:
        """Write to the index what changed; ``None`` for an entry that ended.

        What cannot be written now is kept, and tried again after :data:`RETRY_SECONDS`.
        """
        self._changed_entries.update(entries)
        for entry_id, stored in entries.items():
            if stored is None:
                self._entries.pop(entry_id, None)
            else:
                self._entries[entry_id] = stored
        pending = self.touched or self._changed or self._dropped or self._changed_entries
        if not pending or self._clock.now() < self._index_retry_at:
            return
        try:
            self._write_changes()
        except sqlite3.Error as error:
            if self._index_retry_at == float("-inf"):
                _log.warning("cannot write the cache index, it is tried again later: %s", error)
            self._index_retry_at = self._clock.now() + RETRY_SECONDS
            return
        self._index_retry_at = float("-inf")
        self.touched.clear()
        self._changed.clear()
        self._dropped.clear()
        self._changed_entries.clear()
        self._entries_are_known = True

    def _write_changes(self) -> None:
        try:
            self._catalog.apply(self._changes())
        except sqlite3.Error as error:
            if not _is_damage(error):
                raise
            self._replace_catalog(error)
            self._changed.update(self.held)
            self._changed_entries.update(self._entries)
            self._catalog.apply(self._changes())

    def _changes(self) -> Changes:
        used = {block for touched in self.touched for block in touched.chain()}
        entries = self._changed_entries
        return Changes(
            files=[(file.header, file.block.last_used) for file in self._changed],
            dropped_files=self._dropped,
            uses=[(block.last_used, block.key, part) for block in used for part in block.disk],
            entries=[(key, stored) for key, stored in entries.items() if stored],
            dropped_entries=[key for key, stored in entries.items() if not stored],
            only_these_entries=not self._entries_are_known,
        )

    def _open_catalog(self) -> Catalog:
        """The index; one in memory while that on disk cannot be had, which stays as it is then."""
        try:
            files.make_private(self._layout.index)
            return Catalog(self._layout.index, self._seals)
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, sqlite3.Error) and _is_damage(error):
                _log.warning("the cache index is damaged and made again: %s", error)
                return self._new_catalog()
            _log.warning("cannot open the cache index, this time it is done without: %s", error)
            return Catalog(":memory:", self._seals)

    def _replace_catalog(self, error: sqlite3.Error) -> None:
        _log.warning("the cache index is damaged and made again: %s", error)
        self._catalog.close()
        self._catalog = self._new_catalog()

    def _new_catalog(self) -> Catalog:
        """An empty index; in memory where the disk has no room for one."""
        for suffix in ("", "-wal", "-shm"):
            files.remove(self._layout.index.with_name(self._layout.index.name + suffix))
        try:
            files.make_private(self._layout.index)
            return Catalog(self._layout.index, self._seals)
        except (OSError, sqlite3.Error):
            return Catalog(":memory:", self._seals)


def namespace_name(root: bytes) -> str:
    """Name of a namespace's folder."""
    return root[:8].hex()


def lock_namespace(layout: Layout) -> int:
    """Take the lock; it is held until the descriptor is closed or the process ends.

    Raises :class:`CacheBusyError` where another process has it, and ``OSError``.
    """
    fd = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        holder = lock_holder(layout)
        if holder == os.getpid():
            raise CacheBusyError(
                f"this process already has the cache in {layout.folder} open: "
                "close it first, or choose another folder with --cache-dir"
            ) from error
        raise CacheBusyError(
            f"process {holder or 'unknown'} already uses the cache in "
            f"{layout.folder}: stop it, or choose another folder with --cache-dir"
        ) from error
    with contextlib.suppress(OSError):  # a full disk; the lock holds all the same
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def lock_holder(layout: Layout) -> int | None:
    """Process id written into the lock file."""
    try:
        return int(layout.lock.read_text())
    except (OSError, ValueError):
        return None


def read_secret(path: Path) -> bytes | None:
    """The namespace's secret; ``None`` where it is missing or damaged."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        secret = os.read(fd, 33)
    except OSError:
        return None
    finally:
        os.close(fd)
    return secret if len(secret) == 32 else None


def _secret(path: Path) -> bytes:
    """The namespace's secret, made anew where it is lost: everything stored is a miss then."""
    secret = read_secret(path)
    if secret is None:
        secret = os.urandom(32)
        files.remove(path)
        files.write_private(path, secret)
    return secret


def _describe(
    layout: Layout, root: bytes, identity: Mapping[str, str], model: str, clock: Clock
) -> None:
    """Write what the namespace is for, once, for people to read."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if json.loads(layout.description.read_text()).get("root") == root.hex():
            layout.description.chmod(0o600)
            return
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(clock.now()))
    description = {
        "format": FORMAT_VERSION,
        "model": model,
        "created": created,
        "root": root.hex(),
        "identity": dict(identity),
    }
    files.write_private(layout.description, f"{json.dumps(description, indent=2)}\n".encode())


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether the index itself is at fault, not the disk, a lock or its mode.

    An error without a code is our own, about what stands in a row.
    """
    code: int | None = getattr(error, "sqlite_errorcode", None)
    if code is None or code == sqlite3.SQLITE_READONLY_DBMOVED:  # its file was deleted
        return True
    return code & 0xFF not in _NOT_DAMAGE  # the rest of a code is detail


def _advice(error: OSError) -> str:
    """What to do about a folder that cannot be used, besides choosing another."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or "
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make it writable, or "
    return ""


def _entries(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
