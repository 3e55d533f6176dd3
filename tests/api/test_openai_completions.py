"""Completions of a raw prompt, by OpenAI's own client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.api.conftest import DOCUMENT, Serve, Server


def complete(server: Server, prompt: Any = DOCUMENT, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 8, **options}
    return server.openai().completions.create(model="any", prompt=prompt, **options)


def test_text_and_tokens_are_the_same_prompt(serve: Serve) -> None:
    server = serve()
    tokens = server.model.tokenize(DOCUMENT).tolist()
    first = complete(server)
    assert first.id.startswith("cmpl-")
    assert first.usage.prompt_tokens == len(tokens)
    for prompt in (tokens, [DOCUMENT], [tokens]):
        again = complete(server, prompt)
        assert again.choices[0].text == first.choices[0].text
        assert again.usage.prompt_tokens_details.cached_tokens == len(tokens)


def test_a_stream_joined_is_the_unstreamed_text(server: Server) -> None:
    whole = complete(server, max_tokens=40)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = complete(server, max_tokens=40, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)


def test_the_async_client(server: Server) -> None:
    async def talk() -> str:
        async with server.async_openai() as client:
            stream = await client.completions.create(
                model="any", prompt=DOCUMENT, temperature=0, max_tokens=8, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(talk()) == complete(server).choices[0].text


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": ["a", "b"]},
        {"prompt": [10**6]},
        {"prompt": [10**30]},
        {"prompt": [-1]},
        {"prompt": [True]},
        {"prompt": {"text": "a"}},
        {"prompt": None},
        {"n": 0},
        {"n": 9},
        {"best_of": 2},
        {"best_of": 1, "n": 2},
        {"best_of": 0},
        {"echo": True},
        {"logprobs": 6},
        {"logprobs": -1},
        {"logprobs": True},
        {"suffix": "end"},
    ],
)
def test_what_cannot_be_ignored_is_refused(server: Server, options: dict[str, Any]) -> None:
    body = {"prompt": "Hi", "max_tokens": 1, **options}
    response = server.http().post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
