"""Responses, by OpenAI's own client."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.api.conftest import DOCUMENT, Serve, Server

REQUEST: dict[str, Any] = {
    "model": "any",
    "instructions": DOCUMENT,
    "input": "What time is it?",
    "temperature": 0,
    "max_output_tokens": 8,
}
DELTA = "response.output_text.delta"


def test_an_answer_with_true_usage(serve: Serve) -> None:
    server = serve()
    cold, warm = (server.openai().responses.create(**REQUEST) for _ in range(2))
    assert cold.output_text == warm.output_text
    assert cold.status == "incomplete"
    assert cold.incomplete_details is not None
    assert cold.incomplete_details.reason == "max_output_tokens"
    assert cold.usage is not None
    assert warm.usage is not None
    prompt = cold.usage.input_tokens
    assert cold.usage.input_tokens_details.cached_tokens == 0
    assert cold.usage.input_tokens_details.cache_write_tokens == prompt
    assert warm.usage.input_tokens_details.cached_tokens == prompt
    assert warm.usage.input_tokens_details.cache_write_tokens == 0
    assert warm.usage.total_tokens == prompt + warm.usage.output_tokens
    chat = server.openai().chat.completions.create(
        model="any",
        messages=[
            {"role": "system", "content": DOCUMENT},
            {"role": "user", "content": REQUEST["input"]},
        ],
        max_tokens=1,
    )
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == prompt


def test_a_stream_ends_with_the_unstreamed_response(server: Server) -> None:
    client = server.openai()
    client.responses.create(**REQUEST)
    whole = client.responses.create(**REQUEST)
    events: list[Any] = list(client.responses.create(**REQUEST, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(deltas) == whole.output_text
    last = events[-1].response
    assert {event.response.id for event in events if hasattr(event, "response")} == {last.id}
    assert last.output_text == whole.output_text
    assert last.usage == whole.usage


def test_the_async_client(server: Server) -> None:
    async def talk() -> str:
        async with server.async_openai() as client:
            stream = await client.responses.create(**REQUEST, stream=True)
            return "".join(
                [
                    event.delta
                    async for event in stream
                    if event.type == "response.output_text.delta"
                ]
            )

    assert asyncio.run(talk()) == server.openai().responses.create(**REQUEST).output_text


def test_the_stream_helper_is_given_a_completed_response(server: Server) -> None:
    # Sampled from, the tiny model ends every answer sooner or later.
    with server.openai().responses.stream(model="any", input="Hi") as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == text


def test_calls_and_their_outputs_are_in_the_prompt(server: Server) -> None:
    def tokens(items: list[Any], **options: Any) -> int:
        reply = server.openai().responses.create(
            model="any", input=items, max_output_tokens=1, **options
        )
        assert reply.usage is not None
        return int(reply.usage.input_tokens)

    question = {"role": "user", "content": "What?"}
    made = {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": "sky"}'}
    output = {"type": "function_call_output", "call_id": "c", "output": "It is blue."}
    thought: Any = {"type": "reasoning", "id": "r", "summary": []}
    assert tokens([question, made, output]) > tokens([question]) + len("look at sky It is blue.")
    assert tokens([question, thought, made, output]) == tokens([question, made, output])
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
    assert tokens([question], tools=[tool]) > tokens([question]) + 20
    assert tokens([question], tools=[{"type": "web_search"}]) == tokens([question])


def test_a_late_developer_message_is_a_late_system_message(server: Server) -> None:
    late = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Three?"},
    ]
    reply = server.openai().responses.create(model="any", input=late, max_output_tokens=1)  # type: ignore[arg-type]
    chat = server.http().post("/v1/chat/completions", json={"messages": late, "max_tokens": 1})
    assert reply.usage is not None
    assert reply.usage.input_tokens == chat.json()["usage"]["prompt_tokens"]


def test_stored_responses_are_not_found(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai().responses.create(**REQUEST, previous_response_id="resp_abc")
    assert caught.value.code == "previous_response_not_found"
    assert "Previous response with id 'resp_abc' not found." in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"input": None},
        {"input": []},
        {"input": [5]},
        {"input": [{"type": "item_reference"}]},
        {"input": [{"type": None, "role": "user", "content": "Hi"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"tool_choice": "required"},
        {"background": True},
        {"conversation": "conv_1"},
        {"prompt": {"id": "p"}},
        {"max_output_tokens": -1},
        {"top_logprobs": 21},
        {"top_logprobs": -1},
        {"include": "message.output_text.logprobs"},
    ],
)
def test_what_cannot_be_ignored_is_refused(server: Server, changes: dict[str, Any]) -> None:
    response = server.http().post("/v1/responses", json={**REQUEST, **changes})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
