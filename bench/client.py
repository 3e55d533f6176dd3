"""A client that does nothing but take times: streams, and a new connection for each request."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer. Times are seconds from before the connection was made."""

    text: str
    first_token: float
    """When the first text came."""
    last_token: float
    """When the last one came."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int

    @property
    def speed(self) -> float:
        """Tokens a second, behind the first one."""
        return (self.generated_tokens - 1) / (self.last_token - self.first_token)


def ask(port: int, path: str, body: Mapping[str, Any]) -> Answer:
    """Send ``body`` to one of OpenAI's older endpoints on this machine.

    Raises ``RuntimeError`` for anything but a complete answer with text.
    """
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    texts: list[tuple[float, str]] = []
    usage: dict[str, Any] = {}
    began = time.perf_counter()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
        connection.request("POST", path, data, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {response.read().decode()}")
        for event in _events(response):
            if "error" in event:
                raise RuntimeError(f"{path}: {event['error']}")
            if text := _text(event):
                texts.append((time.perf_counter() - began, text))
            usage = event.get("usage") or usage
    if not texts or not usage:
        raise RuntimeError(f"{path}: no answer came")
    return Answer(
        "".join(text for _, text in texts),
        texts[0][0],
        texts[-1][0],
        usage["prompt_tokens"],
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        usage["completion_tokens"],
    )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        if line.startswith(b"data: {"):
            yield json.loads(line[len(b"data: ") :])


def _text(event: Mapping[str, Any]) -> str | None:
    """What a chunk of a chat or of a continued prompt adds to the text."""
    if not event.get("choices"):
        return None
    choice = event["choices"][0]
    text: str | None = choice["text"] if "text" in choice else choice["delta"].get("content")
    return text
