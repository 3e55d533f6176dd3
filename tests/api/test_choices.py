"""Several answers to one prompt, which is computed once."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import openai
import pytest

from anaphora.api.books import Books
from anaphora.api.endpoint import Options
from anaphora.usage.ledger import Ledger
from tests.api.conftest import DOCUMENT, Serve, Server
from tests.api.test_ledger import rows
from tests.api.test_streams import NEVER_ENDING, data_lines, wait_until_idle
from tests.conftest import TinyModel
from tests.engine.test_process import kill

QUESTION: list[Any] = [{"role": "user", "content": DOCUMENT}]
ASKED: dict[str, Any] = {"model": "x", "n": 3, "max_tokens": 12, "logit_bias": NEVER_ENDING}
TOTALS = ("prompt", "cache_read", "cache_written", "computed", "generated")


def chat(server: Server, text: str = DOCUMENT, **options: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": text}]
    return server.openai().chat.completions.create(messages=messages, **{**ASKED, **options})


def complete(server: Server, **options: Any) -> Any:
    return server.openai().completions.create(prompt=DOCUMENT, **{**ASKED, **options})


def texts(reply: Any) -> list[str]:
    assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
    return [getattr(choice, "text", None) or choice.message.content for choice in reply.choices]


def streamed(chunks: Any) -> tuple[list[str], list[str | None], Any]:
    """The text and the finish reason of each choice, and the usage."""
    parts, ends, usage = defaultdict[int, str](str), dict[int, str](), None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in ends
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            parts[choice.index] += text or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    numbers = range(len(parts))
    return [parts[n] for n in numbers], [ends.get(n) for n in numbers], usage


@pytest.mark.parametrize("how", [chat, complete])
def test_choices_differ_and_a_seed_gives_them_again(server: Server, how: Any) -> None:
    first = texts(how(server, seed=11))
    assert len(set(first)) == 3
    assert texts(how(server, seed=11)) == first
    assert set(texts(how(server, seed=50))).isdisjoint(first)
    # The seed of a choice is the request's, and its number on top.
    assert texts(how(server, seed=12, n=1)) == [first[1]]
    assert len(set(texts(how(server)))) == 3
    assert len(set(texts(how(server, temperature=0)))) == 1


@pytest.mark.parametrize("how", [chat, complete])
def test_streamed_choices_are_the_same(server: Server, how: Any) -> None:
    whole = how(server, seed=3, n=8)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    parts, ends, usage = streamed(how(server, seed=3, n=8, **options))
    assert parts == texts(whole)
    assert ends == [choice.finish_reason for choice in whole.choices] == ["length"] * 8
    assert usage.completion_tokens == whole.usage.completion_tokens == 8 * 12
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_every_streamed_choice_begins_with_its_role(server: Server) -> None:
    seen: dict[int, Any] = {}
    for chunk in chat(server, stream=True):
        (choice,) = chunk.choices
        seen.setdefault(choice.index, choice.delta.role)
    assert seen == dict.fromkeys(range(3), "assistant")


@pytest.mark.parametrize("settings", [{}, {"parallel": 1}, {"engine": "process"}])
def test_the_prompt_is_computed_once(serve: Serve, settings: dict[str, Any]) -> None:
    server = serve(**settings)
    before = [server.metric(f"anaphora_{name}_tokens_total") for name in TOTALS]
    raw = server.openai().chat.completions.with_raw_response.create(messages=QUESTION, **ASKED)
    usage = raw.parse().usage
    assert usage is not None
    prompt = usage.prompt_tokens
    # Its last token, whose logits an answer begins with, once for each.
    assert int(raw.headers["anaphora-computed-tokens"]) == prompt + 2
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.completion_tokens == 3 * 12
    assert usage.total_tokens == prompt + 3 * 12
    after = [server.metric(f"anaphora_{name}_tokens_total") for name in TOTALS]
    counted = [now - then for now, then in zip(after, before, strict=True)]
    assert counted == [prompt, 0, prompt, prompt + 2, 36]
    wait_until_idle(server)


@pytest.mark.parametrize(
    ("kind", "settings", "most"), [("llama", {"exact": True}, 128), ("gemma3", {}, None)]
)
def test_where_more_is_computed(
    serve: Serve, tiny_model: TinyModel, kind: str, settings: dict[str, Any], most: int | None
) -> None:
    """In exact mode up to 64 tokens for each; all of it where nothing can be cached."""
    server = serve(paths=[tiny_model(kind)], **settings)
    reply = server.openai().chat.completions.with_raw_response.create(messages=QUESTION, **ASKED)
    usage = reply.parse().usage
    assert usage is not None
    computed = int(reply.headers["anaphora-computed-tokens"])
    if most is None:
        assert computed == 3 * usage.prompt_tokens
    else:
        assert usage.prompt_tokens < computed <= usage.prompt_tokens + most
    assert usage.completion_tokens == 36


def test_a_short_prompt_is_computed_once_too(server: Server) -> None:
    raw = server.openai().chat.completions.with_raw_response
    reply = raw.create(messages=[{"role": "user", "content": "Short and new"}], **ASKED)
    usage = reply.parse().usage
    assert usage is not None
    assert int(reply.headers["anaphora-computed-tokens"]) <= usage.prompt_tokens + 2


def test_the_ledger_has_one_row(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    books = Books(Ledger(path))
    server = serve(books=books)
    reply = chat(server)
    books.close()
    (row,) = rows(path)
    assert row["id"] == reply.id
    assert (row["prompt"], row["output"]) == (reply.usage.prompt_tokens, 36)
    assert row["computed"] == row["prompt"] + 2
    assert row["finish"] == "length"
    assert row["total"] >= row["first_token"] > 0


@pytest.mark.parametrize("chunks", [1, 20])
def test_who_leaves_cancels_all_of_them(serve: Serve, tmp_path: Path, chunks: int) -> None:
    path = tmp_path / "usage.db"
    books = Books(Ledger(path))
    server = serve(books=books)
    body = {"messages": QUESTION, **ASKED, "max_tokens": 5000, "stream": True}
    with (
        server.http() as http,
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines = data_lines(response)
        for _ in range(chunks):
            next(lines)
    wait_until_idle(server)
    assert chat(server, "Next", n=1).choices[0].finish_reason == "length"
    books.close()
    left, _ = rows(path)
    assert left["finish"] == "cancelled"
    assert left["output"] < 15000


def test_an_engine_that_dies_fails_all_of_them(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    books = Books(Ledger(path))
    server = serve(engine="process", books=books)
    body = {"messages": QUESTION, **ASKED, "max_tokens": 5000, "stream": True}
    with (
        server.http() as http,
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines = data_lines(response)
        for _ in range(20):
            next(lines)
        kill()
        assert "send the request again" in list(lines)[-1]["error"]["message"]
    assert len(texts(chat(server))) == 3
    wait_until_idle(server)
    books.close()
    assert [row["finish"] for row in rows(path)] == ["failed", "length"]


def test_a_stop_sequence_ends_its_choice_alone(server: Server) -> None:
    whole = texts(chat(server, seed=21, max_tokens=40))
    stop = whole[1][10:12]
    reply = chat(server, seed=21, max_tokens=40, stop=[stop], logprobs=True)
    assert texts(reply) == [text.partition(stop)[0] for text in whole]
    for choice, text in zip(reply.choices, whole, strict=True):
        assert choice.finish_reason == ("stop" if stop in text else "length")
        assert all(len(one.top_logprobs) == 0 for one in choice.logprobs.content)
    assert reply.choices[1].finish_reason == "stop"


def test_calls_of_tools_have_ids_of_their_own(serve: Serve, tiny_model: TinyModel) -> None:
    said = 'I look.\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    server = serve(paths=[tiny_model("script", script=said)])
    tools: Any = [{"type": "function", "function": {"name": "look"}}]
    client = server.openai().chat.completions
    reply = client.create(model="x", messages=QUESTION, tools=tools, n=2, temperature=0)
    calls = [call for choice in reply.choices for call in choice.message.tool_calls or []]
    assert len({call.id for call in calls}) == 2
    assert [choice.finish_reason for choice in reply.choices] == ["tool_calls"] * 2
    indices = []
    for chunk in client.create(
        model="x", messages=QUESTION, tools=tools, n=2, temperature=0, stream=True
    ):
        for choice in chunk.choices:
            indices += [(choice.index, call.index) for call in choice.delta.tool_calls or []]
    assert sorted(indices) == [(0, 0), (1, 0)]


def test_no_tokens_at_all(server: Server) -> None:
    reply = chat(server, max_tokens=0)
    assert texts(reply) == ["", "", ""]
    assert reply.usage.completion_tokens == 0


def test_a_request_that_does_not_fit_fails_once(serve: Serve) -> None:
    server = serve(options=Options(strict_max_tokens=True), context_size=512)
    with pytest.raises(openai.BadRequestError, match="prompt is too long"):
        chat(server, DOCUMENT * 3)
    with pytest.raises(openai.BadRequestError, match="max_tokens is 5000"):
        chat(server, "Hi", max_tokens=5000)
    assert len(texts(chat(server, "Hi"))) == 3


@pytest.mark.parametrize("number", [1, 3])
def test_best_of_may_say_what_n_says(server: Server, number: int) -> None:
    assert len(complete(server, n=number, best_of=number).choices) == number
    for wrong in (number + 1, 2, 10**9):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(server, n=number, best_of=wrong)
        assert caught.value.param == "best_of"
        assert "leave it out or use n" in str(caught.value)


def test_a_seed_counts_warm_and_cold_and_beside_others(serve: Serve) -> None:
    server = serve(memory_budget=64 << 20)
    cold = texts(chat(server, seed=4, n=1, max_tokens=30))
    assert texts(chat(server, seed=4, n=1, max_tokens=30)) == cold
    assert texts(chat(server, seed=4, n=4, max_tokens=30))[:1] == cold
    assert texts(chat(server, seed=-4, n=1)) == texts(chat(server, seed=-4, n=1))
    assert texts(chat(server, seed=2**70, n=1)) == texts(chat(server, seed=2**70, n=1))
