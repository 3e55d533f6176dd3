"""How likely tokens were, by OpenAI's own client."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from anaphora.engine.logprobs import LEAST
from anaphora.responses import ResponseStore
from tests.api.conftest import DOCUMENT, Serve, Server
from tests.api.test_streams import NEVER_ENDING
from tests.conftest import TinyModel

QUESTION: list[Any] = [{"role": "user", "content": DOCUMENT}]
INCLUDE: Any = ["message.output_text.logprobs"]
LASTING: dict[str, Any] = {"model": "x", "logit_bias": NEVER_ENDING, "seed": 5}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SAID = (
    "<think>\nLet me see.\n</think>\n\nI will look.\n"
    '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
)


def chat(server: Server, **options: Any) -> Any:
    options = {"messages": QUESTION, "max_tokens": 40, "logprobs": True, **LASTING, **options}
    return server.openai().chat.completions.create(**options)


def complete(server: Server, **options: Any) -> Any:
    options = {"prompt": DOCUMENT, "max_tokens": 40, **LASTING, **options}
    return server.openai().completions.create(**options)


def text_of(logprobs: Sequence[Any]) -> str:
    """Without a last character that is incomplete."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(bytes_of(logprobs))


def bytes_of(logprobs: Sequence[Any]) -> bytes:
    return b"".join(bytes(one.bytes) for one in logprobs)


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether they tell the same, but for the rounding of what was cached or not."""
    return all(
        one.token == other.token and one.logprob == pytest.approx(other.logprob, abs=1e-3)
        for one, other in zip(some, others, strict=True)
    )


def check(logprobs: Sequence[Any], top: int) -> None:
    for one in logprobs:
        likeliest = [other.logprob for other in one.top_logprobs]
        assert len(likeliest) == top
        assert likeliest == sorted(likeliest, reverse=True)
        assert all(LEAST <= other <= 0 for other in [*likeliest, one.logprob])
        assert one.logprob <= max([*likeliest, 0])
        assert sum(map(math.exp, likeliest)) <= 1 + 1e-6
        for other in [one, *one.top_logprobs]:
            try:
                assert other.token == bytes(other.bytes).decode() or other.token in CONTROL
            except UnicodeDecodeError:
                assert other.token == "".join(f"\\x{byte:02x}" for byte in other.bytes)


CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def test_chat_tells_them_streamed_and_not(server: Server) -> None:
    reply = chat(server, top_logprobs=3)
    (choice,) = reply.choices
    told = choice.logprobs.content
    assert choice.logprobs.refusal is None
    assert len(told) == reply.usage.completion_tokens == 40
    assert text_of(told) == choice.message.content
    check(told, 3)
    first, *chunks = chat(server, top_logprobs=3, stream=True)
    assert first.choices[0].logprobs is None
    assert chunks[-1].choices[0].logprobs is None
    streamed, before = [], ""
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        before += choice.delta.content
        streamed += choice.logprobs.content
        # A token is told with its text, and never before it.
        assert bytes_of(streamed).decode("utf-8", "replace").startswith(before)
    assert same(streamed, told)


def test_without_candidates_and_without_asking(server: Server) -> None:
    check(chat(server).choices[0].logprobs.content, 0)
    assert chat(server, logprobs=None).choices[0].logprobs is None
    assert chat(server, logprobs=False, top_logprobs=0).choices[0].logprobs is None
    assert complete(server).choices[0].logprobs is None
    assert all(chunk.choices[0].logprobs is None for chunk in complete(server, stream=True))


def test_completions_have_columns(server: Server) -> None:
    reply = complete(server, logprobs=2)
    (choice,) = reply.choices
    told = choice.logprobs
    assert len(told.tokens) == reply.usage.completion_tokens == 40
    assert len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 40
    for token, logprob, likeliest in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert likeliest[token] == logprob
        assert 2 <= len(likeliest) <= 3
        assert max(likeliest.values()) <= 0
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        if not token.startswith("bytes:\\x") and token not in CONTROL:
            assert choice.text.startswith(token, offset)
    columns: dict[str, list[Any]] = {}
    for chunk in complete(server, logprobs=2, stream=True):
        part = chunk.choices[0].logprobs
        for name, values in (part.to_dict() if part else {}).items():
            columns.setdefault(name, []).extend(values)
    assert columns["tokens"] == told.tokens
    assert columns["text_offset"] == told.text_offset
    assert columns["token_logprobs"] == pytest.approx(told.token_logprobs, abs=1e-3)
    assert len(columns["top_logprobs"]) == 40
    assert complete(server, logprobs=0).choices[0].logprobs.top_logprobs is None


def test_both_routes_agree(server: Server) -> None:
    in_chat = chat(server, top_logprobs=5).choices[0].logprobs.content
    tokens = server.model.render(QUESTION).tokens.tolist()
    columns = complete(server, prompt=tokens, logprobs=5).choices[0].logprobs
    found = [one.logprob for one in in_chat]
    assert found == pytest.approx(columns.token_logprobs, abs=1e-3)


def test_responses_tell_them_and_tell_them_again(serve: Serve, tmp_path: Path) -> None:
    server = serve(responses=ResponseStore(tmp_path / "responses.db"))
    client = server.openai()
    request: dict[str, Any] = {"model": "x", "input": QUESTION, "max_output_tokens": 30}
    request |= {"include": INCLUDE, "top_logprobs": 2, "temperature": 0}
    reply: Any = client.responses.create(**request)
    (part,) = reply.output[0].content
    told = part.logprobs
    assert told
    assert text_of(told) == part.text
    check(told, 2)
    assert reply.top_logprobs == 2
    events = list(client.responses.create(**request, stream=True))
    deltas: list[Any] = [e for e in events if e.type == "response.output_text.delta"]
    done: list[Any] = [e for e in events if e.type == "response.output_text.done"]
    streamed = [one for event in deltas for one in event.logprobs]
    assert same(streamed, told)
    assert same(done[0].logprobs, streamed)
    last: Any = events[-1]
    told = last.response.output[0].content[0].logprobs
    assert same(told, streamed)
    stored: Any = client.responses.retrieve(last.response.id)
    assert stored.output[0].content[0].logprobs == told
    replayed: list[Any] = list(client.responses.retrieve(last.response.id, stream=True))
    kinds = ("response.output_text.delta", "response.output_text.done")
    assert [e for e in replayed if e.type in kinds] == [*deltas, *done]


def test_responses_tell_none_unless_they_are_included(server: Server) -> None:
    body = {"input": "Hi", "max_output_tokens": 2, "top_logprobs": 2, "include": ["other"]}
    response = server.http().post("/v1/responses", json=body)
    assert response.headers["anaphora-ignored"] == "include, top_logprobs"
    assert response.json()["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_only_tokens_of_the_text_are_told(
    serve: Serve, tiny_model: TinyModel, stream: bool
) -> None:
    control = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    template = (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
        "{%- for c in m.tool_calls or [] %}{{ '<tool_call>\\n' }}{{ c.function | tojson }}"
        "{{ '\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}{# </think> #}"
    )
    server = serve(
        paths=[tiny_model("script", script=SAID, control=control, template=template)],
    )
    asked: dict[str, Any] = {"model": "x", "messages": QUESTION, "tools": [TOOL]}
    asked |= {"logprobs": True, "temperature": 0}
    client = server.openai().chat.completions
    if stream:
        chunks = [chunk.choices[0] for chunk in client.create(**asked, stream=True)]
        text = "".join(choice.delta.content or "" for choice in chunks)
        told = [one for c in chunks if c.logprobs for one in c.logprobs.content]
        assert all(bool(c.logprobs) == bool(c.delta.content) for c in chunks)
    else:
        (choice,) = client.create(**asked).choices
        text, told = choice.message.content, choice.logprobs.content
        assert choice.message.tool_calls
        assert choice.message.reasoning_content
    assert text == "I will look."
    assert text_of(told).strip() == text


def test_a_stop_sequence_takes_its_tokens_with_it(serve: Serve, tiny_model: TinyModel) -> None:
    server = serve(paths=[tiny_model("script", script="One two three four. Five six!")])
    asked: dict[str, Any] = {"model": "x", "messages": QUESTION, "logprobs": True}
    for stop in ("two", "wo th", " six!", "One", "e t", "o"):
        (choice,) = server.openai().chat.completions.create(**asked, stop=stop).choices
        assert choice.finish_reason == "stop"
        told = text_of(choice.logprobs.content)
        assert told.startswith(choice.message.content)
        assert choice.message.content == "One two three four. Five six!".partition(stop)[0]
        last = choice.logprobs.content[-1].token if choice.logprobs.content else ""
        assert len(told) - len(choice.message.content) < max(1, len(last))


def test_an_answer_that_is_half_a_character_has_its_tokens(server: Server) -> None:
    bias = {str(server.model.vocabulary.encode("€")[0]): 100}
    reply = complete(server, max_tokens=1, logprobs=1, logit_bias=bias)
    (choice,) = reply.choices
    assert (choice.text, choice.logprobs.tokens) == ("", ["bytes:\\xe2"])
    *_, last, end = complete(server, max_tokens=1, logprobs=1, logit_bias=bias, stream=True)
    assert last.choices[0].logprobs.tokens == ["bytes:\\xe2"]
    assert end.choices[0].finish_reason == "length"
