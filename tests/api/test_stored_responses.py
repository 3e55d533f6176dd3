"""Stored responses, by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from anaphora.clock import ManualClock
from anaphora.responses import ResponseStore
from tests.api.conftest import DOCUMENT, Serve, Server, issued

INSTRUCTIONS = DOCUMENT
REMEMBER = "Remember: teal."
WHICH = "Which colour?"
DAY = 86400.0

Store = Callable[[], ResponseStore]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Store:
    """The store of a server; each server needs its own."""
    return lambda: ResponseStore(tmp_path / "responses.db", clock=clock)


def create(server: Server, question: Any, **options: Any) -> Any:
    options = {"temperature": 0, "max_output_tokens": 8, **options}
    client = server.openai(api_key=options.pop("api_key", "none"))
    return client.responses.create(model="any", input=question, **options)


def streamed(server: Server, question: Any, **options: Any) -> list[Any]:
    return list(create(server, question, stream=True, **options))


def details(response: Any) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them were read."""
    usage = response.usage
    return usage.input_tokens, usage.input_tokens_details.cached_tokens


def test_case_26_a_streamed_response_is_continued(
    serve: Serve, store: Store, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    server = serve(cache_dir=folder, responses=store())
    events = streamed(server, REMEMBER, instructions=INSTRUCTIONS)
    ids = {event.response.id for event in events if hasattr(event, "response")}
    assert ids == {events[0].response.id}
    first = events[-1].response
    assert first.store is True

    def follow(server: Server) -> Any:
        return create(
            server, WHICH, instructions=INSTRUCTIONS, previous_response_id=events[0].response.id
        )

    second = follow(server)
    prompt, read = details(second)
    assert read >= details(first)[0], "what is before the answer was read"
    assert second.previous_response_id == first.id
    server.stop()
    server = serve(cache_dir=folder, responses=store())
    assert details(follow(server)) == (prompt, prompt)

    sent_in_full = [
        {"role": "user", "content": REMEMBER},
        *(item.model_dump() for item in first.output),
        {"role": "user", "content": WHICH},
    ]
    whole = create(server, sent_in_full, instructions=INSTRUCTIONS, store=False)
    assert details(whole) == (prompt, prompt), "the same prompt, token for token"
    alone = create(server, WHICH, previous_response_id=first.id)
    bare = create(server, sent_in_full, store=False)
    assert details(alone)[0] == details(bare)[0] < prompt, "instructions don't carry over"


def test_every_kind_of_item_is_part_of_a_longer_chain(serve: Serve, store: Store) -> None:
    server = serve(responses=store())
    tools: Any = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": "sky"}'}
    custom = {"type": "custom_tool_call", "call_id": "d", "name": "say", "input": "hello 🌈"}
    inputs: list[list[Any]] = [
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": text} for text in "ab"]},
            {"type": "reasoning", "id": "r", "summary": []},
            {"role": "assistant", "content": "Let me see."},
            call,
            custom,
        ],
        [
            {"type": "function_call_output", "call_id": "c", "output": "It is blue."},
            {
                "type": "custom_tool_call_output",
                "call_id": "d",
                "output": [{"type": "input_text", "text": "said"}],
            },
        ],
        [{"role": "user", "content": "Sure?"}],
        [{"role": "user", "content": "\x00ü\ud83d"}],
    ]
    # The first one ends with calls, which nothing but their results can follow.
    first = create(server, [*inputs[0], *inputs[1]], tools=tools)
    history: list[Any] = [*inputs[0], *inputs[1]]
    before = first
    for more in inputs[2:]:
        history += [item.model_dump() for item in before.output]
        chained = server.http().post(
            "/v1/responses",
            content=json.dumps(
                {
                    "input": more,
                    "tools": tools,
                    "previous_response_id": before.id,
                    "max_output_tokens": 8,
                    "temperature": 0,
                }
            ),
        )
        assert chained.status_code == 200, chained.text
        history += more
        whole = server.http().post(
            "/v1/responses",
            content=json.dumps({"input": history, "tools": tools, "max_output_tokens": 0}),
        )
        expected = whole.json()["usage"]
        assert chained.json()["usage"]["input_tokens"] == expected["input_tokens"]
        assert expected["input_tokens_details"]["cached_tokens"] == expected["input_tokens"]
        before = server.openai().responses.retrieve(chained.json()["id"])


def test_it_is_retrieved_listed_and_deleted(serve: Serve, store: Store) -> None:
    server = serve(responses=store())
    client = server.openai()
    first = create(server, [{"role": "user", "content": text} for text in ("One", "Two")])
    second = create(server, "Three", previous_response_id=first.id, metadata={"a": "b"})
    assert client.responses.retrieve(second.id).model_dump() == second.model_dump()
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    roles = ["user", "user", *(["assistant"] if first.output else []), "user"]
    assert [item.role for item in listed if item.type == "message"] == roles
    assert len({item.id for item in listed}) == len(listed)
    newest_first = list(client.responses.input_items.list(second.id))
    assert newest_first == listed[::-1]
    client.responses.delete(first.id)
    for gone in (first.id, "resp_abc"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.retrieve(gone)
        assert f"Response with id '{gone}' not found." in str(caught.value)
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(gone)
        with pytest.raises(openai.NotFoundError):
            client.responses.input_items.list(gone)
    assert list(client.responses.input_items.list(second.id, order="asc")) == listed
    third = create(server, "Four", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens


def referring(*items: Any) -> list[Any]:
    """References to ``items``, in the ways there are to write them."""
    ways: list[dict[str, Any]] = [{"type": "item_reference"}, {}, {"type": None}]
    return [{**ways[n % 3], "id": item.id} for n, item in enumerate(items)]


def test_references_stand_for_items_of_any_kind_also_after_a_restart(
    serve: Serve, store: Store
) -> None:
    server = serve(responses=store())
    marked = {"type": "input_text", "text": "One", "prompt_cache_breakpoint": {"mode": "explicit"}}
    sent: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [marked, {"type": "input_text", "text": "Two"}]},
        {"role": "assistant", "content": "Let me see."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "d", "name": "say", "input": "hello"},
        {"type": "function_call_output", "call_id": "c", "output": "It is blue."},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "said"},
    ]
    first = create(server, sent, max_output_tokens=64)
    assert first.output, "it says something"
    second = create(server, "Three", previous_response_id=first.id)
    history = list(server.openai().responses.input_items.list(first.id, order="asc"))
    assert len(history) == len(sent)
    more = {"role": "user", "content": "Four"}
    in_full = [*sent, *(item.model_dump() for item in first.output), more]
    expected = create(server, in_full)
    server.stop()
    server = serve(responses=store())
    third = create(server, [*referring(*history, *first.output), more])
    assert third.usage.input_tokens == expected.usage.input_tokens
    assert third.output_text == expected.output_text
    items = server.openai().responses.input_items.list

    def contents(response: Any) -> list[Any]:
        return [item.model_dump(exclude={"id"}) for item in items(response.id, limit=100)]

    assert contents(third) == contents(expected)
    (asked, *_) = items(second.id)
    fourth = create(server, referring(asked), previous_response_id=third.id)
    assert fourth.usage.input_tokens > third.usage.input_tokens
    server.openai().responses.delete(first.id)
    copies = list(items(third.id, order="asc"))
    again = create(server, referring(*copies))
    assert again.usage.input_tokens == third.usage.input_tokens, "a copy outlives the item"


def test_a_reference_to_what_is_not_there_is_refused(
    serve: Serve, store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    keys, (alice, bob) = issued(tmp_path, "alice", "bob")
    server = serve(keys=keys, responses=store())
    kept, gone = (create(server, "One", api_key=alice) for _ in range(2))
    client = server.openai(api_key=alice)
    client.responses.delete(gone.id)
    (item,) = client.responses.input_items.list(kept.id)
    assert item.id is not None
    own = gone.id.removeprefix("resp_")

    def refused(key: str, item_id: str, kind: type[openai.APIStatusError], **more: Any) -> Any:
        for stream in (False, True):
            asked = [{"type": "item_reference", "id": item_id}, {"role": "user", "content": "Hi"}]
            with pytest.raises(kind) as caught:
                create(server, [*more.get("first", []), *asked], api_key=key, stream=stream)
        error: Any = caught.value.body
        assert (error["param"], error["code"]) == ("input", None)
        assert error["type"] == "invalid_request_error"
        return error["message"]

    for key, item_id in [
        (bob, item.id),
        (alice, f"msg_{own}_0"),
        (alice, f"msg_{own}"),
        (alice, f"{item.id}0"),
        (alice, kept.id),
        (alice, "rs_abc"),
        (alice, ""),
    ]:
        message = refused(key, item_id, openai.NotFoundError)
        assert message == f"Item with id '{item_id}' not found."
    twice = refused(alice, item.id, openai.BadRequestError, first=[{"id": item.id}])
    assert twice.startswith(f"Duplicate item found with id {item.id}.")
    with pytest.raises(openai.BadRequestError):
        create(server, referring(item), api_key=alice, previous_response_id=kept.id)
    clock.advance(30 * DAY)
    refused(alice, item.id, openai.NotFoundError)


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=msg_none"])
def test_a_wrong_list_is_refused(serve: Serve, store: Store, query: str) -> None:
    server = serve(responses=store())
    response = create(server, "One")
    reply = server.http().get(f"/v1/responses/{response.id}/input_items?{query}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == query.split("=")[0]


@pytest.mark.parametrize("query", ["stream=perhaps", "stream=true&starting_after=x"])
def test_a_wrong_wish_for_a_stream_is_refused(serve: Serve, store: Store, query: str) -> None:
    server = serve(responses=store())
    reply = server.http().get(f"/v1/responses/{create(server, 'One').id}?{query}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == query.split("=")[-2].split("&")[-1]


def test_a_stored_stream_is_given_again(serve: Serve, store: Store) -> None:
    server = serve(responses=store())
    known = create(server, "One").id
    compare = {"prompt_cache_options": {"comparison_response_id": known}}
    live = streamed(server, "One", max_output_tokens=64, extra_body=compare)
    assert len(live) > 8, "it says something"
    assert live[-1].response.prompt_cache_diagnostics is not None
    server.stop()
    server = serve(responses=store())
    client = server.openai()

    def again(**options: Any) -> list[Any]:
        return list(client.responses.retrieve(live[0].response.id, stream=True, **options))

    assert again() == live
    for number in (0, 5, len(live) - 2):
        assert again(starting_after=number) == live[number + 1 :]
    assert again(starting_after=-7) == live
    for past in (len(live) - 1, 10**30):
        assert again(starting_after=past) == []
    raw = server.http().get(f"/v1/responses/{live[0].response.id}?stream=true")
    assert raw.headers["content-type"].startswith("text/event-stream")


def test_a_response_that_was_not_streamed_is_given_as_a_stream(serve: Serve, store: Store) -> None:
    server = serve(responses=store())
    client = server.openai()
    whole = create(server, "One", max_output_tokens=64)
    assert whole.output_text, "it says something"
    events: list[Any] = list(client.responses.retrieve(whole.id, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    message = ["output_item.added", "content_part.added", "output_text.delta"]
    message += ["output_text.done", "content_part.done", "output_item.done"]
    assert kinds == ["created", "in_progress", *message, whole.status]
    assert events[-1].response.model_dump() == whole.model_dump()
    empty = create(server, "One", max_output_tokens=0)
    kinds = [event.type for event in client.responses.retrieve(empty.id, stream=True)]
    assert kinds == ["response.created", "response.in_progress", f"response.{empty.status}"]


def test_the_stream_helper_takes_up_a_stored_response(serve: Serve, store: Store) -> None:
    server = serve(responses=store())
    # Without an answer it is complete.
    options: Any = {"prompt_cache_options": {"prewarm": True}}
    done = create(server, "One", extra_body=options)
    with server.openai().responses.stream(response_id=done.id) as stream:
        assert stream.get_final_response().id == done.id
    with pytest.raises(openai.NotFoundError):
        server.openai().responses.retrieve("resp_abc", stream=True)


def test_the_async_client(serve: Serve, store: Store) -> None:
    server = serve(responses=store())

    async def talk() -> None:
        async with server.async_openai() as client:
            first = await client.responses.create(model="any", input="One", max_output_tokens=4)
            stream = await client.responses.create(
                model="any",
                input="Two",
                max_output_tokens=4,
                previous_response_id=first.id,
                stream=True,
            )
            last: Any = [event async for event in stream][-1]
            found = await client.responses.retrieve(last.response.id)
            assert found.model_dump() == last.response.model_dump()

    asyncio.run(talk())


def test_unknown_foreign_expired_and_unstored_are_the_same(
    serve: Serve, store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    keys, (alice, bob) = issued(tmp_path, "alice", "bob")
    server = serve(keys=keys, responses=store())
    kept = create(server, "One", api_key=alice)
    loose = create(server, "One", api_key=alice, store=False)
    assert loose.store is False
    assert create(server, "Two", api_key=alice, previous_response_id=kept.id)

    def refused(key: str, previous: str) -> None:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                create(server, "Two", api_key=key, previous_response_id=previous, stream=stream)
            error: Any = caught.value.body
            assert error["code"] == "previous_response_not_found"
            assert error["param"] == "previous_response_id"
            assert error["message"] == f"Previous response with id '{previous}' not found."

    refused(bob, kept.id)
    refused(alice, loose.id)
    refused(alice, "resp_abc")
    refused(alice, "")
    clock.advance(30 * DAY)
    refused(alice, kept.id)


def test_a_response_that_is_broken_off_is_not_stored(serve: Serve, store: Store) -> None:
    server = serve(responses=store())
    assert create(server, "One", max_output_tokens=64).status == "incomplete", "it goes on"
    events = create(server, "One", max_output_tokens=100_000, stream=True)
    first: Any = next(iter(events))
    events.close()
    with pytest.raises(openai.NotFoundError):
        server.openai().responses.retrieve(first.response.id)


def test_an_answer_comes_also_where_it_cannot_be_stored(
    serve: Serve, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "responses.db").mkdir()
    server = serve(responses=store())
    assert create(server, "One").store is False
    assert streamed(server, "One")[-1].response.store is False
    assert server.metric("anaphora_responses_lost_total") == 2
    with pytest.raises(openai.InternalServerError) as caught:
        create(server, "Two", previous_response_id="resp_abc")
    assert caught.value.status_code == 503
    (tmp_path / "responses.db").rmdir()
    first = create(server, "One")
    assert create(server, "Two", previous_response_id=first.id).store is True


def test_a_damaged_store_is_begun_anew(serve: Serve, store: Store, tmp_path: Path) -> None:
    (tmp_path / "responses.db").write_bytes(b"no database" * 1000)
    server = serve(responses=store())
    first = create(server, "One")
    assert create(server, "Two", previous_response_id=first.id).store is True
    assert (tmp_path / "responses.db.damaged-1").exists()


def test_a_server_without_a_store_says_so(server: Server) -> None:
    response = create(server, "One", store=True)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        server.openai().responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        create(server, [{"id": response.id.replace("resp", "msg")}])
