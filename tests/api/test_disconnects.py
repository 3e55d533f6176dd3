"""Clients that leave, again and again: nobody else notices, and nothing piles up."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

from tests.api.conftest import DOCUMENT, Serve, Server
from tests.api.test_streams import CHAT, NEVER_ENDING, data_lines, wait_until_idle
from tests.conftest import SOAK

ROUNDS = 50 if SOAK else 10


def body(text: str, max_tokens: int, *, stream: bool) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "logit_bias": NEVER_ENDING,
        "stream": stream,
    }


def leave_waiting(server: Server, text: str, *, stream: bool) -> None:
    """Ask, and be gone while the request waits, or as soon as it runs."""
    asked: dict[str, Any] = {"json": body(text, 5000, stream=stream), "timeout": 0.05}
    with server.http() as http, suppress(httpx.ReadTimeout):
        if stream:
            with http.stream("POST", CHAT, **asked) as response:
                next(data_lines(response))
        else:
            http.post(CHAT, **asked)
            pytest.fail("5,000 tokens came at once")


def leave_prefill(server: Server, text: str) -> None:
    """Leave when the prompt is about to be computed."""
    with (
        server.http() as http,
        http.stream("POST", CHAT, json=body(text, 50, stream=True)) as response,
    ):
        next(data_lines(response))


def ask(server: Server, text: str, max_tokens: int = 1) -> httpx.Response:
    with server.http() as http:
        return http.post(CHAT, json=body(text, max_tokens, stream=False))


@pytest.mark.parametrize("stream", [True, False])
def test_those_who_leave_harm_nobody_and_leave_nothing(serve: Serve, stream: bool) -> None:
    server = serve(parallel=1, memory_budget=4 << 20)
    long = DOCUMENT * 4
    threads_before = None
    with ThreadPoolExecutor() as pool:
        for number in range(ROUNDS):
            running: Future[str]
            running = pool.submit(answer, server, f"{number} {DOCUMENT}", stream)
            leave_waiting(server, f"{number} waiting {DOCUMENT}", stream=stream)
            assert len(running.result(60)) > 0
            leave_prefill(server, f"{number} {long}")
            wait_until_idle(server)
            resent = ask(server, f"{number} {long}")
            usage = resent.json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
            if threads_before is None:
                threads_before = threading.active_count(), psutil.Process().num_fds()
    # Everything can be evicted: nothing of those who left is held any more.
    for number in range(8):
        ask(server, f"fill {number} {long}")
    stats = server.model.stats()
    assert stats is not None
    assert stats.memory_used <= stats.memory_budget
    assert stats.evicted_from_memory > 0
    last = ask(server, f"fill 7 {long}")
    assert int(last.headers["anaphora-computed-tokens"]) <= 64
    wait_until_idle(server)
    assert threads_before is not None
    assert threading.active_count() <= threads_before[0] + 2
    assert psutil.Process().num_fds() <= threads_before[1] + 8


def answer(server: Server, text: str, stream: bool) -> str:
    """The whole text of an answer of 400 tokens."""
    if not stream:
        response = ask(server, text, 400)
        assert response.json()["choices"][0]["finish_reason"] == "length"
        whole: str = response.json()["choices"][0]["message"]["content"]
        return whole
    parts, finish = [], None
    with (
        server.http() as http,
        http.stream("POST", CHAT, json=body(text, 400, stream=True)) as response,
    ):
        for line in data_lines(response):
            parts.append(line["choices"][0]["delta"].get("content") or "")
            finish = line["choices"][0]["finish_reason"]
    assert finish == "length"
    return "".join(parts)
