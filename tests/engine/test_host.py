"""The thread around an engine, with an engine that only answers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from anaphora.engine.host import EngineHost
from anaphora.engine.protocol import Done, Emit, EngineInfo, Event, Failed, Request, Times
from anaphora.errors import EngineError


class Answering:
    """Ends every request in its next step, except those whose id says otherwise."""

    info = EngineInfo("fake", "none", "attention", False, 10, 10, 1)
    vocabulary: Any = None

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._running: list[str] = []
        self.closed = 0

    def submit(self, request: Request) -> None:
        self._running.append(request.id)

    def cancel(self, request_id: str) -> None:
        if request_id in self._running:
            self._end(request_id, "cancelled")

    def step(self) -> float | None:
        for request_id in list(self._running):
            if request_id == "broken":
                raise ZeroDivisionError
            if not request_id.startswith("slow"):
                self._end(request_id, "length")
        return None

    def stats(self) -> None:
        return None

    def close(self) -> None:
        self.closed += 1
        for request_id in list(self._running):
            self._end(request_id, "cancelled")

    def _end(self, request_id: str, reason: Any) -> None:
        self._running.remove(request_id)
        self._emit(Done(request_id, reason, None, 1, 1, 0, Times()))


class Client:
    """Collects the events of all its requests."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.engines: list[Answering] = []
        self.host = EngineHost(self._make)

    def _make(self, emit: Emit) -> Answering:
        self.engines.append(Answering(emit))
        return self.engines[-1]

    def submit(self, name: str, listener: Callable[[Event], None] | None = None) -> None:
        request = Request(name, np.array([1], dtype=np.int32), 1)
        self.host.submit(request, listener or self.events.put)

    def next(self) -> Event:
        return self.events.get(timeout=10)

    def failure(self) -> EngineError:
        event = self.next()
        assert isinstance(event, Failed)
        assert isinstance(event.error, EngineError)
        return event.error

    def reason(self) -> str:
        event = self.next()
        assert isinstance(event, Done)
        return event.reason


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.host.close()


def test_an_id_in_use_is_refused_and_free_again_afterwards(client: Client) -> None:
    client.submit("slow")
    client.submit("slow")
    assert "another id" in str(client.failure())
    client.host.cancel("slow")
    assert client.reason() == "cancelled"
    client.submit("slow")
    client.host.cancel("slow")
    assert client.reason() == "cancelled"


def test_an_engine_that_breaks_fails_its_requests_and_all_later_ones(client: Client) -> None:
    client.submit("slow")
    client.submit("broken")
    assert "unexpected" in str(client.failure())
    assert "unexpected" in str(client.failure())
    client.submit("late")
    assert "unexpected" in str(client.failure())
    client.host.close()
    assert client.engines[0].closed == 1
    assert client.events.empty()


def test_closing_cancels_what_runs_and_may_be_done_twice(client: Client) -> None:
    client.submit("slow")
    client.host.close()
    client.host.close()
    assert client.reason() == "cancelled"
    client.submit("late")
    assert "closed" in str(client.failure())
    client.host.cancel("late")
    assert client.engines[0].closed == 1


def test_a_listener_that_fails_harms_nobody(client: Client) -> None:
    def fail(event: Event) -> None:
        raise ZeroDivisionError

    client.submit("first", fail)
    client.submit("second")
    assert client.reason() == "length"


def test_a_listener_may_submit_cancel_and_close(client: Client) -> None:
    def go_on(event: Event) -> None:
        client.events.put(event)
        client.submit("slow")
        client.host.cancel("slow")
        client.submit("slow too")
        client.host.close()

    client.submit("first", go_on)
    assert [client.reason() for _ in range(3)] == ["length", "cancelled", "cancelled"]


def test_cancelling_before_and_after_its_time_is_nothing(client: Client) -> None:
    client.host.cancel("early")
    client.submit("early")
    assert client.reason() == "length"
    client.host.cancel("early")
    threads = [threading.Thread(target=client.submit, args=(f"r{i}",)) for i in range(20)]
    for thread in threads:
        thread.start()
    assert [client.reason() for _ in threads] == ["length"] * 20
