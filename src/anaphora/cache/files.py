"""Block files: whole reads and writes that don't crowd the page cache.

Files are read and written past the page cache (``O_DIRECT``) where the file system allows it, so
that block traffic evicts neither a memory-mapped model nor anything else; elsewhere their pages
are dropped again at once. Reading this way is also twice as fast as through the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from anaphora.cache.format import PAGE, DamagedError, Header, Seals, header_bytes

TEMPORARY = ".tmp"
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR}


def is_shortage(error: OSError) -> bool:
    """Whether what was missing is descriptors or memory: it says nothing about the file."""
    return error.errno in _SHORTAGES


def read_block(path: Path, expected: Header, seals: Seals, memory: mmap.mmap) -> Header:
    """Read a block's payload into ``memory`` and check that it is what was asked for.

    ``expected`` is what the index says of the file. The header returned is the file's own: it may
    be of a better version of the same bytes. Raises :class:`DamagedError`, ``OSError``.
    """
    page = mmap.mmap(-1, expected.page_bytes)  # page aligned, as direct reads want it
    with _opened(path, os.O_RDONLY) as (fd, direct):
        _check_is_file(fd, expected.file_bytes)
        payload = memoryview(memory)[: _in_pages(expected.payload_bytes)]
        _read_fully(fd, page, payload, expected.file_bytes)
        if not direct:
            _drop_pages(fd)
    found = expected
    if page[:] != seals.page(expected):
        found = seals.open_page(page[:])
        if not found.is_for_same_bytes(expected):
            raise DamagedError("a file of another block")
    seals.check_payload(found, payload[: expected.payload_bytes])
    return found


def read_header(path: Path, seals: Seals) -> Header:
    """What a block file says about itself. Raises :class:`DamagedError`, ``OSError``."""
    with _opened(path, os.O_RDONLY | os.O_NONBLOCK, direct=False) as (fd, _):
        size = _check_is_file(fd)
        start = os.pread(fd, PAGE, 0)
        wanted = _in_pages(header_bytes(start) + 32)
        if wanted > size:
            raise DamagedError("shorter than its header")
        header = seals.open_page(start + os.pread(fd, wanted - len(start), len(start)))
        _check_is_file(fd, header.file_bytes)
    return header


def write_block(path: Path, header: Header, seals: Seals, memory: mmap.mmap) -> None:
    """Write a block file whole, in place of an older one. Raises ``OSError``.

    Not synced: a file torn by a power cut has a broken seal, and that is a miss.
    """
    page = mmap.mmap(-1, header.page_bytes)
    page[:] = seals.page(header)
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as (fd, direct):
            _write_fully(fd, page, memoryview(memory)[: _in_pages(header.payload_bytes)])
            os.ftruncate(fd, header.file_bytes)
            if not direct:
                os.fsync(fd)  # pages can only be dropped once they are written
                _drop_pages(fd)
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_private(path: Path, data: bytes) -> None:
    """Write a small file whole, for its owner alone, in place of an older one. ``OSError``."""
    temporary = path.with_name(path.name + TEMPORARY)
    remove(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    temporary.rename(path)


def make_private(path: Path) -> None:
    """Have a regular file at ``path`` that is its owner's alone, with what is in it. ``OSError``.

    Anything else there goes. For whoever would make the file with a mode of their own.
    """
    if path.is_symlink() or not path.is_file():
        remove(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        os.fchmod(fd, 0o600)
    finally:
        os.close(fd)


def make_cache_folder(path: Path) -> None:
    """Make a cache folder that only its owner can look into, if it isn't there. ``OSError``.

    Folders above it are made with the usual mode; one that is there keeps its own.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """Remove whatever is at ``path``, without following links; what cannot go stays."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _opened(path: Path, flags: int, direct: bool = True) -> Iterator[tuple[int, bool]]:
    """A descriptor, and whether it goes past the page cache. Links are not followed."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    direct = direct and bool(_DIRECT)
    try:
        fd = os.open(path, flags | (_DIRECT if direct else 0), 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedError("a link where a file should be") from error
        if error.errno != errno.EINVAL or not direct:
            raise
        direct = False  # this file system cannot
        fd = os.open(path, flags, 0o600)
    try:
        yield fd, direct
    finally:
        os.close(fd)


def _check_is_file(fd: int, size: int | None = None) -> int:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError("no regular file")
    if size is not None and status.st_size != size:
        raise DamagedError("a file of the wrong length")
    return status.st_size


def _read_fully(fd: int, page: mmap.mmap, payload: memoryview, size: int) -> None:
    done = os.preadv(fd, [page, payload], 0)
    while done < size:  # more than one call can return
        more = os.preadv(fd, [payload[done - len(page) :]], done) if done >= len(page) else 0
        if more == 0:
            raise DamagedError("a file that ends early")
        done += more


def _write_fully(fd: int, page: mmap.mmap, payload: memoryview) -> None:
    done = os.pwritev(fd, [page, payload], 0)
    while done < len(page) + len(payload):
        if done < len(page):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done += os.pwritev(fd, [payload[done - len(page) :]], done)


def _in_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _drop_pages(fd: int) -> None:
    """Take a file's pages out of the page cache, where the system has a call for that."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
