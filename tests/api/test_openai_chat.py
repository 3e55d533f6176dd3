"""Chat Completions, by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from anaphora.answer.pieces import Text
from anaphora.api.generation import Generation, prepare
from anaphora.engine.protocol import Sampling
from anaphora.keys import LOCAL
from anaphora.profiles import Local
from anaphora.prompt.conversation import Conversation
from tests.api.conftest import DOCUMENT, Serve, Server
from tests.api.test_streams import NEVER_ENDING
from tests.conftest import TinyModel
from tests.test_model import opened

QUESTION: list[Any] = [
    {"role": "system", "content": DOCUMENT},
    {"role": "user", "content": "What time is it?"},
]


def ask(server: Server, messages: list[Any], **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 8, **options}
    return server.openai().chat.completions.create(model="any", messages=messages, **options)


def test_an_answer_with_true_usage(serve: Serve) -> None:
    server = serve()
    cold, warm = (ask(server, QUESTION) for _ in range(2))
    assert cold.choices[0].message.content == warm.choices[0].message.content
    assert cold.choices[0].message.role == "assistant"
    assert cold.choices[0].finish_reason in ("length", "stop")
    prompt = cold.usage.prompt_tokens
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert cold.usage.prompt_tokens_details.cache_write_tokens == prompt
    assert warm.usage.prompt_tokens_details.cached_tokens == prompt
    assert warm.usage.prompt_tokens_details.cache_write_tokens == 0
    for reply in (cold, warm):
        assert reply.usage.total_tokens == prompt + reply.usage.completion_tokens
    assert cold.id != warm.id
    assert cold.id.startswith("chatcmpl-")
    assert cold.model == server.model.path.stem


def test_a_stream_joined_is_the_unstreamed_answer(server: Server) -> None:
    whole = ask(server, QUESTION, max_tokens=40)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(server, QUESTION, max_tokens=40, **options))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_without_include_usage_no_chunk_has_any(server: Server) -> None:
    body = {"messages": QUESTION, "stream": True, "max_tokens": 3}
    with server.http().stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert all("usage" not in json.loads(event) for event in events)


def test_the_async_client_and_its_stream_helper(server: Server) -> None:
    stop = ask(server, QUESTION).choices[0].message.content[-1]  # the helper wants a proper end

    async def talk() -> tuple[str | None, str | None]:
        async with server.async_openai() as client:
            create = client.chat.completions.create
            whole = await create(model="any", messages=QUESTION, temperature=0, stop=stop)
            async with client.chat.completions.stream(
                model="any", messages=QUESTION, temperature=0, stop=stop
            ) as stream:
                final = await stream.get_final_completion()
            return whole.choices[0].message.content, final.choices[0].message.content

    whole, streamed = asyncio.run(talk())
    assert whole == streamed


def test_many_at_once(server: Server) -> None:
    async def talk() -> list[Any]:
        async with server.async_openai() as client:
            create = client.chat.completions.create
            return await asyncio.gather(
                *(
                    create(model="any", messages=QUESTION, temperature=0, max_tokens=8)
                    for _ in range(12)
                )
            )

    replies = asyncio.run(talk())
    assert len({reply.choices[0].message.content for reply in replies}) == 1


def test_content_as_parts_is_the_same_prompt(server: Server) -> None:
    first = ask(server, QUESTION)
    parts = [{"type": "text", "text": DOCUMENT[:100]}, {"type": "text", "text": DOCUMENT[100:]}]
    second = ask(server, [{"role": "system", "content": parts}, QUESTION[1]])
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens


def test_max_tokens_over_the_room_is_cut_down(serve: Serve) -> None:
    server = serve(context_size=256)
    reply = ask(server, [{"role": "user", "content": "Hi"}], max_tokens=10**30, temperature=1)
    assert reply.usage.total_tokens <= 256


def test_no_answer_wanted_fills_the_cache(serve: Serve) -> None:
    server = serve()
    reply = ask(server, QUESTION, max_tokens=0)
    assert reply.choices[0].message.content == ""
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 0
    warm = ask(server, QUESTION)
    assert warm.usage.prompt_tokens_details.cached_tokens == warm.usage.prompt_tokens


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(serve: Serve) -> None:
    server = serve(context_size=256)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(server, QUESTION, stream=stream)
        assert caught.value.code == "context_length_exceeded"
        assert "256" in caught.value.message
        assert str(len(server.model.render(QUESTION).tokens)) in caught.value.message


def test_a_stop_text_ends_the_answer(server: Server) -> None:
    whole = ask(server, QUESTION, max_tokens=40).choices[0].message.content
    middle = whole[len(whole) // 2]
    reply = ask(server, QUESTION, max_tokens=40, stop=[middle])
    assert reply.choices[0].message.content == whole[: whole.index(middle)]
    assert reply.choices[0].finish_reason == "stop"


def test_an_assistant_message_at_the_end_is_continued(server: Server) -> None:
    whole = ask(server, QUESTION, max_tokens=1)
    begun = [*QUESTION, {"role": "assistant", "content": "It is thirteen"}]
    reply = ask(server, begun)
    rendered = server.model.render(QUESTION).tokens
    prefill = len(server.model.tokenize("It is thirteen"))
    assert reply.usage.prompt_tokens == len(rendered) + prefill
    assert reply.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens
    empty = ask(server, [*QUESTION, {"role": "assistant", "content": ""}])
    assert empty.usage.prompt_tokens == len(rendered)


@pytest.mark.parametrize(
    "options",
    [
        {"n": 0},
        {"n": 9},
        {"n": True},
        {"logprobs": 1},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
        {"top_logprobs": 2},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": []},
        {"messages": [{"role": "wizard", "content": "hi"}]},
        {"messages": [{"content": "hi"}]},
        {"temperature": "warm"},
        {"temperature": -1},
        {"temperature": 1e999},
        {"max_tokens": -1},
        {"max_tokens": "12"},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"999999": 1}},
        {"stop": 5},
    ],
)
def test_what_cannot_be_ignored_is_refused(server: Server, options: dict[str, Any]) -> None:
    body = {"messages": QUESTION, "max_tokens": 1, **options}
    text = json.dumps(body).replace("Infinity", "1e999")
    response = server.http().post("/v1/chat/completions", content=text)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "\n" not in error["message"]
    assert response.headers["x-request-id"]


def test_hints_are_ignored_and_named(server: Server) -> None:
    response = server.http().post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "hi", "mood\r\nx: y": 1}],
            "max_tokens": 1,
            "user": "me",
            "service_tier": "flex",
        },
    )
    assert response.status_code == 200
    assert response.headers["anaphora-ignored"] == "user, service_tier, messages.mood??x??y"


def test_the_next_turn_finds_the_answer_settled(serve: Serve) -> None:
    server = serve()
    answer = ask(server, QUESTION, max_tokens=60).choices[0].message.content
    assert answer
    turn = [*QUESTION, {"role": "assistant", "content": answer}]
    ready = opened(server.model, turn)
    following = {"messages": [*turn, {"role": "user", "content": "And now?"}], "max_tokens": 0}
    wait_until_settled(server)
    response = server.http().post("/v1/chat/completions", json=following)
    usage = response.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= ready
    assert int(response.headers["anaphora-computed-tokens"]) == usage["prompt_tokens"] - ready


def test_turns_of_several_conversations_are_settled_when_there_is_time(serve: Serve) -> None:
    server = serve()
    turns = []
    for name in ("Ann", "Bob", "Cid"):  # one comes right behind the other
        begun = [{"role": "system", "content": f"I am {name}. {DOCUMENT}"}, QUESTION[1]]
        answer = ask(server, begun, max_tokens=20, logit_bias=NEVER_ENDING)
        turns.append([*begun, {"role": "assistant", "content": answer.choices[0].message.content}])
    wait_until_settled(server)
    for turn in turns:
        ready = opened(server.model, turn)
        following = {"messages": [*turn, {"role": "user", "content": "And now?"}], "max_tokens": 0}
        response = server.http().post("/v1/chat/completions", json=following)
        prompt = response.json()["usage"]["prompt_tokens"]
        assert int(response.headers["anaphora-computed-tokens"]) == prompt - ready


def test_a_turn_that_goes_on_is_settled_no_more(serve: Serve) -> None:
    server = serve()
    first = ask(server, QUESTION, max_tokens=20, logit_bias=NEVER_ENDING)
    turn = [*QUESTION, {"role": "assistant", "content": first.choices[0].message.content}]
    ask(server, [*turn, *QUESTION], max_tokens=20, logit_bias=NEVER_ENDING)
    assert len(server.serving._unsettled) == 1
    wait_until_settled(server)
    assert not server.serving._unsettled


def test_without_a_cache_there_is_nothing_to_settle(serve: Serve, tiny_model: TinyModel) -> None:
    server = serve(paths=[tiny_model("mamba")], cache_dir=None)
    conversation = Conversation.parse([{"role": "user", "content": "Hi"}])
    generation = Generation(conversation, 8, Sampling())
    prepared = prepare(server.model, generation, LOCAL, Local(), request_id="x", strict=False)
    assert prepared.next_turn([Text("Hello.")]) is None


def wait_until_settled(server: Server) -> None:
    async def settled() -> None:
        assert server.serving._settling is not None
        await server.serving._settling

    server.call(settled())


NO_CONTENT: list[dict[str, Any]] = [{"content": None}, {"content": ""}, {}]


def test_no_content_beside_tool_calls_is_one_prompt(serve: Serve) -> None:
    server = serve()
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    for number, content in enumerate(NO_CONTENT):
        messages = [
            *QUESTION,
            {"role": "assistant", "content": "Wait.", "tool_calls": []},
            QUESTION[1],
            {"role": "assistant", "tool_calls": [call], **content},
            {"role": "tool", "tool_call_id": "c", "content": "Thirteen."},
            {"role": "user", "content": "Sure?"},
        ]
        usage = (
            server.http()
            .post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
            .json()["usage"]
        )
        expected = usage["prompt_tokens"] if number else 0
        assert usage["prompt_tokens_details"]["cached_tokens"] == expected


def test_counters_stay_within_the_prompt_after_a_restart(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = serve(cache_dir=folder)
    ask(first, QUESTION)
    first.stop()
    usage = ask(serve(cache_dir=folder), QUESTION).usage
    details = usage.prompt_tokens_details
    assert details.cached_tokens == usage.prompt_tokens
    assert details.cached_tokens + details.cache_write_tokens <= usage.prompt_tokens
