from __future__ import annotations

import os
from pathlib import Path

import pytest

from anaphora.cache.inspect import clear_namespace, list_namespaces, verify_namespace
from anaphora.cache.keys import root_key
from anaphora.clock import ManualClock
from anaphora.errors import CacheBusyError, CacheDirectoryError
from tests.cache.support import IDENTITY, ROOT, block_files, compute, open_cache, prompt, read

OTHER = root_key({"model": "other"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two closed namespaces: 3 blocks, 40 tokens; 1 block, 16 tokens."""
    for root, tokens in ((ROOT, prompt(1, 2, length=20)), (OTHER, prompt(3))):
        cache = open_cache(tmp_path, root=root)
        compute(cache, tokens)
        cache.close()
    return tmp_path


def test_lists_what_is_there_without_a_model(folder: Path) -> None:
    infos = {info.path.name: info for info in list_namespaces(folder)}
    assert infos.keys() == {ROOT[:8].hex(), OTHER[:8].hex()}
    info = infos[ROOT[:8].hex()]
    assert (info.model, info.blocks, info.tokens) == ("toy", 3, 40)
    assert info.bytes == sum(path.stat().st_size for path in block_files(info.path.parent)) - (
        infos[OTHER[:8].hex()].bytes
    )
    assert info.identity == IDENTITY
    assert info.last_used == ManualClock().now()
    assert info.used_by is None


def test_lists_the_same_without_an_index(folder: Path) -> None:
    for index in folder.glob("*/index.sqlite*"):
        index.unlink()
    assert sorted(info.tokens for info in list_namespaces(folder)) == [16, 40]


def test_names_the_process_that_uses_a_namespace_and_does_not_disturb_it(folder: Path) -> None:
    cache = open_cache(folder)
    users = {info.path.name: info.used_by for info in list_namespaces(folder)}
    assert users == {ROOT[:8].hex(): os.getpid(), OTHER[:8].hex(): None}
    compute(cache, prompt(5))
    cache.flush()
    assert verify_namespace(folder / ROOT[:8].hex()).good == 4
    assert read(cache, prompt(5)) == 16


def test_a_damaged_description_is_no_error(folder: Path) -> None:
    for path in folder.glob("*/namespace.json"):
        path.write_text('["not what it was"')
    assert [(info.model, info.identity) for info in list_namespaces(folder)] == [("", {})] * 2
    cache = open_cache(folder)
    assert read(cache, prompt(1, 2, length=20)) == 40
    cache.close()
    assert sorted(info.model for info in list_namespaces(folder)) == ["", "toy"]


def test_an_empty_or_missing_folder_has_no_namespaces(tmp_path: Path) -> None:
    (tmp_path / "something").mkdir()
    assert list_namespaces(tmp_path) == list_namespaces(tmp_path / "missing") == []


def test_a_folder_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheDirectoryError, match="cannot read the cache folder"):
        list_namespaces(tmp_path / "file")


def test_verify_counts_damaged_files_and_removes_them_when_told(folder: Path) -> None:
    namespace = folder / ROOT[:8].hex()
    paths = block_files(folder)
    path = next(path for path in paths if namespace in path.parents)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    report = verify_namespace(namespace)
    assert (report.good, report.damaged, report.removed) == (2, 1, 0)
    report = verify_namespace(namespace, remove=True)
    assert (report.good, report.damaged, report.removed) == (2, 1, 1)
    assert not path.exists()
    report = verify_namespace(namespace)
    assert (report.good, report.damaged) == (2, 0)


def test_verify_without_the_secret_trusts_nothing(folder: Path) -> None:
    namespace = folder / ROOT[:8].hex()
    (namespace / "mac.key").unlink()
    assert verify_namespace(namespace).damaged == 3
    assert not (namespace / "mac.key").exists()


def test_clears_one_namespace(folder: Path) -> None:
    namespace = folder / ROOT[:8].hex()
    size = next(info.bytes for info in list_namespaces(folder) if info.path == namespace)
    assert clear_namespace(namespace) == size
    assert [info.path.name for info in list_namespaces(folder)] == [OTHER[:8].hex()]


def test_refuses_to_clear_what_is_in_use(folder: Path) -> None:
    cache = open_cache(folder)
    with pytest.raises(CacheBusyError, match="this process already has"):
        clear_namespace(folder / ROOT[:8].hex())
    assert read(cache, prompt(1, 2, length=20)) == 40


def test_refuses_to_clear_a_folder_that_is_no_namespace(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(CacheDirectoryError, match="no cache namespace"):
        clear_namespace(tmp_path)
    assert (tmp_path / "precious").exists()
