"""One conversation in the words of three protocols."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.api.conftest import Server

Protocol = Literal["chat", "messages", "responses"]
PROTOCOLS: tuple[Protocol, ...] = ("chat", "messages", "responses")
PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
Turn = dict[str, Any]


def system(text: str) -> Turn:
    return {"role": "system", "content": text}


def user(text: str) -> Turn:
    return {"role": "user", "content": text}


def assistant(text: str) -> Turn:
    return {"role": "assistant", "content": text}


@dataclass(frozen=True)
class Said:
    """An answer, however it came."""

    text: str
    prompt: int
    read: int
    written: int
    output: int
    """Tokens."""


def request(protocol: Protocol, turns: Sequence[Turn], max_tokens: int = 4, **more: Any) -> Turn:
    """The body that asks for the next answer. The first system message goes where it belongs."""
    body: dict[str, Any] = {"temperature": 0, **more}
    match protocol:
        case "chat":
            return {"messages": [*turns], "max_tokens": max_tokens, **body}
        case "messages":
            head = {"system": turns[0]["content"]} if turns[0]["role"] == "system" else {}
            rest = [*turns[len(head) :]]
            return {**head, "messages": rest, "max_tokens": max_tokens, **body}
        case "responses":
            return {"input": [*turns], "max_output_tokens": max_tokens, **body}


def said(protocol: Protocol, reply: dict[str, Any]) -> Said:
    """What an unstreamed reply says."""
    match protocol:
        case "chat":
            text = reply["choices"][0]["message"]["content"] or ""
        case "messages":
            text = "".join(block.get("text", "") for block in reply["content"])
        case "responses":
            parts = (part for item in reply["output"] for part in item.get("content", ()))
            text = "".join(part["text"] for part in parts)
    return _counted(protocol, text, reply["usage"])


def ask(server: Server, protocol: Protocol, turns: Sequence[Turn], *args: Any, **more: Any) -> Said:
    """The next answer, unstreamed."""
    body = request(protocol, turns, *args, **more)
    response = server.http().post(PATHS[protocol], json=body)
    assert response.status_code == 200, response.text
    return said(protocol, response.json())


def events(server: Server, protocol: Protocol, body: Turn) -> Generator[dict[str, Any], None, None]:
    """The events of a stream as they come; to close it is to leave.

    Every one must be valid JSON in valid UTF-8.
    """
    options = {"stream_options": {"include_usage": True}} if protocol == "chat" else {}
    body = {**body, "stream": True, **options}
    with server.http().stream("POST", PATHS[protocol], json=body) as response:
        assert response.status_code == 200
        pending = b""
        for data in response.iter_raw():
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield json.loads(line[6:].decode())


def hear(
    server: Server, protocol: Protocol, turns: Sequence[Turn], *args: Any, **more: Any
) -> Said:
    """The next answer, streamed."""
    return heard(protocol, events(server, protocol, request(protocol, turns, *args, **more)))


def heard(protocol: Protocol, stream: Iterator[dict[str, Any]]) -> Said:
    """What a stream says, read as its protocol wants it."""
    text = ""
    usage: dict[str, Any] = {}
    for event in stream:
        match event:
            case {"choices": [{"delta": delta}]}:
                text += delta.get("content", "")
            case {"choices": [], "usage": usage}:
                pass
            case {"type": "message_start", "message": {"usage": usage}}:
                pass
            case {"type": "content_block_delta", "delta": {"text": piece}}:
                text += piece
            case {"type": "message_delta", "usage": later}:
                usage = {**usage, **later}
            case {"type": "response.output_text.delta", "delta": piece}:
                text += piece
            case {"type": "response.completed" | "response.incomplete", "response": response}:
                assert said("responses", response).text == text
                usage = response["usage"]
    return _counted(protocol, text, usage)


def _counted(protocol: Protocol, text: str, usage: dict[str, Any]) -> Said:
    if protocol == "messages":
        read, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        prompt, output = usage["input_tokens"] + read + written, usage["output_tokens"]
    else:
        names = ("prompt", "completion") if protocol == "chat" else ("input", "output")
        prompt, output = (usage[f"{name}_tokens"] for name in names)
        details = usage[f"{names[0]}_tokens_details"]
        read, written = details["cached_tokens"], details["cache_write_tokens"]
        assert usage["total_tokens"] == prompt + output
    assert all(type(count) is int for count in (prompt, read, written, output))
    assert read + written <= prompt
    return Said(text, prompt, read, written, output)
