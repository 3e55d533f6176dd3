"""Looking at a cache folder from outside: without a model, and while an engine may use it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import shutil
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from anaphora.cache import files
from anaphora.cache.disk import Layout, lock_holder, lock_namespace, read_secret
from anaphora.cache.format import DamagedError, Header, Seals
from anaphora.cache.memory import rounded
from anaphora.errors import CacheDirectoryError


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """What a cache folder holds for one model and way to compute."""

    path: Path
    model: str
    identity: Mapping[str, str]
    """What the namespace's root key was made of; empty where its description is damaged."""
    created: str
    """UTC, ISO 8601."""
    blocks: int
    tokens: int
    """Over all blocks."""
    bytes: int
    """Of all block files."""
    last_used: float | None
    """Seconds since the Unix epoch; ``None`` where nothing is stored."""
    used_by: int | None
    """Id of the process that has it open."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Counts of block files."""

    path: Path
    good: int
    damaged: int
    removed: int


def list_namespaces(cache_dir: Path) -> list[NamespaceInfo]:
    """Every namespace in a cache folder, the last used first.

    Raises :class:`CacheDirectoryError` where the folder cannot be read.
    """
    found = [_describe(layout) for layout in _namespaces(cache_dir)]
    return sorted(found, key=lambda info: -(info.last_used or 0.0))


def verify_namespace(path: Path, *, remove: bool = False) -> VerifyReport:
    """Read every block file of a namespace and check its seals.

    Works while an engine has it open: a file that goes meanwhile is not counted. ``remove``
    deletes what is damaged, as the engine itself would when it came upon it.
    """
    layout = Layout(Path(path))
    secret = read_secret(layout.secret)
    good = damaged = removed = 0
    for entry, name in layout.listing():
        if name is None:
            continue
        file = Path(entry.path)
        try:
            if secret is None:
                raise DamagedError("nothing can be checked without the secret")
            header = _verify(file, Seals(secret))
            if (header.block.key, header.part) != name:
                raise DamagedError("a file under another's name")
        except FileNotFoundError:
            continue
        except (OSError, DamagedError):
            damaged += 1
            if remove:
                files.remove(file)
                removed += not os.path.lexists(file)
        else:
            good += 1
    return VerifyReport(layout.folder, good, damaged, removed)


def clear_namespace(path: Path) -> int:
    """Delete a namespace; returns the bytes of its block files.

    Raises :class:`CacheBusyError` while a process has it open, and :class:`CacheDirectoryError`
    where it cannot be deleted.
    """
    layout = Layout(Path(path))
    if not layout.description.is_file():
        raise CacheDirectoryError(f"{path} is no cache namespace: choose one of those listed")
    try:
        lock = lock_namespace(layout)
        try:
            size = sum(size for size, _ in _sizes(layout).values())
            shutil.rmtree(layout.folder)
        finally:
            os.close(lock)
    except OSError as error:
        raise CacheDirectoryError(
            f"cannot delete {layout.folder} ({error.strerror}): check who owns it"
        ) from error
    return size


def _namespaces(cache_dir: Path) -> list[Layout]:
    try:
        layouts = [Layout(path) for path in sorted(Path(cache_dir).iterdir())]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CacheDirectoryError(
            f"cannot read the cache folder {cache_dir} ({error.strerror}): check --cache-dir"
        ) from error
    return [layout for layout in layouts if layout.description.is_file()]


def _describe(layout: Layout) -> NamespaceInfo:
    description: dict[str, object] = {}
    with contextlib.suppress(OSError, ValueError):
        loaded = json.loads(layout.description.read_text())
        description = loaded if isinstance(loaded, dict) else {}
    identity = description.get("identity")
    sizes = _sizes(layout)
    times = [time for _, time in sizes.values()]
    last_used = _last_used(layout)
    if last_used is not None:
        times.append(last_used)
    return NamespaceInfo(
        path=layout.folder,
        model=str(description.get("model", "")),
        identity=identity if isinstance(identity, dict) else {},
        created=str(description.get("created", "")),
        blocks=len({key for key, _ in sizes}),
        tokens=_tokens(layout),
        bytes=sum(size for size, _ in sizes.values()),
        last_used=max(times, default=None),
        used_by=_used_by(layout),
    )


def _sizes(layout: Layout) -> dict[tuple[bytes, str], tuple[int, float]]:
    """Size and time of writing of every block file."""
    sizes = {}
    for entry, name in layout.listing():
        with contextlib.suppress(OSError):
            if name is not None and entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                sizes[name] = status.st_size, status.st_mtime
    return sizes


def _tokens(layout: Layout) -> int:
    """Tokens of all blocks, by the headers of their files."""
    secret = read_secret(layout.secret)
    if secret is None:
        return 0
    tokens: dict[bytes, int] = {}
    for entry, name in layout.listing():
        if name is not None and name[0] not in tokens:
            with contextlib.suppress(OSError, DamagedError):
                header = files.read_header(Path(entry.path), Seals(secret))
                tokens[header.block.key] = len(header.block)
    return sum(tokens.values())


def _last_used(layout: Layout) -> float | None:
    """The latest use that the index has written down."""
    try:
        uri = f"{layout.index.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=1.0)) as database:
            (latest,) = database.execute("SELECT max(last_used) FROM files").fetchone()
    except sqlite3.Error:
        return None
    return latest if isinstance(latest, float) else None


def _used_by(layout: Layout) -> int | None:
    """Who holds the lock. It is tried shared and let go at once, so that nobody is kept out."""
    try:
        fd = os.open(layout.lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return lock_holder(layout)
    finally:
        os.close(fd)
    return None


def _verify(path: Path, seals: Seals) -> Header:
    """Check a whole file. Raises :class:`DamagedError`, ``OSError``."""
    header = files.read_header(path, seals)
    memory = mmap.mmap(-1, rounded(header.payload_bytes))
    return files.read_block(path, header, seals, memory)
