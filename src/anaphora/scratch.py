"""A folder of a command's own beside the cache, so that what it measures starts cold."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anaphora.cache.files import make_cache_folder
from anaphora.errors import CacheDirectoryError


@contextmanager
def scratch_folder(cache_dir: Path, name: str) -> Iterator[Path]:
    """A temporary folder inside ``cache_dir``, on the disk the cache would be on.

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
    with folder as path:
        yield Path(path)
