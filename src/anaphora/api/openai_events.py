"""The events of a response's stream, as it is made or once more later."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from anaphora.answer.pieces import Call, Piece, merged
from anaphora.api import openai_items, streams
from anaphora.api.errors import as_api_error
from anaphora.prompt.conversation import Plain
from anaphora.responses import StoredResponse


class ResponseEvents:
    """Makes the events of one response, in their order, and numbers them from 0."""

    def __init__(self, head: Mapping[str, Any], request_id: str, custom: Collection[str]) -> None:
        """
        :param head: what is known of the response before it has begun.
        :param custom: names of the tools whose input is free text.
        """
        self.pieces: list[Piece] = []
        """What came so far, by events."""
        self._running = {
            **head,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        self._request_id = request_id
        self._custom = custom
        self._open: list[Piece] = []
        """The stretches of the item that is not complete yet."""
        self._logprobs: list[Plain] = []
        """How likely the tokens in them were."""
        self._index = -1
        """That of the latest item."""
        self._number = -1

    def begin(self) -> Iterator[bytes]:
        yield self._event("created", response=self._running)
        yield self._event("in_progress", response=self._running)

    def add(self, piece: Piece, logprobs: Sequence[Plain]) -> Iterator[bytes]:
        """The next piece of the answer, and how likely its tokens were."""
        self.pieces.append(piece)
        if self._open and type(self._open[0]) is not type(piece):
            (whole,) = merged(self._open)
            yield from self._close(self._item(whole, self._logprobs))
        if isinstance(piece, Call):
            yield from self._call(piece)
            return
        kind = openai_items.KINDS[type(piece)]
        if not self._open:
            self._index += 1
            item = {**self._item(type(piece)("")), "status": "in_progress", "content": []}
            yield self._event("output_item.added", output_index=self._index, item=item)
            part = kind.part("", ())
            yield self._event("content_part.added", **self._place(item), part=part)
        self._open.append(piece)
        self._logprobs += logprobs
        place = self._place(self._item(piece))
        more = {"logprobs": [*logprobs]} if kind.has_logprobs else {}
        yield self._event(f"{kind.event}.delta", **place, delta=piece.text, **more)

    def end(self, response: Mapping[str, Any]) -> Iterator[bytes]:
        """It is finished."""
        if self._open:
            yield from self._close(response["output"][-1])
        yield self._event(response["status"], response=response)

    def fail(self, error: Exception) -> bytes:
        told = as_api_error(error)
        failure = {"code": told.code or "server_error", "message": str(told)}
        failed = {**self._running, "status": "failed", "error": failure}
        return self._event("failed", response=failed)

    def _call(self, call: Call) -> Iterator[bytes]:
        """All of a call: it comes complete."""
        self._index += 1
        item = self._item(call)
        name, event = "arguments", "function_call_arguments"
        if item["type"] == "custom_tool_call":
            name, event = "input", "custom_tool_call_input"
        place = {"item_id": item["id"], "output_index": self._index}
        begun = {**item, "status": "in_progress", name: ""}
        yield self._event("output_item.added", output_index=self._index, item=begun)
        yield self._event(f"{event}.delta", **place, delta=item[name])
        yield self._event(f"{event}.done", **place, **{name: item[name]})
        yield self._event("output_item.done", output_index=self._index, item=item)

    def _close(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        """The open item is complete."""
        kind = openai_items.KINDS[type(self._open[0])]
        part, place = item["content"][0], self._place(item)
        more = {"logprobs": part["logprobs"]} if kind.has_logprobs else {}
        yield self._event(f"{kind.event}.done", **place, text=part["text"], **more)
        yield self._event("content_part.done", **place, part=part)
        yield self._event("output_item.done", output_index=self._index, item=item)
        self._open, self._logprobs = [], []

    def _item(self, piece: Piece, logprobs: Sequence[Plain] = ()) -> dict[str, Any]:
        return openai_items.output(
            piece, self._request_id, self._index, self._custom, logprobs=logprobs
        )

    def _place(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self._index, "content_index": 0}

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
    calls = [item for item in response["output"] if item["type"] == "custom_tool_call"]
    custom = {item["name"] for item in calls}
    events = ResponseEvents(head, stored.id.removeprefix("resp_"), custom)
    yield from events.begin()
    deltas = ((one, 0) if isinstance(one, int) else one for one in stored.deltas)
    for item in response["output"]:
        piece = openai_items.piece(item)
        if isinstance(piece, Call):
            yield from events.add(piece, ())
            continue
        logprobs = item["content"][0].get("logprobs", [])
        start = told = 0
        while start < len(piece.text) or told < len(logprobs):
            length, tokens = next(deltas)
            stretch = type(piece)(piece.text[start : start + length])
            yield from events.add(stretch, logprobs[told : told + tokens])
            start, told = start + length, told + tokens
    yield from events.end(response)
