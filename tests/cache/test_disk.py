"""The prefix cache with a disk tier: restarts, budgets, writing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from anaphora.cache import files
from anaphora.cache.disk import RETRY_SECONDS, DiskTier
from anaphora.cache.format import PAGE
from anaphora.cache.keys import Segment, root_key
from anaphora.clock import ManualClock, SystemClock
from anaphora.errors import CacheBusyError, CacheDirectoryError
from anaphora.scratch import scratch_folder
from tests.cache.support import (
    IDENTITY,
    PAYLOAD,
    ROOT,
    block_files,
    check_consistent,
    compute,
    crash,
    open_cache,
    prompt,
    read,
)

FILE = PAGE + PAYLOAD


def current_umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    tokens = prompt(1, 2, 3, length=20)
    cache = open_cache(tmp_path)
    compute(cache, tokens)
    cache.close()
    cache = open_cache(tmp_path)
    assert cache.read_tokens(tokens) == 60
    assert cache.match(tokens).length == 60
    assert cache.stats().bytes_read == 0, "no payload is read at start"
    assert read(cache, tokens) == 60
    assert cache.stats().bytes_read == 4 * FILE
    assert cache.stats().bytes_written == 0
    check_consistent(cache)


def test_owners_and_segments_are_there_after_a_restart(tmp_path: Path) -> None:
    tokens = prompt(1, 2, 3)
    segments = (Segment("house", b"", 20), Segment("one", b"salt"))
    cache = open_cache(tmp_path)
    compute(cache, tokens, segments)
    cache.close()
    cache = open_cache(tmp_path)
    assert cache.read_tokens(tokens, segments) == read(cache, tokens, segments) == 48
    other = (segments[0], Segment("two", b"salt"))
    assert cache.read_tokens(tokens, other) == read(cache, tokens, other) == 20


def test_parts_decoded_and_exact_are_there_after_a_restart(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    compute(cache, prompt(1), decoded_from=5, parts=("base", "window"))
    cache.close()
    cache = open_cache(tmp_path)
    (piece,) = cache.match(prompt(1)).pieces
    assert piece.block.decoded_from == 5
    assert not piece.block.exact
    assert piece.block.parts == {"base", "window"}


def test_what_was_read_from_disk_is_in_memory_then(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    compute(cache, prompt(1, 2))
    cache.close()
    cache = open_cache(tmp_path)
    pieces = cache.match(prompt(1, 2)).pieces
    assert [loaded.tier for loaded in cache.restore(pieces)] == ["disk", "disk"]
    assert [loaded.tier for loaded in cache.restore(pieces)] == ["memory", "memory"]


def test_maintain_writes_in_slices_and_says_when_it_is_done(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    compute(cache, prompt(1, 2, 3))
    assert cache.unwritten == 3 * PAYLOAD
    assert cache.maintain(0)
    assert cache.unwritten == 2 * PAYLOAD
    while cache.maintain(0):
        pass
    assert cache.unwritten == 0
    crash(cache)
    assert read(open_cache(tmp_path), prompt(1, 2, 3)) == 48


def test_bytes_used_a_second_time_are_written_first(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    compute(cache, prompt(1))
    compute(cache, prompt(2))
    read(cache, prompt(2))
    cache.maintain(0)
    crash(cache)
    cache = open_cache(tmp_path)
    assert (read(cache, prompt(1)), read(cache, prompt(2))) == (0, 16)


def test_tails_are_written_last(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    compute(cache, prompt(1)[:10])
    compute(cache, prompt(2))
    cache.maintain(0)
    crash(cache)
    cache = open_cache(tmp_path)
    assert (read(cache, prompt(1)), read(cache, prompt(2))) == (0, 16)


def test_a_tail_on_disk_stays_until_the_longer_block_is_written(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    compute(cache, prompt(1)[:10])
    cache.flush()
    compute(cache, prompt(1))
    assert len(block_files(tmp_path)) == 1
    assert cache.stats().memory_parts == 1
    cache.flush()
    assert len(block_files(tmp_path)) == 1
    assert cache.stats().disk_used == FILE
    check_consistent(cache)
    cache.close()
    assert read(open_cache(tmp_path), prompt(1)) == 16


def test_an_evicted_block_is_on_disk(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, memory=2)
    for number in range(6):
        compute(cache, prompt(number))
    assert cache.stats().evicted_from_memory == 4
    assert cache.stats().broken_promises == 0
    for number in range(6):
        assert read(cache, prompt(number)) == 16
    check_consistent(cache)


@pytest.mark.parametrize("memory", [1, 2, 5])
def test_a_chain_larger_than_memory_streams_through_to_disk(tmp_path: Path, memory: int) -> None:
    cache = open_cache(tmp_path, memory=memory)
    tokens = prompt(*range(9))
    assert compute(cache, tokens) == 9
    cache.flush()
    assert cache.stats().bytes_written == 9 * FILE, "each block once"
    for _ in range(2):
        assert read(cache, tokens) == len(tokens)
    assert cache.match(tokens).pieces[0].block.memory or memory == 1, "the head stays"
    check_consistent(cache)


def test_without_memory_a_restore_ends_and_is_counted(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    compute(cache, prompt(1, 2))
    cache.close()
    cache = open_cache(tmp_path, memory=0)
    assert read(cache, prompt(1, 2)) == 0
    assert cache.stats().misses.no_room == 1
    assert compute(cache, prompt(3)) == 0
    assert len(block_files(tmp_path)) == 2
    check_consistent(cache)


def test_the_disk_budget_holds_and_the_least_recently_used_leaves_go(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, memory=1, disk=4 * FILE)
    for number in range(8):
        compute(cache, prompt(number, number + 100))
        cache.flush()
        assert sum(path.stat().st_size for path in block_files(tmp_path)) <= 4 * FILE
    assert read(cache, prompt(7, 107)) == 32
    assert read(cache, prompt(6, 106)) == 32
    assert read(cache, prompt(0, 100)) == 0
    assert cache.stats().evicted_from_disk == 12
    check_consistent(cache)


def test_a_full_disk_tier_is_not_thrashed_by_what_memory_holds_anyway(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, memory=10, disk=4 * FILE)
    tokens = prompt(*range(9))
    compute(cache, tokens)
    for _ in range(5):
        cache.flush()
    assert cache.stats().bytes_written == 4 * FILE
    assert cache.stats().evicted_from_disk == 0
    assert cache.unwritten == 0
    cache.close()
    cache = open_cache(tmp_path)
    assert read(cache, tokens) == 64, "the head of the chain"
    assert cache.read_tokens(tokens) == 64


def test_what_was_used_less_recently_does_not_push_others_off_a_full_disk(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, disk=FILE)
    compute(cache, prompt(1))
    compute(cache, prompt(2))
    read(cache, prompt(2))
    cache.flush()
    assert cache.unwritten == 0
    assert cache.stats().evicted_from_disk == 0
    read(cache, prompt(1))
    assert cache.unwritten == PAYLOAD, "now it is wanted"
    crash(cache)
    cache = open_cache(tmp_path)
    assert (read(cache, prompt(1)), read(cache, prompt(2))) == (0, 16)


def test_a_smaller_budget_at_start_evicts(tmp_path: Path) -> None:
    clock = ManualClock()
    cache = open_cache(tmp_path, clock=clock)
    for number in range(6):
        compute(cache, prompt(number))
        clock.advance(1)
    cache.close()
    cache = open_cache(tmp_path, disk=2 * FILE, clock=clock)
    assert [read(cache, prompt(number)) for number in range(6)] == [0, 0, 0, 0, 16, 16]
    assert len(block_files(tmp_path)) == 2
    check_consistent(cache)


def test_last_use_survives_a_restart(tmp_path: Path) -> None:
    clock = ManualClock()
    cache = open_cache(tmp_path, clock=clock)
    for number in range(3):
        compute(cache, prompt(number))
        clock.advance(1)
    cache.flush()
    cache.match(prompt(0))
    cache.close()
    cache = open_cache(tmp_path, disk=2 * FILE, clock=clock)
    assert [cache.match(prompt(number)).length for number in range(3)] == [16, 0, 16]


def test_a_promise_is_kept_as_far_as_the_disk_goes(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    compute(cache, prompt(1, 2, 3))
    cache.maintain(0)
    crash(cache)
    cache = open_cache(tmp_path)
    assert cache.read_tokens(prompt(1, 2, 3)) == 16
    check_consistent(cache)


def test_a_promise_survives_files_evicted_while_memory_had_them(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, disk=2 * FILE)
    compute(cache, prompt(1, 2))
    cache.flush()
    compute(cache, prompt(3))
    cache.close()
    cache = open_cache(tmp_path)
    assert cache.read_tokens(prompt(1, 2)) == read(cache, prompt(1, 2)) == 16
    assert cache.read_tokens(prompt(3)) == read(cache, prompt(3)) == 16


def test_a_better_version_replaces_the_file_once_it_is_written(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    compute(cache, prompt(1), decoded_from=3)
    cache.flush()
    compute(cache, prompt(1))
    assert cache.unwritten == PAYLOAD
    crash(cache)
    cache = open_cache(tmp_path)
    assert cache.match(prompt(1)).pieces[0].block.decoded_from == 3
    compute(cache, prompt(1))
    cache.flush()
    assert cache.stats().disk_used == FILE
    crash(cache)
    cache = open_cache(tmp_path)
    assert cache.match(prompt(1)).pieces[0].block.decoded_from is None
    assert read(cache, prompt(1)) == 16


def test_a_file_newer_than_the_index_is_believed(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    compute(cache, prompt(1), decoded_from=3)
    cache.flush()
    compute(cache, prompt(1))
    cache._tiers.write(cache.match(prompt(1)).pieces[0].block)  # and no index
    crash(cache)
    cache = open_cache(tmp_path)
    assert cache.match(prompt(1)).pieces[0].block.decoded_from == 3
    assert read(cache, prompt(1)) == 16
    assert cache.match(prompt(1)).pieces[0].block.decoded_from is None
    check_consistent(cache)


def test_files_are_private_and_the_namespace_describes_itself(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    cache = open_cache(folder)
    compute(cache, prompt(1))
    cache.flush()
    (namespace,) = folder.iterdir()
    assert namespace.name == ROOT[:8].hex()
    for path in (folder, namespace, *namespace.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    assert len(list(namespace.glob("index.sqlite*"))) == 3
    described = json.loads((namespace / "namespace.json").read_text())
    assert described["model"] == "toy"
    assert described["identity"] == IDENTITY
    assert described["root"] == ROOT.hex()
    assert (namespace / "lock").read_text().strip() == str(os.getpid())


def test_the_cache_folder_is_private_whoever_makes_it(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "cache"
    with scratch_folder(folder, "bench"):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent.stat().st_mode & 0o777 == 0o777 & ~current_umask()


def test_files_that_were_open_to_others_are_closed_to_them(tmp_path: Path) -> None:
    open_cache(tmp_path).close()
    paths = [*tmp_path.glob("*/namespace.json"), *tmp_path.glob("*/index.sqlite")]
    for path in paths:
        path.chmod(0o644)
    open_cache(tmp_path).close()
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600, 0o600]


def test_models_do_not_share_a_namespace(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    compute(cache, prompt(1))
    other = open_cache(tmp_path, root=root_key({"model": "other"}))
    assert read(other, prompt(1)) == 0
    other.close()
    assert read(cache, prompt(1)) == 16


def test_a_second_process_is_told_who_has_the_namespace(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    with pytest.raises(CacheBusyError, match="this process already has the cache") as caught:
        open_cache(tmp_path)
    assert "\n" not in str(caught.value)
    (lock,) = tmp_path.glob("*/lock")
    lock.write_text("1\n")
    with pytest.raises(CacheBusyError, match="process 1 already uses"):
        open_cache(tmp_path)
    compute(cache, prompt(1))
    cache.close()
    assert read(open_cache(tmp_path), prompt(1)) == 16


def test_a_cache_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheDirectoryError, match="choose another with --cache-dir") as caught:
        DiskTier.open(tmp_path / "file" / "cache", ROOT, IDENTITY, 0, SystemClock())
    assert "\n" not in str(caught.value)
    with pytest.raises(CacheDirectoryError):
        DiskTier.open(tmp_path / "file", ROOT, IDENTITY, 0, SystemClock())


def test_a_folder_that_cannot_be_written_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CacheDirectoryError, match=r"Read-only file system.*make it writable"):
        DiskTier.open(tmp_path, ROOT, IDENTITY, 0, SystemClock())


def test_a_full_disk_at_start_asks_for_space_not_for_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CacheDirectoryError, match="free some space") as caught:
        DiskTier.open(tmp_path, ROOT, IDENTITY, 0, SystemClock())
    assert "writable" not in str(caught.value)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_takes_nothing_is_counted_and_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    clock = ManualClock()
    cache = open_cache(tmp_path, memory=3, clock=clock)
    compute(cache, prompt(1))
    cache.flush()
    real = os.pwritev

    def refuse(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", refuse)
    compute(cache, prompt(2, 3))
    assert not cache.maintain(1.0), "nothing can be done now"
    cache.flush()
    assert cache.stats().write_failures == 1
    assert cache.unwritten == 2 * PAYLOAD
    assert read(cache, prompt(2, 3)) == 32
    compute(cache, prompt(4, 5))
    assert read(cache, prompt(1)) == 16, "what is on disk stays"
    check_consistent(cache)
    clock.advance(RETRY_SECONDS)
    cache.flush()
    assert cache.stats().write_failures == 2
    assert [record.message for record in caplog.records if "cannot write" in record.message] == [
        f"cannot write to the cache folder: [Errno {code}] {os.strerror(code)}"
    ]
    monkeypatch.setattr(os, "pwritev", real)
    clock.advance(RETRY_SECONDS)
    cache.flush()
    assert cache.unwritten == 0
    assert not list(tmp_path.glob("**/*" + files.TEMPORARY))
    check_consistent(cache)


def test_a_file_system_without_direct_access_works_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def no_direct(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", no_direct)
    cache = open_cache(tmp_path)
    compute(cache, prompt(1, 2))
    cache.close()
    assert read(open_cache(tmp_path), prompt(1, 2)) == 32


def test_an_index_that_breaks_while_it_is_used_is_made_again(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    compute(cache, prompt(1))
    cache.flush()
    assert cache._disk is not None
    cache._disk._catalog._database.execute("DROP TABLE files")
    compute(cache, prompt(2))
    cache.flush()
    cache.close()
    (index,) = tmp_path.glob("*/index.sqlite")
    with sqlite3.connect(index) as database:
        assert database.execute("SELECT count(*) FROM files").fetchone() == (2,)
        assert database.execute("SELECT count(*) FROM entries").fetchone() == (2,)
    database.close()
    cache = open_cache(tmp_path)
    assert cache.read_tokens(prompt(1)) == read(cache, prompt(2)) == 16


def test_clear_empties_the_disk_too(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    compute(cache, prompt(1, 2))
    cache.flush()
    cache.clear()
    assert block_files(tmp_path) == []
    compute(cache, prompt(3))
    cache.close()
    cache = open_cache(tmp_path)
    assert (read(cache, prompt(1, 2)), read(cache, prompt(3))) == (0, 16)
    assert (cache.read_tokens(prompt(1, 2)), cache.read_tokens(prompt(3))) == (0, 16)
    assert cache.stats().broken_promises == 0


def test_the_namespace_is_free_again_even_where_the_last_write_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache(tmp_path)

    def fail(*args: object) -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cache._tiers, "write_some", fail)
    with pytest.raises(RuntimeError):
        cache.close()
    open_cache(tmp_path).close()


@pytest.mark.parametrize("pragma", ["query_only = 1", "max_page_count = 1"])
def test_an_index_that_cannot_be_written_now_stays_and_gets_everything_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pragma: str
) -> None:
    clock = ManualClock()
    cache = open_cache(tmp_path, memory=200, clock=clock)
    compute(cache, prompt(1))
    cache.flush()
    (index,) = tmp_path.glob("*/index.sqlite")
    before = index.stat().st_ino
    assert cache._disk is not None
    catalog = cache._disk._catalog
    catalog._database.execute(f"PRAGMA {pragma}")
    for number in range(2, 100):
        compute(cache, prompt(number))
    cache.flush()
    cache.match(prompt(1))
    cache.flush()
    catalog._database.execute("PRAGMA query_only = 0")
    catalog._database.execute("PRAGMA max_page_count = 1000000")
    cache.flush()
    assert catalog._database.execute("SELECT count(*) FROM files").fetchone() == (1,), "not yet"
    clock.advance(RETRY_SECONDS)
    cache.flush()
    assert catalog._database.execute("SELECT count(*) FROM files").fetchone() == (99,)
    assert catalog._database.execute("SELECT count(*) FROM entries").fetchone() == (99,)
    assert cache._disk._catalog is catalog
    assert index.stat().st_ino == before
    assert len([record for record in caplog.records if "cache index" in record.message]) == 1
    cache.close()
    cache = open_cache(tmp_path, clock=clock)
    assert cache.read_tokens(prompt(1)) == cache.read_tokens(prompt(99)) == 16


def test_an_index_that_somebody_has_locked_at_start_is_left_alone(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    compute(cache, prompt(1, 2))
    cache.close()
    (index,) = tmp_path.glob("*/index.sqlite")
    other = sqlite3.connect(index, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    before = index.stat().st_ino
    cache = open_cache(tmp_path)
    assert cache.read_tokens(prompt(1, 2)) == read(cache, prompt(1, 2)) == 32
    cache.close()
    other.close()
    assert index.stat().st_ino == before
    assert cache.read_tokens(prompt(1, 2)) == 32


def test_a_namespace_deleted_under_an_open_cache_does_not_come_back(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    (namespace,) = tmp_path.iterdir()
    shutil.rmtree(namespace)
    compute(cache, prompt(1))
    cache.close()
    assert cache.stats().write_failures == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept_in_memory", [True, False])
def test_all_of_a_chain_whose_files_are_gone_is_stored_again_at_once(
    tmp_path: Path, kept_in_memory: bool
) -> None:
    cache = open_cache(tmp_path)
    tokens = prompt(*range(20))
    compute(cache, tokens)
    cache.close()
    cache = open_cache(tmp_path)
    if kept_in_memory:
        assert read(cache, tokens[:160]) == 160
    for path in block_files(tmp_path):
        path.unlink()
    assert read(cache, tokens) == (160 if kept_in_memory else 0)
    assert cache.stats().misses.gone == 20
    assert compute(cache, tokens) == (10 if kept_in_memory else 20)
    cache.flush()
    assert len(block_files(tmp_path)) == 20
    check_consistent(cache)
    cache.close()
    cache = open_cache(tmp_path)
    assert read(cache, tokens) == cache.read_tokens(tokens) == 320
