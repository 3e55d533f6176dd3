"""The events of a response's stream, as it is made or once more later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from anaphora.api import openai_items, streams
from anaphora.api.errors import as_api_error
from anaphora.responses import StoredResponse


class ResponseEvents:
    """Makes the events of one response, in their order, and numbers them from 0."""

    def __init__(self, head: Mapping[str, Any], item_id: str) -> None:
        """
        :param head: what is known of the response before it has begun.
        :param item_id: of its message.
        """
        self.texts: list[str] = []
        """What came so far, by events."""
        self._running = {
            **head,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        self._place: dict[str, Any] = {"item_id": item_id, "output_index": 0, "content_index": 0}
        self._number = -1

    def begin(self) -> Iterator[bytes]:
        yield self._event("created", response=self._running)
        yield self._event("in_progress", response=self._running)

    def add(self, text: str) -> Iterator[bytes]:
        """The next piece of the answer."""
        if not self.texts:
            item = openai_items.answer(self._place["item_id"], "in_progress")
            yield self._event("output_item.added", output_index=0, item=item)
            part = openai_items.text_part("")
            yield self._event("content_part.added", **self._place, part=part)
        self.texts.append(text)
        yield self._event("output_text.delta", **self._place, delta=text, logprobs=[])

    def end(self, response: Mapping[str, Any]) -> Iterator[bytes]:
        """It is finished."""
        if self.texts:
            text = "".join(self.texts)
            yield self._event("output_text.done", **self._place, text=text, logprobs=[])
            part = openai_items.text_part(text)
            yield self._event("content_part.done", **self._place, part=part)
            item = response["output"][0]
            yield self._event("output_item.done", output_index=0, item=item)
        yield self._event(response["status"], response=response)

    def fail(self, error: Exception) -> bytes:
        told = as_api_error(error)
        failure = {"code": told.code or "server_error", "message": str(told)}
        failed = {**self._running, "status": "failed", "error": failure}
        return self._event("failed", response=failed)

    def _event(self, name: str, **members: Any) -> bytes:
        self._number += 1
        kind = f"response.{name}"
        return streams.event({"type": kind, "sequence_number": self._number, **members}, kind)


def replay(stored: StoredResponse, after: int) -> Iterator[bytes]:
    """The events of a stored response, the same that its stream had.

    :param after: number of the event before them.
    """
    return (event for number, event in enumerate(_all(stored)) if number > after)


def _all(stored: StoredResponse) -> Iterator[bytes]:
    response = stored.response
    # Only known at the end.
    head = {name: response[name] for name in response if name != "prompt_cache_diagnostics"}
    events = ResponseEvents(head, openai_items.output_id(stored.id.removeprefix("resp_")))
    yield from events.begin()
    text = "".join(part["text"] for item in response["output"] for part in item["content"])
    start = 0
    for length in stored.deltas:
        yield from events.add(text[start : start + length])
        start += length
    yield from events.end(response)
