"""The store of responses: whose they are, how long they last, and what happens to its file."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from anaphora.clock import ManualClock
from anaphora.errors import UnavailableError
from anaphora.responses import ResponseStore, StoredResponse
from tests.conftest import SOAK

T = TypeVar("T")
DAY = 86400.0
OpenStore = Callable[..., ResponseStore]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "responses.db"


@pytest.fixture
def open_store(path: Path, clock: ManualClock) -> Iterator[OpenStore]:
    stores: list[ResponseStore] = []

    def open_(**options: Any) -> ResponseStore:
        stores.append(ResponseStore(path, clock=clock, **options))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def turn(name: str, previous: str | None = None, text: str = "Hi") -> StoredResponse:
    return StoredResponse(name, previous, [text], {"id": name, "output": [f"{text}!"]}, {"n": 1})


def names(store: ResponseStore, name: str, tenant: str = "alice") -> list[str] | None:
    """The conversation up to ``name``, by ids."""
    turns = run(store.conversation(tenant, name))
    return None if turns is None else [stored.id for stored in turns]


def test_a_conversation_is_found_whole_also_later(open_store: OpenStore) -> None:
    store = open_store()
    assert run(store.save("alice", turn("a", text="ä\x00🌈")))
    assert run(store.save("alice", turn("b", "a")))
    assert run(store.save("alice", turn("c", "b")))
    assert run(store.save("alice", turn("other", "a")))
    store.close()
    store = open_store()
    assert names(store, "c") == ["a", "b", "c"]
    assert names(store, "other") == ["a", "other"]
    found = run(store.find("alice", "a"))
    assert found is not None
    assert found.items == ["ä\x00🌈", "ä\x00🌈!"]
    assert (found.previous, found.likeness) == (None, {"n": 1})


def test_a_tenants_responses_are_nobody_elses(open_store: OpenStore) -> None:
    store = open_store()
    run(store.save("alice", turn("a")))
    assert run(store.find("bob", "a")) is None
    assert names(store, "a", "bob") is None
    assert not run(store.delete("bob", "a"))
    assert not run(store.save("bob", turn("b", "a")))
    assert names(store, "a") == ["a"]


def test_items_are_found_by_the_response_they_are_of(
    open_store: OpenStore, clock: ManualClock
) -> None:
    store = open_store(keep_days=2)
    for name in ("a", "b"):
        items = [{"id": f"{name}{number}", "text": name} for number in range(3)]
        answer = {"id": name, "output": items[2:]}
        assert run(store.save("alice", StoredResponse(name, None, items[:2], answer)))
    wanted = {"a": {"a0", "a2", "b1"}, "b": ["b1"], "c": ["c1"]}
    found = run(store.items("alice", wanted))
    assert sorted(found.items()) == [(k, {"id": k, "text": k[0]}) for k in ("a0", "a2", "b1")]
    assert run(store.items("bob", wanted)) == {}
    clock.advance(2 * DAY)
    assert run(store.items("alice", wanted)) == {}


def test_they_expire_on_the_day(open_store: OpenStore, clock: ManualClock) -> None:
    store = open_store(keep_days=2)
    run(store.save("alice", turn("a")))
    clock.advance(DAY)
    run(store.save("alice", turn("b", "a")))
    clock.advance(DAY - 1)
    assert names(store, "a") == ["a"]
    clock.advance(1)
    assert names(store, "a") is None
    assert names(store, "b") == ["a", "b"], "it is part of what continues it"
    clock.advance(DAY)
    assert names(store, "b") is None


def test_what_is_deleted_or_expired_leaves_the_file(
    open_store: OpenStore, clock: ManualClock, path: Path
) -> None:
    store = open_store(keep_days=2)
    run(store.save("alice", turn("a")))
    run(store.save("alice", turn("b", "a")))
    assert run(store.delete("alice", "a"))
    assert not run(store.delete("alice", "a"))
    assert run(store.find("alice", "a")) is None
    assert names(store, "b") == ["a", "b"]
    assert count(path) == 2
    assert run(store.delete("alice", "b"))
    assert count(path) == 0
    run(store.save("alice", turn("c")))
    clock.advance(2 * DAY)
    run(store.save("bob", turn("d")))
    assert count(path) == 1


def count(path: Path) -> int:
    with sqlite3.connect(path) as database:
        return int(database.execute("SELECT count(*) FROM responses").fetchone()[0])


def test_whoever_has_most_makes_room(open_store: OpenStore, clock: ManualClock, path: Path) -> None:
    store = open_store(budget=20_000)
    assert run(store.save("bob", turn("b", text="x" * 1000)))
    for number in range(30):
        clock.advance(1)
        assert run(store.save("alice", turn(f"a{number}", text="x" * 1000)))
    assert names(store, "b", "bob") == ["b"]
    assert names(store, "a0") is None
    assert names(store, "a29") == ["a29"]
    assert path.stat().st_size < 200_000
    assert not run(store.save("alice", turn("large", text="x" * 20_000)))
    assert names(store, "a29") == ["a29"], "nothing goes for what can't be kept anyway"


def test_a_conversation_goes_from_its_end(open_store: OpenStore, clock: ManualClock) -> None:
    store = open_store(budget=6_000)
    for name, previous in [("a", None), ("b", "a"), ("c", None), ("d", None)]:
        clock.advance(1)
        assert run(store.save("alice", turn(name, previous, text="x" * 500)))
    assert names(store, "b") is None
    assert names(store, "d") == ["d"]


def test_a_response_whose_past_is_gone_is_not_stored(open_store: OpenStore) -> None:
    store = open_store()
    assert not run(store.save("alice", turn("b", "a")))
    assert run(store.find("alice", "b")) is None


@pytest.mark.parametrize("damage", ["text", "other", "page"])
def test_a_damaged_file_is_moved_aside(open_store: OpenStore, path: Path, damage: str) -> None:
    store = open_store()
    for number in range(50):
        run(store.save("alice", turn(f"a{number}", text="x" * 1000)))
    store.close()
    if damage == "page":
        data = bytearray(path.read_bytes())
        data[4096:] = b"\xff" * len(data[4096:])
        path.write_bytes(data)
    else:
        path.unlink()
        if damage == "text":
            path.write_text("no database" * 500)
        else:
            with sqlite3.connect(path) as database:
                database.execute("CREATE TABLE recipes (name TEXT)")
    store = open_store()
    assert run(store.find("alice", "a1")) is None
    assert run(store.save("alice", turn("new")))
    assert names(store, "new") == ["new"]
    assert path.with_name("responses.db.damaged-1").exists()


def test_a_file_that_is_deleted_begins_anew(open_store: OpenStore, path: Path) -> None:
    store = open_store()
    run(store.save("alice", turn("a")))
    path.unlink()
    assert run(store.find("alice", "a")) is None
    assert run(store.save("alice", turn("b")))
    assert names(store, "b") == ["b"]


def test_a_place_that_cannot_be_used_is_said(
    open_store: OpenStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.mkdir(parents=True)
    store = open_store()
    assert not run(store.save("alice", turn("a")))
    assert str(path) in caplog.text
    with pytest.raises(UnavailableError):
        run(store.find("alice", "a"))
    path.rmdir()
    assert run(store.save("alice", turn("a")))


def test_a_locked_file_is_waited_for_a_moment(open_store: OpenStore, path: Path) -> None:
    store = open_store()
    assert run(store.save("alice", turn("a")))
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert not run(store.save("alice", turn("b")))
        other.execute("COMMIT")
    assert run(store.save("alice", turn("b")))
    assert names(store, "a") == ["a"]


def test_case_26_memory_stays_bounded(open_store: OpenStore) -> None:
    store = open_store()

    async def save(count: int, start: int) -> None:
        for number in range(start, start + count):
            assert await store.save("alice", turn(f"a{number}", text="x" * 20_000))

    run(save(100, 0))
    before = psutil.Process().memory_info().rss
    run(save(5_000 if SOAK else 1_000, 100))  # 20 MB at least
    assert psutil.Process().memory_info().rss - before < 10 << 20


def test_two_servers_share_a_file(open_store: OpenStore) -> None:
    one, other = open_store(), open_store()
    assert run(one.save("alice", turn("a")))
    assert run(other.save("alice", turn("b", "a")))
    assert names(one, "b") == ["a", "b"]
