from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import pytest

from anaphora.engine.identity import check_complete, model_digest, model_files
from anaphora.errors import AnaphoraError, ModelFileError, ModelNotFoundError
from tests.conftest import TinyModel


def changed(path: Path, target: Path, at: int, data: bytes) -> Path:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    target.write_bytes(content)
    return target


def is_one_line(error: pytest.ExceptionInfo[AnaphoraError]) -> bool:
    return len(str(error.value).splitlines()) == 1


def test_a_copy_has_the_same_digest_and_another_model_another(
    tiny_llama: Path, tiny_model: TinyModel, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny_llama.read_bytes())
    assert model_digest(copy) == model_digest(str(tiny_llama))
    assert model_digest(tiny_model("llama", f32=True, seed=1)) != model_digest(copy)


@pytest.mark.parametrize("at", [30, 5_000, 200_000, -1])
def test_a_changed_byte_changes_the_digest(tiny_llama: Path, tmp_path: Path, at: int) -> None:
    at %= tiny_llama.stat().st_size
    flipped = bytes([tiny_llama.read_bytes()[at] ^ 1])
    other = changed(tiny_llama, tmp_path / "other.gguf", at, flipped)
    assert model_digest(other) != model_digest(tiny_llama)


def test_a_large_file_is_sampled_all_over(tiny_llama: Path, tmp_path: Path) -> None:
    large = tmp_path / "large.gguf"
    large.write_bytes(tiny_llama.read_bytes())
    os.truncate(large, 400 << 20)  # a sparse file
    before = model_digest(large)
    with large.open("r+b") as file:
        file.seek((32 << 20) + (368 << 20) // 64 * 40 + 100)
        file.write(b"x")
    assert model_digest(large) != before


def test_a_truncated_file_is_told_from_a_complete_one(tiny_llama: Path, tmp_path: Path) -> None:
    check_complete(tiny_llama)
    content = tiny_llama.read_bytes()
    part = tmp_path / "part.gguf"
    for length in [*range(24, 6_000, 61), len(content) // 2, len(content) - 1]:
        part.write_bytes(content[:length])
        with pytest.raises(ModelFileError) as error:
            check_complete(part)
        assert is_one_line(error)


@pytest.mark.parametrize("options", [{}, {"f32": True}, {"alignment": 64}])
def test_every_byte_of_the_tensors_is_needed(
    tiny_model: TinyModel, tmp_path: Path, options: dict[str, int]
) -> None:
    path = tiny_model("jamba", **options)
    check_complete(path)
    part = tmp_path / "part.gguf"
    part.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match="1 bytes are missing"):
        check_complete(part)


def test_a_damaged_header_is_a_model_file_error_or_harmless(
    tiny_llama: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    for at in range(4, 3_000, 7):
        changed(tiny_llama, other, at, b"\xff\xff")
        with contextlib.suppress(ModelFileError):
            check_complete(other)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "not a GGUF"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF"),
        (b"GGUF\x03\x00", "ends inside its header"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 1, 1), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 9, 1, 1), "version 9"),
    ],
)
def test_what_is_no_readable_gguf_is_refused(tmp_path: Path, header: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header)
    for read in (model_digest, check_complete):
        with pytest.raises(ModelFileError, match=message) as error:
            read(path)
        assert is_one_line(error)


def test_what_is_not_there_or_no_file_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path, tmp_path / "a" / "b.gguf"):
        with pytest.raises(ModelNotFoundError) as error:
            model_digest(path)
        assert is_one_line(error)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_not_found(tiny_llama: Path, tmp_path: Path) -> None:
    path = changed(tiny_llama, tmp_path / "secret.gguf", 0, b"")
    path.chmod(0)
    with pytest.raises(ModelNotFoundError, match="permissions"):
        model_digest(path)


def test_a_split_model_is_all_of_its_files(
    tiny_llama: Path, tiny_model: TinyModel, tmp_path: Path
) -> None:
    content = [tiny_llama.read_bytes(), tiny_model("mamba").read_bytes()]
    first, second = (tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    first.write_bytes(content[0])
    with pytest.raises(ModelNotFoundError, match=second.name):
        model_digest(first)
    second.write_bytes(content[1])
    assert model_files(first) == [first, second]
    digest = model_digest(first)
    assert digest != model_digest(tiny_llama)
    check_complete(first)
    second.write_bytes(content[1][:-1])
    assert model_digest(first) != digest
    with pytest.raises(ModelFileError, match=second.name):
        check_complete(first)
    with pytest.raises(ModelFileError, match=first.name):
        model_files(second)
