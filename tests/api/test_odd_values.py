"""Every member of every request, with values nobody expects: an answer or a 400, never more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from anaphora.api.anthropic_bodies import CountRequest
from anaphora.api.anthropic_messages import MessagesRequest
from anaphora.api.edge import Body
from anaphora.api.openai_chat import ChatRequest
from anaphora.api.openai_completions import CompletionRequest
from anaphora.api.openai_responses import ResponsesRequest
from tests.api.conftest import Server

MESSAGES = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
REQUESTS: list[tuple[str, type[Body], dict[str, Any]]] = [
    ("/v1/chat/completions", ChatRequest, MESSAGES),
    ("/v1/completions", CompletionRequest, {"prompt": "Hi", "max_tokens": 1}),
    ("/v1/responses", ResponsesRequest, {"input": "Hi", "max_output_tokens": 1}),
    ("/v1/messages", MessagesRequest, MESSAGES),
    ("/v1/messages/count_tokens", CountRequest, {"messages": MESSAGES["messages"]}),
]
ODD = [
    *("null", "true", "0", "-1", "1e400", "-0.0", "1" * 400, "0.5", '""', '"x"', '"\\ud83d"'),
    *(
        "[]",
        "[null]",
        "[[]]",
        "[{}]",
        '["x"]',
        "{}",
        '{"type": 5}',
        '{"type": "x"}',
        '{"1": 1e300}',
    ),
    *('[{"role": "user"}]', '[{"type": "text"}]', '[{"type": null, "role": "user"}]'),
    *('[{"role": "tool", "content": "x"}]', '[{"role": "assistant", "content": []}]'),
    '[{"role": "assistant", "content": "x", "tool_calls": [{}]}]',
]


@pytest.mark.parametrize(("path", "kind", "usual"), REQUESTS, ids=lambda value: str(value)[:30])
def test_odd_values(server: Server, path: str, kind: type[Body], usual: dict[str, Any]) -> None:
    with server.http() as http:
        for name in kind.model_fields:
            for odd in ODD:
                body = json.dumps({**usual, name: "@"}).replace('"@"', odd)
                response = http.post(path, content=body)
                assert response.status_code in (200, 400), (body, response.text)
                if response.status_code == 400:
                    error = response.json()["error"]
                    assert error["type"] == "invalid_request_error"
                    assert "\n" not in error["message"]
