"""Damaged caches: right bytes or a counted miss, and never anything else."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from anaphora.cache.disk import namespace_name
from anaphora.cache.format import PAGE
from anaphora.cache.keys import DEFAULT_SEGMENTS, chain, root_key
from tests.cache.support import (
    BLOCK_SIZE,
    ROOT,
    block_files,
    check_consistent,
    compute,
    open_cache,
    prompt,
    read,
)

TOKENS = prompt(1, 2, 3, 4)
KEYS = [block.key for block in chain(ROOT, TOKENS, DEFAULT_SEGMENTS, BLOCK_SIZE)]
OTHER_ROOT = root_key({"model": "other"})


def file_of(folder: Path, number: int, root: bytes = ROOT) -> Path:
    blocks = folder / namespace_name(root) / "blocks"
    key = chain(root, TOKENS, DEFAULT_SEGMENTS, BLOCK_SIZE)[number].key.hex()
    return blocks / key[:2] / f"{key}.base"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def truncate_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


def truncate_to_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def truncate_by_one(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_start(path: Path) -> None:
    flip(path, 0)


def flip_tokens(path: Path) -> None:
    flip(path, 220)


def flip_padding(path: Path) -> None:
    flip(path, PAGE - 1)


def flip_middle(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def flip_end(path: Path) -> None:
    flip(path, path.stat().st_size - 1)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def folder_in_place(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("x")


def link_in_place(path: Path) -> None:
    aside = path.parents[4] / "aside"
    path.rename(aside)
    path.symlink_to(aside)


def fifo_in_place(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def gone(path: Path) -> None:
    path.unlink()


def another_block(path: Path) -> None:
    shutil.copy(file_of(path.parents[3], 0), path)


def same_block_of_another_namespace(path: Path) -> None:
    cache = open_cache(path.parents[3], root=OTHER_ROOT)
    compute(cache, TOKENS)
    cache.close()
    shutil.copy(file_of(path.parents[3], 2, OTHER_ROOT), path)


DAMAGES: list[Callable[[Path], None]] = [
    truncate_to_nothing,
    truncate_to_half,
    truncate_by_one,
    flip_start,
    flip_tokens,
    flip_padding,
    flip_middle,
    flip_end,
    append,
    folder_in_place,
    link_in_place,
    fifo_in_place,
    gone,
    another_block,
    same_block_of_another_namespace,
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache folder with four blocks of one chain and one of another, closed."""
    cache = open_cache(tmp_path / "cache")
    compute(cache, TOKENS)
    compute(cache, prompt(9))
    cache.close()
    return tmp_path / "cache"


@pytest.mark.parametrize("index", ["with its index", "without an index"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_counted_miss_and_goes(
    folder: Path, damage: Callable[[Path], None], index: str
) -> None:
    path = file_of(folder, 2)
    damage(path)
    if index == "without an index":
        for file in folder.glob("*/index.sqlite*"):
            file.unlink()
    cache = open_cache(folder)
    assert read(cache, TOKENS) == 32, "intact blocks before it are used"
    misses = cache.stats().misses
    if damage is not gone:
        assert misses.damaged + misses.gone == 1
    assert not path.exists()
    assert not path.is_symlink()
    assert cache.read_tokens(TOKENS) == 32, "the promise is shortened"
    assert read(cache, prompt(9)) == cache.read_tokens(prompt(9)) == 16
    assert read(cache, TOKENS) == 32
    check_consistent(cache)
    assert compute(cache, TOKENS) == (2 if damage is gone and not cache.match(TOKENS) else 1)
    assert read(cache, TOKENS) == 64, "what hung on it is usable again"
    check_consistent(cache)
    cache.close()
    cache = open_cache(folder)
    assert read(cache, TOKENS) == cache.read_tokens(TOKENS) == 64
    misses = cache.stats().misses
    assert misses.damaged == misses.gone == 0


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_damaged_while_the_cache_is_open(
    folder: Path, damage: Callable[[Path], None]
) -> None:
    cache = open_cache(folder)
    pieces = cache.match(TOKENS).pieces
    damage(file_of(folder, 2))
    assert [loaded.piece.block.start for loaded in cache.restore(pieces)] == [0, 16]
    misses = cache.stats().misses
    assert misses.damaged + misses.gone == 1
    assert not file_of(folder, 2).exists()
    assert cache.match(TOKENS).length == cache.read_tokens(TOKENS) == 32
    check_consistent(cache)
    compute(cache, TOKENS)
    assert read(cache, TOKENS) == 64


def test_swapped_files_are_both_misses(folder: Path) -> None:
    first, second = file_of(folder, 1), file_of(folder, 2)
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)
    cache = open_cache(folder)
    assert read(cache, TOKENS) == 16
    assert cache.stats().misses.damaged == 2, "both had been read ahead"
    check_consistent(cache)
    assert compute(cache, TOKENS) == 2
    assert read(cache, TOKENS) == 64


def test_files_put_back_are_found_again(folder: Path) -> None:
    aside = folder.parent / "aside"
    file_of(folder, 1).rename(aside)
    cache = open_cache(folder)
    assert cache.match(TOKENS).length == cache.read_tokens(TOKENS) == 16
    cache.close()
    aside.rename(file_of(folder, 1))
    cache = open_cache(folder)
    assert read(cache, TOKENS) == cache.read_tokens(TOKENS) == 64


def test_without_its_index_a_cache_is_as_good_as_before(folder: Path) -> None:
    for path in folder.glob("*/index.sqlite*"):
        path.unlink()
    cache = open_cache(folder)
    assert cache.read_tokens(TOKENS) == read(cache, TOKENS) == 64
    assert cache.read_tokens(prompt(9)) == 16
    assert cache.stats().misses.damaged == 0
    check_consistent(cache)


@pytest.mark.parametrize("step", [1, 7])
def test_a_flipped_byte_anywhere_in_the_index_changes_nothing(
    folder: Path, tmp_path: Path, step: int
) -> None:
    (index,) = folder.glob("*/index.sqlite")
    whole = index.read_bytes()
    places = range(0, 100, 9) if step == 1 else range(100, len(whole), len(whole) // 25)
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        for path in folder.glob("*/index.sqlite*"):
            path.unlink()
        index.write_bytes(damaged)
        cache = open_cache(folder)
        assert read(cache, TOKENS) == cache.read_tokens(TOKENS) == 64, place
        assert read(cache, prompt(9)) == cache.read_tokens(prompt(9)) == 16, place
        check_consistent(cache)
        compute(cache, prompt(place + 1000))
        cache.close()
        cache = open_cache(folder)
        assert read(cache, prompt(place + 1000)) == 16, place
        cache.close()


@pytest.mark.parametrize("length", [0, 10, 100, 4096, 5000])
def test_a_truncated_index_is_made_again(folder: Path, length: int) -> None:
    (index,) = folder.glob("*/index.sqlite")
    os.truncate(index, length)
    cache = open_cache(folder)
    assert read(cache, TOKENS) == cache.read_tokens(TOKENS) == 64
    cache.close()
    assert read(open_cache(folder), TOKENS) == 64


def test_a_folder_in_place_of_the_index(folder: Path) -> None:
    (index,) = folder.glob("*/index.sqlite")
    index.unlink()
    index.mkdir()
    cache = open_cache(folder)
    assert read(cache, TOKENS) == 64
    cache.close()
    assert index.is_file()


def test_an_entry_of_the_index_made_up_by_hand_is_not_believed(folder: Path) -> None:
    (index,) = folder.glob("*/index.sqlite")
    with sqlite3.connect(index) as database:
        (row,) = database.execute("SELECT entry FROM entries LIMIT 1").fetchone()
        forged = bytes(row).replace(b'"position": 64', b'"position": 60')
        forged = forged.replace(b'"position": 16', b'"position": 12')
        assert forged != row
        database.execute("UPDATE entries SET entry = ? WHERE entry = ?", (forged, row))
    database.close()
    cache = open_cache(folder)
    assert cache.read_tokens(TOKENS) == 64
    assert cache.read_tokens(prompt(9)) == 16


@pytest.mark.parametrize(
    "damage", [gone, truncate_to_half, append, flip_middle, folder_in_place, link_in_place]
)
def test_a_lost_secret_makes_everything_cold_and_counted(
    folder: Path, damage: Callable[[Path], None]
) -> None:
    (secret,) = folder.glob("*/mac.key")
    if damage is link_in_place:
        secret.rename(folder.parent / "aside")
        secret.symlink_to(folder.parent / "aside")
    else:
        damage(secret)
    cache = open_cache(folder)
    assert read(cache, TOKENS) == cache.read_tokens(TOKENS) == 0
    assert cache.stats().misses.damaged == 5
    assert block_files(folder) == []
    check_consistent(cache)
    compute(cache, TOKENS)
    cache.close()
    assert secret.stat().st_size == 32
    assert secret.stat().st_mode & 0o777 == 0o600
    assert read(open_cache(folder), TOKENS) == 64


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_files_that_could_not_be_opened_for_want_of_something_else_stay(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr("anaphora.cache.disk.files.read_block", refuse)
        cache = open_cache(folder)
        assert read(cache, TOKENS) == 0
        assert cache.read_tokens(TOKENS) == 64
        assert cache.stats().misses.no_room >= 1
    assert read(cache, TOKENS) == 64
    cache.close()
    for index in folder.glob("*/index.sqlite*"):
        index.unlink()
    with monkeypatch.context() as patched:
        patched.setattr("anaphora.cache.disk.files.read_header", refuse)
        open_cache(folder).close()
    assert read(open_cache(folder), TOKENS) == 64


def test_leftovers_and_foreign_files_among_the_blocks_do_no_harm(folder: Path) -> None:
    shelf = file_of(folder, 0).parent
    (shelf / "notes.txt").write_text("not ours")
    (shelf / (file_of(folder, 0).name + ".tmp")).write_bytes(b"torn")
    (shelf.parent / "stray").write_text("not ours")
    (shelf / f"{shelf.name}{'0' * 62}.base").write_bytes(b"made up")
    cache = open_cache(folder)
    assert read(cache, TOKENS) == 64
    assert cache.stats().misses.damaged == 1
    assert not list(folder.glob("**/*.tmp"))
    assert (shelf / "notes.txt").exists()
    check_consistent(cache)


def test_a_namespace_deleted_under_an_open_cache_is_a_miss(folder: Path) -> None:
    cache = open_cache(folder)
    for path in folder.glob("*/blocks/*"):
        shutil.rmtree(path)
    assert read(cache, TOKENS) == 0
    assert cache.stats().misses.gone >= 1
    compute(cache, TOKENS)
    cache.flush()
    assert read(cache, TOKENS) == 64
    assert len(block_files(folder)) >= 4
    check_consistent(cache)
