"""Images, audio and files: they can't be shown, and are refused rather than left out."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from tests.api.conftest import Server
from tests.api.talk import PATHS, Protocol

PIXEL = "data:image/png;base64,iVBORw0KGgo="
IMAGE_URL = {"type": "image_url", "image_url": {"url": PIXEL}}
INPUT_AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
FILE = {"type": "file", "file": {"file_id": "file-1"}}
VIDEO = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}
INPUT_IMAGE = {"type": "input_image", "image_url": PIXEL, "detail": "auto"}
INPUT_FILE = {"type": "input_file", "file_id": "file-1"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
IMAGE = {"type": "image", "source": SOURCE}
PDF = {"type": "document", "source": {**SOURCE, "media_type": "application/pdf"}}
LINKED = {"type": "document", "source": {"type": "url", "url": "https://example.com/a.pdf"}}
UPLOADED = {"type": "document", "source": {"type": "file", "file_id": "file-1"}}
PAGES = {"type": "document", "source": {"type": "content", "content": [IMAGE]}}
UPLOAD = {"type": "container_upload", "file_id": "file-1"}

Json = dict[str, Any]


def chat(role: str, *parts: Json, **members: Any) -> Json:
    first = {"role": "user", "content": "Look:"}
    called = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    before = [{"role": "assistant", "tool_calls": [called]}] if role == "tool" else []
    content = [{"type": "text", "text": "It is"}, *parts]
    return {"messages": [first, *before, {"role": role, "content": content, **members}]}


def resp(*parts: Json) -> Json:
    return {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}, *parts]}]}


def returned(kind: str, *parts: Json) -> Json:
    """A call of a tool, and what it returned."""
    text = {"type": "input_text", "text": "It is"}
    given = {"input": "{}"} if kind == "custom_tool_call" else {"arguments": "{}"}
    call = {"type": kind, "call_id": "c", "name": "look", **given}
    output = {"type": f"{kind}_output", "call_id": "c", "output": [text, *parts]}
    return {"input": [{"role": "user", "content": "Look."}, call, output]}


def msg(*blocks: Json, role: str = "user") -> Json:
    before = [] if role == "user" else [{"role": "user", "content": "Look:"}]
    content = [{"type": "text", "text": "It is"}, *blocks]
    return {"messages": [*before, {"role": role, "content": content}]}


def result(*blocks: Json) -> Json:
    use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    content = [{"type": "text", "text": "It is"}, *blocks]
    back = {"type": "tool_result", "tool_use_id": "t", "content": content}
    turns = [("user", "Look."), ("assistant", [use]), ("user", [back])]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize(
    ("protocol", "body", "place", "what"),
    [
        ("chat", chat("user", IMAGE_URL), "messages.1.content.1", "images"),
        ("chat", chat("user", INPUT_AUDIO), "messages.1.content.1", "audio"),
        ("chat", chat("user", FILE), "messages.1.content.1", "files"),
        ("chat", chat("user", VIDEO), "messages.1.content.1", "videos"),
        ("chat", chat("system", IMAGE_URL), "messages.1.content.1", "images"),
        ("chat", chat("assistant", IMAGE_URL), "messages.1.content.1", "images"),
        ("chat", chat("tool", IMAGE_URL), "messages.2.content.1", "images"),
        ("responses", resp(INPUT_IMAGE), "input.0.message.content.1", "images"),
        ("responses", resp(INPUT_FILE), "input.0.message.content.1", "files"),
        ("responses", resp(INPUT_AUDIO), "input.0.message.content.1", "audio"),
        (
            "responses",
            returned("function_call", INPUT_IMAGE),
            "input.2.function_call_output.output.1",
            "images",
        ),
        (
            "responses",
            returned("custom_tool_call", INPUT_FILE),
            "input.2.custom_tool_call_output.output.1",
            "files",
        ),
        (
            "responses",
            {"input": [{"type": "computer_call_output", "call_id": "c", "output": {}}]},
            "input.0",
            "images",
        ),
        (
            "responses",
            {"input": [{"type": "image_generation_call", "id": "ig_1", "result": "AAAA"}]},
            "input.0",
            "images",
        ),
        ("messages", msg(IMAGE), "messages.0.content.1", "images"),
        ("messages", msg(PDF), "messages.0.content.1", "PDFs"),
        ("messages", msg(LINKED), "messages.0.content.1", "PDFs"),
        ("messages", msg(UPLOADED), "messages.0.content.1", "files"),
        ("messages", msg(UPLOAD), "messages.0.content.1", "files"),
        ("messages", msg(PAGES), "messages.0.content.1.source.content.0", "images"),
        ("messages", msg(IMAGE, role="assistant"), "messages.1.content.1", "images"),
        ("messages", result(IMAGE), "messages.2.content.0.content.1", "images"),
        ("messages", result(PDF), "messages.2.content.0.content.1", "PDFs"),
        ("messages", result(PAGES), "messages.2.content.0.content.1.source.content.0", "images"),
    ],
)
def test_the_part_is_named_with_what_to_do(
    server: Server, protocol: Protocol, body: Json, place: str, what: str
) -> None:
    limit = {} if protocol == "responses" else {"max_tokens": 1}
    for stream in (False, True):
        sent = {**body, **limit, "stream": stream}
        response = server.http().post(PATHS[protocol], json=sent)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"].startswith(f"{place}: ")
        assert what in error["message"]
        assert error["message"].endswith("can't be shown to this model: send text")
        if protocol == "messages":
            assert response.json()["type"] == "error"
        else:
            assert error["param"] == place.split(".")[0]


@pytest.mark.parametrize(
    ("protocol", "body", "message"),
    [
        ("messages", {"system": [IMAGE], **msg()}, "system.0.type: Input should be 'text'"),
        ("messages", msg(IMAGE, role="system"), "messages.1.content.1: a system message holds"),
        ("chat", {**chat("user"), "modalities": ["text", "audio"]}, "modalities.1: Input should"),
        ("chat", {**chat("user"), "audio": {"voice": "a", "format": "wav"}}, "audio: is not supp"),
        (
            "chat",
            chat("assistant", audio={"id": "audio_1"}),
            "messages.1.audio: is not supported: leave it out",
        ),
    ],
)
def test_where_nothing_but_text_can_be(
    server: Server, protocol: Protocol, body: Json, message: str
) -> None:
    response = server.http().post(PATHS[protocol], json={"max_tokens": 1, **body})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


def test_the_clients_raise(server: Server) -> None:
    words = "images can't be shown"
    with pytest.raises(openai.BadRequestError, match=words):
        server.openai().chat.completions.create(model="local", **chat("user", IMAGE_URL))
    with pytest.raises(openai.BadRequestError, match=words):
        server.openai().responses.create(model="local", **resp(INPUT_IMAGE))
    with pytest.raises(anthropic.BadRequestError, match="images, PDFs and uploaded files can't"):
        server.anthropic().messages.create(model="local", max_tokens=1, **msg(IMAGE))
    with pytest.raises(anthropic.BadRequestError, match="images, PDFs and uploaded files can't"):
        server.anthropic().messages.count_tokens(model="local", **msg(IMAGE))
