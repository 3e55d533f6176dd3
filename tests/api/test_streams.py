"""Streams and connections: characters, disconnects, long prefills, the end of the server."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from anaphora.api import streams
from anaphora.api.endpoint import Options
from tests.api.conftest import DOCUMENT, Serve, Server
from tests.tiny_models import VOCABULARY

CHAT = "/v1/chat/completions"
LONG = [{"role": "user", "content": DOCUMENT}]
SHORT = [{"role": "user", "content": "Hi"}]
NEVER_ENDING = {str(VOCABULARY.index(end)): -100 for end in ("<|im_end|>", "<|endoftext|>")}
"""Keeps the tiny model from ending its answer."""


def chat(server: Server, **options: Any) -> dict[str, Any]:
    response = server.http().post(CHAT, json={"messages": SHORT, **options})
    assert response.status_code == 200
    data: dict[str, Any] = response.json()
    return data


def data_lines(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def wait_until_idle(server: Server, seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while server.metric("anaphora_requests_running") + server.metric("anaphora_requests_waiting"):
        assert time.monotonic() < end
        time.sleep(0.02)


def joined(server: Server, path: str, body: dict[str, Any]) -> str:
    """The text of a streamed answer."""
    text = ""
    with server.http().stream("POST", path, json={**body, "stream": True}) as response:
        for event in data_lines(response):
            if path == CHAT:
                text += event["choices"][0]["delta"].get("content") or ""
            elif event["type"] == "content_block_delta":
                text += event["delta"]["text"]
    return text


def test_nothing_in_an_event_looks_like_the_end_of_a_line() -> None:
    text = "a\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r\nb"
    (line, _, _) = streams.event({"text": text}).decode().split("\n")
    assert line.splitlines() == [line]
    assert json.loads(line[6:]) == {"text": text}


@pytest.mark.parametrize("seed", range(6))
def test_characters_are_never_cut(server: Server, seed: int) -> None:
    messages = [{"role": "user", "content": "Repeat: 👩‍👩‍👧‍👦 🏳️‍🌈 漢字 é"}]
    # A random model writes random bytes: most characters it begins are never finished.
    body = {"messages": messages, "temperature": 2, "seed": seed, "stop": ["🌈"]}
    for max_tokens in (1, 2, 3, 5, 8, 60):
        whole = chat(server, **body, max_tokens=max_tokens)
        text = whole["choices"][0]["message"]["content"]
        assert joined(server, CHAT, {**body, "max_tokens": max_tokens}) == text
    following = [*messages, {"role": "assistant", "content": text}, *SHORT]
    again = chat(server, messages=following, max_tokens=1)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= whole["usage"]["prompt_tokens"]


def test_messages_streams_the_same_text(server: Server) -> None:
    body = {"messages": SHORT, "temperature": 0, "max_tokens": 60}
    whole = server.http().post("/v1/messages", json=body).json()
    assert joined(server, "/v1/messages", body) == whole["content"][0]["text"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(serve: Serve, stream: bool) -> None:
    server = serve(parallel=1)
    expected = chat(server, temperature=0, max_tokens=200)["choices"][0]["message"]["content"]
    answers: list[str] = []

    def stay() -> None:
        body = {"messages": SHORT, "temperature": 0, "max_tokens": 200}
        answers.append(joined(server, CHAT, body))

    for _ in range(5):
        staying = threading.Thread(target=stay)
        staying.start()
        for messages in (LONG, SHORT):
            body = {"messages": messages, "stream": stream, "max_tokens": 5000}
            leave_early(server, {**body, "logit_bias": NEVER_ENDING})
        staying.join()
    wait_until_idle(server)
    end = time.monotonic() + 5
    assert answers == [expected] * 5
    assert server.metric("anaphora_generated_tokens_total") < 6 * 200 + 5000
    while server.call(tasks()) > 3:  # the server's own two, and the one that counts
        assert time.monotonic() < end
        time.sleep(0.02)


def leave_early(server: Server, body: dict[str, Any]) -> None:
    """Send a request and close the connection before its answer can be complete."""
    content = json.dumps(body).encode()
    host = server.url.removeprefix("http://")
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(content)}\r\n\r\n"
    name, port = host.split(":")
    with socket.create_connection((name, int(port))) as connection:
        connection.sendall(head.encode() + content)
        time.sleep(0.05)


async def tasks() -> int:
    return len(asyncio.all_tasks())


def test_leaving_right_after_the_start_keeps_the_prompt(serve: Serve) -> None:
    server = serve()
    body = {"messages": LONG, "stream": True, "max_tokens": 5000, "temperature": 0}
    with server.http().stream("POST", "/v1/messages", json=body) as response:
        events = data_lines(response)
        assert next(events)["type"] == "message_start"
        next(event for event in events if event["type"] == "content_block_delta")
    wait_until_idle(server)
    usage = chat(server, messages=LONG, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
    assert server.metric("anaphora_prompt_tokens_total") == 2 * usage["prompt_tokens"]


@pytest.mark.parametrize("stream", [True, False])
def test_each_resend_of_an_abandoned_prefill_gets_further(serve: Serve, stream: bool) -> None:
    small: dict[str, Any] = {"parallel": 1, "llama": {"n_batch": 64, "n_ubatch": 64}}
    body = {"messages": [{"role": "user", "content": DOCUMENT * 5}], "max_tokens": 1}
    twin, server = serve(**small), serve(**small)
    for warming_up in (twin, server):
        chat(warming_up, max_tokens=1)
    began = time.monotonic()
    chat(twin, **body)
    patience = 0.4 * (time.monotonic() - began)
    attempts = 0
    while True:
        attempts += 1
        assert attempts <= 10
        try:
            usage = answered_within(server, {**body, "stream": stream}, patience)
        except (TimeoutError, httpx.ReadTimeout):
            wait_until_idle(server)
            continue
        break
    assert attempts > 1
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert server.metric("anaphora_computed_tokens_total") < 2 * usage["prompt_tokens"]


def answered_within(server: Server, body: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The usage of a request that is given up after ``seconds``."""
    usage: dict[str, Any] = {}
    end = time.monotonic() + seconds
    body["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=seconds) as response:
        if not body["stream"]:
            response.read()
            usage = response.json()["usage"]
        else:
            for line in response.iter_lines():
                if time.monotonic() > end:
                    raise TimeoutError
                if line.startswith("data: {"):
                    usage = json.loads(line[6:])["usage"] or usage
    return usage


def test_a_silent_stream_shows_that_it_lives(serve: Serve) -> None:
    server = serve(options=Options(heartbeat=0.01), llama={"n_batch": 64, "n_ubatch": 64})
    for path in (CHAT, "/v1/messages"):
        text = path + DOCUMENT * 5
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "stream": True}
        raw = server.http().post(path, json=body).text
        assert (": keep-alive" if path == CHAT else "event: ping") in raw
        assert "[DONE]" in raw or "message_stop" in raw


def test_stopping_ends_what_runs_with_an_error_and_takes_nothing_new(serve: Serve) -> None:
    server = serve()
    body = {"messages": SHORT, "max_tokens": 8000, "stream": True, "logit_bias": NEVER_ENDING}
    with server.http().stream("POST", CHAT, json=body) as response:
        events = data_lines(response)
        next(events)
        draining = threading.Thread(target=lambda: server.call(server.serving.drain(0.2)))
        draining.start()
        *_, last = events
        draining.join()
    assert "stopping" in last["error"]["message"]
    refused = server.http().post(CHAT, json={"messages": SHORT})
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert server.http().get("/health").status_code == 503


def test_a_request_in_flight_may_finish_while_stopping(serve: Serve) -> None:
    server = serve()
    body = {"messages": SHORT, "max_tokens": 100, "stream": True, "logit_bias": NEVER_ENDING}
    with server.http().stream("POST", CHAT, json=body) as response:
        events = data_lines(response)
        next(events)
        draining = threading.Thread(target=lambda: server.call(server.serving.drain(30)))
        draining.start()
        *_, last = events
        draining.join()
    assert last["choices"][0]["finish_reason"] == "length"
