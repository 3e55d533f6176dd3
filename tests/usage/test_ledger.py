"""The ledger: every request once, nothing in anybody's way, and no file that stops it."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from anaphora.clock import ManualClock
from anaphora.usage.ledger import Ledger, LedgerStats
from anaphora.usage.record import LIFETIMES, TokenCounts
from tests.usage.records import NOON, record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "usage.db"


def rows(path: Path, columns: str = "id") -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(f"SELECT {columns} FROM requests ORDER BY rowid").fetchall()


@contextmanager
def held(path: Path) -> Iterator[sqlite3.Connection]:
    """Nobody else can write to the database at ``path`` meanwhile."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield database


def settled(ledger: Ledger, records: int) -> None:
    """Wait until all of ``records`` are either written or lost."""
    waiting = threading.Event()
    while ledger.stats().written + sum(ledger.stats().lost.values()) < records:
        waiting.wait(0.005)


def test_a_record_comes_back_whole(path: Path) -> None:
    ledger = Ledger(path)
    ledger.add(record(miss="expired"))
    ledger.close()
    with closing(sqlite3.connect(path)) as database:
        database.row_factory = sqlite3.Row
        (row,) = map(dict, database.execute("SELECT * FROM requests"))
    assert row == {
        **{"id": "chatcmpl-1", "time": NOON, "tenant": "acme", "model": "small", "api": "chat"},
        **{"profile": "local", "streamed": 1, "prompt": 1000, "read": 600},
        **{"written_5m": 100, "written_30m": 0, "written_1h": 200, "written_12h": 0},
        **{"written_unlimited": 0, "uncached": 100, "computed": 450, "output": 20},
        **{"queued": 0.1, "first_token": 0.5, "total": 2.0, "finish": "end", "miss": "expired"},
        **{"cost": 1_250_000_001, "cost_uncached": 3_000_000_002, "currency": "USD"},
    }
    assert len(LIFETIMES) == 5


def test_the_file_is_its_owners_alone(path: Path) -> None:
    ledger = Ledger(path)
    ledger.add(record())
    settled(ledger, 1)
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    ledger.close()


def test_records_of_many_threads_are_all_written_once(path: Path) -> None:
    ledger = Ledger(path)

    def add(start: int) -> None:
        for number in range(start, start + 300):
            ledger.add(record(number))

    threads = [threading.Thread(target=add, args=(start,)) for start in range(0, 1200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.close()
    assert ledger.stats() == LedgerStats(written=1200, lost={})
    assert sorted(rows(path)) == sorted((f"chatcmpl-{n}",) for n in range(1200))


def test_a_second_ledger_on_the_same_file_adds_to_it(path: Path) -> None:
    first, second = Ledger(path), Ledger(path)
    first.add(record(1))
    second.add(record(2))
    first.close()
    second.close()
    again = Ledger(path)
    again.add(record(3))
    again.close()
    assert sorted(rows(path)) == [("chatcmpl-1",), ("chatcmpl-2",), ("chatcmpl-3",)]


def test_a_full_queue_loses_records_and_waits_for_nothing(path: Path) -> None:
    ledger = Ledger(path, queue_size=3)
    ledger.add(record(0))
    settled(ledger, 1)
    with held(path) as database:
        for number in range(1, 600):
            ledger.add(record(number))  # returns, though nothing can be written
        assert ledger.stats().lost["acme"] > 0
        database.execute("COMMIT")
    ledger.close()
    stats = ledger.stats()
    assert stats.written + stats.lost["acme"] == 600
    assert stats.written == len(rows(path))


def test_what_comes_after_the_end_is_lost(path: Path) -> None:
    ledger = Ledger(path)
    ledger.close()
    ledger.close()
    ledger.add(record())
    assert ledger.stats() == LedgerStats(written=0, lost={"acme": 1})


@pytest.mark.parametrize("damage", ["text", "cut", "other database", "later version", "empty"])
def test_a_file_that_is_no_sound_ledger_is_moved_aside(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(path)
    for number in range(200):
        ledger.add(record(number))
    ledger.close()
    match damage:
        case "text":
            path.write_text("Dear diary, " * 1000)
        case "cut":
            data = path.read_bytes()
            path.write_bytes(data[:4096] + os.urandom(len(data) - 4096))
        case "other database":
            path.unlink()
            with closing(sqlite3.connect(path)) as database:
                database.execute("CREATE TABLE requests (something)")
        case "later version":
            with closing(sqlite3.connect(path)) as database:
                database.execute("PRAGMA user_version = 99")
        case "empty":
            path.write_bytes(b"")
    before = path.read_bytes()
    ledger = Ledger(path)
    ledger.add(record(1000))
    ledger.close()
    assert ledger.stats() == LedgerStats(written=1, lost={})
    assert rows(path) == [("chatcmpl-1000",)]
    aside = path.with_name("usage.db.damaged-1")
    if damage == "empty":
        assert not aside.exists(), "an empty file is as good as none"
    else:
        assert aside.read_bytes() == before
        assert str(aside) in caplog.text
    path.write_text("no database")
    ledger = Ledger(path)
    ledger.add(record(1001))
    ledger.close()
    assert rows(path) == [("chatcmpl-1001",)]
    assert path.with_name(f"usage.db.damaged-{1 if damage == 'empty' else 2}").exists()


def test_a_file_that_is_deleted_meanwhile_is_begun_anew(path: Path) -> None:
    ledger = Ledger(path)
    ledger.add(record(1))
    settled(ledger, 1)
    for file in path.parent.iterdir():
        file.unlink()
    ledger.add(record(2))
    ledger.close()
    assert rows(path) == [("chatcmpl-2",)]


def test_a_full_disk_loses_records_and_goes_on(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    def small(*arguments: object, **options: object) -> sqlite3.Connection:
        database = connect(*arguments, **options)  # type: ignore[call-overload]
        database.execute("PRAGMA max_page_count = 10")  # fails as a full disk does
        return database  # type: ignore[no-any-return]

    monkeypatch.setattr(sqlite3, "connect", small)
    ledger = Ledger(path)
    ledger.add(record(0))
    settled(ledger, 1)
    assert ledger.stats().written == 1
    for number in range(1, 1001):
        ledger.add(record(number))
    settled(ledger, 1001)
    assert ledger.stats().lost["acme"] > 0
    assert "full" in caplog.text
    monkeypatch.undo()
    ledger.add(record(2000))
    ledger.close()
    assert rows(path)[-1] == ("chatcmpl-2000",), "there is space again"
    assert len(rows(path)) == ledger.stats().written
    assert not path.with_name("usage.db.damaged-1").exists()


def test_a_place_that_cannot_be_written_costs_the_records_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (tmp_path / "file" / "usage.db", folder):
        caplog.clear()
        ledger = Ledger(path)
        for number in range(5):
            ledger.add(record(number))
            settled(ledger, number + 1)
        ledger.close()
        assert ledger.stats() == LedgerStats(written=0, lost={"acme": 5})
        assert [entry.levelno for entry in caplog.records] == [logging.ERROR]
    assert folder.is_dir()


def test_odd_values_cost_no_more_than_their_batch(path: Path) -> None:
    ledger = Ledger(path)
    ledger.add(record(1, id="half \ud83d", tenant="\ud83d\ude00", model="\0"))
    settled(ledger, 1)
    ledger.add(record(2, tokens=TokenCounts(prompt=2**70)))
    settled(ledger, 2)
    ledger.add(record(3))
    ledger.close()
    assert ledger.stats() == LedgerStats(written=2, lost={"acme": 1})
    assert rows(path, "id, tenant, model") == [
        ("half \ufffd", "\U0001f600", "\0"),
        ("chatcmpl-3", "acme", "small"),
    ]


def test_old_records_are_deleted_by_and_by(path: Path) -> None:
    clock = ManualClock(NOON)
    ledger = Ledger(path, keep_days=2, clock=clock)
    for number, days in enumerate((3, 1.5, 0)):
        ledger.add(record(number, time=NOON - days * 86400))
    settled(ledger, 3)
    assert rows(path) == [("chatcmpl-1",), ("chatcmpl-2",)]
    clock.advance(0.6 * 86400)
    ledger.add(record(3, time=clock.now()))
    ledger.close()
    assert rows(path) == [("chatcmpl-2",), ("chatcmpl-3",)]


def test_without_a_limit_records_stay(path: Path) -> None:
    ledger = Ledger(path)
    ledger.add(record(1, time=0.0))
    ledger.close()
    assert rows(path) == [("chatcmpl-1",)]


def test_records_are_kept_whole_after_a_crash(path: Path) -> None:
    ledger = Ledger(path)
    ledger.add(record(1))
    settled(ledger, 1)
    # As it lies on disk while the server runs, without anything that its end would do.
    copy = path.parent / "copy"
    copy.mkdir()
    for file in path.parent.glob("usage.db*"):
        (copy / file.name).write_bytes(file.read_bytes())
    assert rows(copy / "usage.db") == [("chatcmpl-1",)]
    ledger.close()
