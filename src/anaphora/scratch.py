"""A folder of a command's own beside the cache, so that what it measures starts cold."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from anaphora.cache.files import make_cache_folder
from anaphora.errors import CacheDirectoryError

Name = Literal["bench", "demo", "load", "selftest"]


@contextmanager
def scratch_folder(cache_dir: Path, name: Name) -> Iterator[Path]:
    """A temporary folder inside ``cache_dir``, on the disk the cache would be on.

    It is locked for as long as it is used, so that what a killed process left can be told apart.
    Raises :class:`~anaphora.errors.CacheDirectoryError` where it can't be made.
    """
    try:
        make_cache_folder(cache_dir)
        folder = tempfile.TemporaryDirectory(prefix=f"{name}-", dir=cache_dir)
    except OSError as error:
        raise CacheDirectoryError(
            f"the cache folder {cache_dir} can't be used ({error.strerror}): "
            "choose another with --cache-dir"
        ) from error
    with _lock(Path(folder.name)), folder as path:
        yield Path(path)


def leftovers(cache_dir: Path) -> list[Path]:
    """Folders of runs that ended without deleting them."""
    names = [path for name in get_args(Name) for path in cache_dir.glob(f"{name}-*")]
    return sorted(path for path in names if _is_left(path))


def remove_leftover(path: Path) -> int:
    """Delete a folder of :func:`leftovers`; returns the bytes of its files.

    Raises :class:`~anaphora.errors.CacheDirectoryError` where that can't be done.
    """
    try:
        size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
        shutil.rmtree(path)
    except OSError as error:
        raise CacheDirectoryError(
            f"cannot delete {path} ({error.strerror}): check who owns it"
        ) from error
    return size


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """The lock ends with the process, however that ends."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _is_left(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # a file or link of somebody else's, or gone
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
