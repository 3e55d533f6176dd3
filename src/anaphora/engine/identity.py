"""Which model a GGUF file holds, and whether all of it is there, without reading all of it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from anaphora.errors import ModelFileError, ModelNotFoundError

_HEAD = 32 << 20
_TAIL = 1 << 20
_SAMPLES = 64
_SAMPLE = 64 << 10
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def model_files(path: str | os.PathLike[str]) -> list[Path]:
    """All files of the model at ``path``, in order: more than one where its name says it is split.

    Raises :class:`ModelFileError` where ``path`` is a later part of a split.
    """
    first = Path(path)
    split = _SPLIT_NAME.fullmatch(first.name)
    if split is None:
        return [first]
    if int(split["number"]) != 1:
        start = f"{split['stem']}-00001-of-{split['count']}.gguf"
        raise ModelFileError(f"{first} is a later part of a split model: give {start}")
    parts = range(1, int(split["count"]) + 1)
    return [first.with_name(f"{split['stem']}-{n:05}-of-{split['count']}.gguf") for n in parts]


def model_digest(path: str | os.PathLike[str]) -> str:
    """What tells this model from others, as hex BLAKE3; reads at most 37 MiB of each file.

    Over every file of the model: its size, its first 32 MiB (metadata and tensor table), its last
    1 MiB, and 64 evenly spaced samples of 64 KiB. Raises :class:`ModelNotFoundError` and
    :class:`ModelFileError` (no GGUF, or of a kind that cannot be read here).
    """
    digest = blake3(b"anaphora model digest 1")
    for file in model_files(path):
        with _open(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            _check_header(file, stream.read(24))
            digest.update(struct.pack("<Q", size))
            for start, length in _digested_ranges(size):
                digest.update(os.pread(stream.fileno(), length, start))
    return digest.hexdigest()


def check_complete(path: str | os.PathLike[str]) -> None:
    """Raise :class:`ModelFileError` where a file of the model ends before its last tensor does."""
    for file in model_files(path):
        with _open(file) as stream:
            _check_header(file, stream.read(24))
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                try:
                    end = _Header(data).data_end()
                except (struct.error, OverflowError, ValueError) as error:
                    raise ModelFileError(
                        f"{file} is truncated or damaged in its header: download it again"
                    ) from error
                if end > len(data):
                    raise ModelFileError(
                        f"{file} is truncated, {end - len(data)} bytes are missing: "
                        "download it again"
                    )


def _open(file: Path) -> BinaryIO:
    try:
        if file.exists() and not file.is_file():
            raise ModelNotFoundError(f"{file} is not a file: give the path of a GGUF file")
        return file.open("rb")
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"there is no model file {file}: check the path") from error
    except OSError as error:
        raise ModelNotFoundError(
            f"cannot read the model file {file} ({error.strerror}): check its permissions"
        ) from error


def _check_header(file: Path, header: bytes) -> None:
    if header[:4] != b"GGUF":
        raise ModelFileError(f"{file} is not a GGUF file: give a model in GGUF format")
    if len(header) < 24:
        raise ModelFileError(f"{file} ends inside its header: download it again")
    (version,) = struct.unpack_from("<I", header, 4)
    if version & 0xFFFF == 0:
        raise ModelFileError(f"{file} is a big-endian GGUF file: convert it to little-endian")
    if version not in (2, 3):
        raise ModelFileError(f"{file} has GGUF version {version}: versions 2 and 3 can be read")


def _digested_ranges(size: int) -> list[tuple[int, int]]:
    """(start, length) in bytes of what :func:`model_digest` reads of a file of ``size`` bytes."""
    ranges = [(0, min(_HEAD, size)), (max(0, size - _TAIL), min(_TAIL, size))]
    if size > _HEAD:
        step = max(1, (size - _HEAD) // _SAMPLES)
        ranges += [(_HEAD + i * step, _SAMPLE) for i in range(_SAMPLES)]
    return ranges


class _Header:
    """Walks over a GGUF header without keeping its values."""

    _SCALAR_SIZES = (1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8)
    """Bytes of a value, by type number; 8 is a string, 9 an array."""
    _STRING, _ARRAY = 8, 9

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 8

    def data_end(self) -> int:
        """Where in the file the last tensor ends, in bytes."""
        from gguf.constants import GGML_QUANT_SIZES

        tensors, values = self._uint64(), self._uint64()
        alignment = 32
        for _ in range(values):
            key, kind = self._string(), self._uint32()
            value_at = self._at
            self._skip(kind)
            if key == b"general.alignment":
                (alignment,) = struct.unpack_from("<I", self._data, value_at)
        block_sizes = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
        end = 0
        for _ in range(tensors):
            self._string()
            elements = math.prod(self._uint64() for _ in range(self._dimensions()))
            # A type that gguf doesn't know counts as empty: its start is checked all the same.
            elements_per_block, block_bytes = block_sizes.get(self._uint32(), (1, 0))
            end = max(end, self._uint64() + elements // elements_per_block * block_bytes)
        return -(-self._at // max(1, alignment)) * alignment + end if tensors else self._at

    def _dimensions(self) -> int:
        count = self._uint32()
        if count > 4:
            raise ValueError(f"a tensor of {count} dimensions")
        return count

    def _uint32(self) -> int:
        (value,) = struct.unpack_from("<I", self._data, self._at)
        self._at += 4
        return int(value)

    def _uint64(self) -> int:
        (value,) = struct.unpack_from("<Q", self._data, self._at)
        self._at += 8
        return int(value)

    def _string(self) -> bytes:
        length = self._uint64()
        self._at += length
        return self._data[self._at - length : self._at]

    def _skip(self, kind: int) -> None:
        if kind == self._STRING:
            self._skip_strings(1)
        elif kind == self._ARRAY:
            item, count = self._uint32(), self._uint64()
            if item == self._STRING:
                self._skip_strings(count)
            else:
                self._at += self._scalar_size(item) * count
        else:
            self._at += self._scalar_size(kind)

    def _skip_strings(self, count: int) -> None:
        # A vocabulary and its merges are several 100,000 strings: this loop is the whole cost.
        data, at, length_at = self._data, self._at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + length_at(data, at)[0]
        self._at = at

    def _scalar_size(self, kind: int) -> int:
        if kind < len(self._SCALAR_SIZES) and self._SCALAR_SIZES[kind]:
            return self._SCALAR_SIZES[kind]
        raise ValueError(f"value type {kind}")
