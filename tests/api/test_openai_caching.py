"""OpenAI's members for caching on Chat Completions and Responses, by its own client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from anaphora import Model, Settings
from anaphora.api import openai_diagnostics
from anaphora.api.endpoint import Options
from anaphora.api.serving import Serving
from anaphora.clock import ManualClock
from anaphora.profiles import PROFILES, OpenAI
from anaphora.profiles.openai import Conditions
from anaphora.responses import ResponseStore
from anaphora.roster import Choice, Roster
from tests.api import conftest
from tests.api.conftest import Serve, Server, issued
from tests.api.talk import PROTOCOLS, Protocol, ask, assistant, hear, system, user
from tests.conftest import TinyModel

RULES = OpenAI(minimum=200)
OPTIONS = Options(profile="openai", profiles={**PROFILES, "openai": RULES})
EXPLICIT = {"mode": "explicit"}
MARK = {"mode": "explicit"}
LONG_MARK = {"mode": "explicit", "ttl": "12h"}
DOCUMENT = conftest.DOCUMENT.strip()
OTHER = "Once upon a midnight dreary, while I pondered, weak and weary." * 20


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def timed(tiny_llama: Path, tmp_path: Path, clock: ManualClock) -> Iterator[Server]:
    """A server with OpenAI's rules, a store of responses, and a clock that tests set."""
    settings = Settings(cache_dir=None, memory_budget=64 << 20, threads=1, engine="thread")
    roster = Roster([Choice("tiny", tiny_llama)], lambda path: Model(path, settings, clock))
    store = ResponseStore(tmp_path / "responses.db", clock=clock)
    server = Server(Serving(roster.__enter__()), OPTIONS, responses=store)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def openai_server(serve: Serve, tmp_path: Path) -> Server:
    """A server with OpenAI's rules and a store of responses."""
    return serve(options=OPTIONS, responses=ResponseStore(tmp_path / "responses.db"))


@dataclass(frozen=True)
class Counted:
    prompt: int
    read: int
    written: int
    for_hours: int = 0
    """Of those written."""


def chat(server: Server, messages: list[Any], **options: Any) -> Counted:
    """Counters of a request to Chat Completions."""
    options = {"max_tokens": 1, "temperature": 0, **options}
    reply = server.openai().chat.completions.create(model="any", messages=messages, **options)
    usage = [chunk.usage for chunk in reply][-1] if options.get("stream") else reply.usage
    details = usage.prompt_tokens_details
    return Counted(usage.prompt_tokens, details.cached_tokens, details.cache_write_tokens)


def respond(server: Server, items: Any, **options: Any) -> Any:
    options = {"max_output_tokens": 1, "temperature": 0, "model": "any", **options}
    key = options.pop("api_key", "none")
    return server.openai(api_key=key).responses.create(input=items, **options)


def counted(response: Any) -> Counted:
    details = response.usage.input_tokens_details
    by_ttl = details.cache_write_tokens_details
    assert details.cache_write_tokens == by_ttl.ttl_30m_tokens + by_ttl.ttl_12h_tokens
    return Counted(
        response.usage.input_tokens,
        details.cached_tokens,
        details.cache_write_tokens,
        by_ttl.ttl_12h_tokens,
    )


def part(text: str, mark: Any = None, kind: str = "text") -> Any:
    marked = {} if mark is None else {"prompt_cache_breakpoint": mark}
    return {"type": kind, "text": text, **marked}


def ends(server: Server, messages: list[Any]) -> list[int]:
    """Where the messages end among the tokens."""
    found = [boundaries.end for boundaries in server.model.render(messages).boundaries]
    return [end for end in found if end is not None]


QUESTION = [system(DOCUMENT), user("What time is it?")]


@pytest.mark.parametrize("stream", [False, True])
def test_the_implicit_breakpoint_is_the_latest_messages_end(
    openai_server: Server, stream: bool
) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    first = chat(openai_server, QUESTION, **options)
    end = ends(openai_server, QUESTION)[-1]
    assert first == Counted(first.prompt, 0, end)
    assert end < first.prompt, "the opening of the answer is behind it"
    assert chat(openai_server, QUESTION, **options) == Counted(first.prompt, end, 0)
    turn = [*QUESTION, assistant("Thirteen."), user("Sure?")]
    following = chat(openai_server, turn, **options)
    assert following == Counted(following.prompt, end, ends(openai_server, turn)[-1] - end)
    other = chat(openai_server, [QUESTION[0], user("Who is it?")], **options)
    assert other.read == 0, "nothing ends at a boundary of both"


def test_the_opening_block_is_read_where_it_was_written(openai_server: Server) -> None:
    head = chat(openai_server, QUESTION[:1], max_tokens=0)
    assert head.written == ends(openai_server, QUESTION)[0]
    assert chat(openai_server, QUESTION).read == head.written
    answer = respond(openai_server, "Who is it?", instructions=DOCUMENT)
    assert counted(answer).read == head.written


def test_tool_results_end_a_prefix_as_a_group(openai_server: Server) -> None:
    calls = [
        {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}
        for name in ("a", "b")
    ]
    results = [{"role": "tool", "tool_call_id": name, "content": DOCUMENT[:300]} for name in "ab"]
    turn = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    first = chat(openai_server, turn)
    assert first.written > 0.9 * first.prompt
    items = [
        *QUESTION,
        *({"type": "function_call", "call_id": n, "name": "look", "arguments": "{}"} for n in "ab"),
        *({"type": "function_call_output", "call_id": n, "output": DOCUMENT[:300]} for n in "ab"),
    ]
    assert counted(respond(openai_server, items)).read == first.written


def test_too_short_a_prefix_is_neither_read_nor_written(openai_server: Server) -> None:
    for _ in range(2):
        short = chat(openai_server, [user("Hi")])
        assert (short.read, short.written) == (0, 0)


def test_explicit_breakpoints_are_exact(openai_server: Server) -> None:
    def request(tail: str, mode: str = "explicit") -> Counted:
        messages = [
            {"role": "system", "content": [part(DOCUMENT, MARK), part(tail)]},
            user("What?"),
        ]
        return chat(openai_server, messages, prompt_cache_options={"mode": mode})

    first = request(" It was cold.")
    assert 0 < first.written < first.prompt
    other = request(" It was warm.")
    assert (other.read, other.written) == (first.written, 0)
    implicit = request(" It was hot.", "implicit")
    assert implicit.read == first.written
    assert implicit.read + implicit.written > other.prompt - 40
    items = [
        {"role": "system", "content": [part(DOCUMENT, MARK, "input_text")]},
        user("What?"),
    ]
    response = respond(openai_server, items, prompt_cache_options=EXPLICIT)
    assert counted(response).read == first.written
    assert response.prompt_cache_options.mode == "explicit"


def test_explicit_mode_without_breakpoints_is_without_caching(openai_server: Server) -> None:
    chat(openai_server, QUESTION)
    alone = chat(openai_server, QUESTION, prompt_cache_options=EXPLICIT)
    assert (alone.read, alone.written) == (0, 0)
    raw = openai_server.http().post(
        "/v1/chat/completions",
        json={"messages": QUESTION, "max_tokens": 1, "prompt_cache_options": EXPLICIT},
    )
    assert int(raw.headers["anaphora-computed-tokens"]) < alone.prompt / 10, "time follows blocks"


@pytest.mark.parametrize(("mode", "most"), [("explicit", 4), ("implicit", 3)])
def test_the_latest_breakpoints_are_written(openai_server: Server, mode: str, most: int) -> None:
    texts = [DOCUMENT[:299], *(f" Part {number} of it." for number in range(5))]

    def request(marked: Any, mode: str) -> Counted:
        parts = [part(text, MARK if n in marked else None) for n, text in enumerate(texts)]
        messages = [{"role": "system", "content": parts}, user("What?")]
        return chat(openai_server, messages, prompt_cache_options={"mode": mode})

    assert request(range(6), mode).read == 0
    reads = [request([number], "explicit").read > 0 for number in range(6)]
    assert reads == [False] * (6 - most) + [True] * most


def test_breakpoints_stand_on_texts_of_every_role(openai_server: Server) -> None:
    for number, message in enumerate(
        [
            {"role": "system", "content": [part(OTHER, MARK)]},
            {"role": "developer", "content": [part(OTHER[5:], MARK)]},
            {"role": "user", "content": [part(OTHER[10:], MARK), part("", MARK), part("more")]},
            {"role": "assistant", "content": [part(OTHER[15:], MARK)]},
        ]
    ):
        messages = [message, user(f"What {number}?")]
        first = chat(openai_server, messages, prompt_cache_options=EXPLICIT)
        assert 0 < first.written < first.prompt
        again = chat(openai_server, [message, user("Why?")], prompt_cache_options=EXPLICIT)
        assert (again.read, again.written) == (first.written, 0)
    outputs = [part(OTHER[20:], MARK, "input_text"), part("more", None, "input_text")]
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    items = [user("Look"), call, {"type": "function_call_output", "call_id": "c"}]
    items[-1]["output"] = outputs
    first = counted(respond(openai_server, items, prompt_cache_options=EXPLICIT))
    assert 0 < first.written < first.prompt


def test_lifetimes_are_counted_and_end(timed: Server, clock: ManualClock) -> None:
    items = [
        {"role": "system", "content": [part(DOCUMENT, LONG_MARK, "input_text")]},
        user("What?"),
    ]
    first = counted(respond(timed, items))
    assert 0 < first.for_hours < first.written < first.prompt
    clock.advance(1799)
    assert counted(respond(timed, items)).read == first.written
    clock.advance(1799)
    assert counted(respond(timed, items)).read == first.written, "a read renews it"
    clock.advance(1800)
    after = counted(respond(timed, items))
    assert after.read == first.for_hours
    assert (after.for_hours, after.written) == (0, first.written - first.for_hours)
    clock.advance(12 * 3600)
    assert counted(respond(timed, items)) == first
    for_hours = respond(timed, OTHER, prompt_cache_options={"ttl": "12h"})
    assert counted(for_hours).for_hours == counted(for_hours).written > 0
    assert for_hours.prompt_cache_options.ttl == "12h"


def test_case_25_keys(openai_server: Server) -> None:
    def read(key: Any = openai.omit) -> int:
        by_chat = chat(openai_server, QUESTION, prompt_cache_key=key)
        again = respond(openai_server, QUESTION, prompt_cache_key=key)
        assert counted(again).read == by_chat.read + by_chat.written
        assert again.prompt_cache_key == (key if isinstance(key, str) else None)
        return by_chat.read

    assert read("k" * 64) == 0
    assert read("k" * 63 + "j") == 0, "another key"
    assert read("k" * 64) > 0
    assert read() == 0, "another one than any"
    assert read("") > 0, "an empty key is none"
    assert read("🔑" * 64) == 0
    for length in (65, 72):
        for create in (chat, respond):
            with pytest.raises(openai.BadRequestError) as caught:
                create(openai_server, QUESTION, prompt_cache_key="k" * length)
            error: Any = caught.value.body
            assert error["param"] == "prompt_cache_key"
            assert error["code"] == "string_above_max_length"
            assert error["message"] == (
                "Invalid 'prompt_cache_key': string too long. Expected a string with maximum "
                f"length 64, but got a string with length {length} instead."
            )
    wrongs: list[Any] = [5, True, ["k"], {}]
    for wrong in wrongs:
        for create in (chat, respond):
            with pytest.raises(openai.BadRequestError) as caught:
                create(openai_server, QUESTION, prompt_cache_key=wrong)
            assert caught.value.param == "prompt_cache_key"


def test_a_key_is_accepted_by_the_default_profile(server: Server) -> None:
    first = chat(server, [user(OTHER)], prompt_cache_key="a")
    assert first.read + first.written == first.prompt
    assert chat(server, [user(OTHER)], prompt_cache_key="b").read == first.prompt
    with pytest.raises(openai.BadRequestError):
        chat(server, [user(OTHER)], prompt_cache_key="k" * 65)


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"tool_choice": "none"}, True),
        ({"reasoning": {"effort": "medium"}, "text": {"verbosity": "medium"}}, True),
        ({"parallel_tool_calls": True}, True),
        ({"prompt_cache_retention": "24h"}, True),
        ({"reasoning": {"effort": "high"}}, False),
        ({"text": {"verbosity": "low"}}, False),
        ({"text": {"format": {"type": "text"}}}, True),
        ({"text": {"format": {"type": "json_object"}}}, False),
        ({"parallel_tool_calls": False}, False),
    ],
)
def test_what_a_prefix_has_to_match_on(
    openai_server: Server, options: dict[str, Any], same: bool
) -> None:
    respond(openai_server, QUESTION)
    assert (counted(respond(openai_server, QUESTION, **options)).read > 0) == same
    for name, member, of_chat in (
        ("reasoning", "effort", "reasoning_effort"),
        ("text", "verbosity", "verbosity"),
        ("text", "format", "response_format"),
    ):
        if member in options.get(name, {}):
            options = {of_chat: options[name][member]}
    assert chat(openai_server, QUESTION, **options).read > 0, "chat and responses are alike"


def test_prewarming_generates_nothing(openai_server: Server) -> None:
    warm: Any = {"prompt_cache_options": {"prewarm": True}, "instructions": DOCUMENT}
    events: list[Any] = list(respond(openai_server, "Remember", stream=True, **warm))
    kinds = ["response.created", "response.in_progress", "response.completed"]
    assert [event.type for event in events] == kinds
    first = events[-1].response
    assert (first.status, first.output, first.usage.output_tokens) == ("completed", [], 0)
    assert counted(first).written > 0
    again = respond(openai_server, "Remember", **warm)
    assert (again.status, again.output, again.usage.output_tokens) == ("completed", [], 0)
    assert counted(again).read == counted(first).written
    following = respond(
        openai_server, "What?", instructions=DOCUMENT, previous_response_id=first.id
    )
    assert counted(following).read == counted(first).written


def diagnosis(response: Any) -> Any:
    told = response.prompt_cache_diagnostics
    return told if told is None else told.model_dump(exclude_none=True)


def compare(server: Server, items: Any, before: Any, **options: Any) -> Any:
    chosen = {"comparison_response_id": before.id, **options.pop("prompt_cache_options", {})}
    return respond(server, items, prompt_cache_options=chosen, **options)


def test_diagnostics_tell_a_hit(openai_server: Server) -> None:
    first = respond(openai_server, QUESTION)
    assert diagnosis(first) is None
    again = compare(openai_server, QUESTION, first)
    assert diagnosis(again) == {"type": "cache_hit"}
    assert again.prompt_cache_options.comparison_response_id == first.id
    turn = [*QUESTION, assistant("Thirteen."), user("Sure?")]
    assert diagnosis(compare(openai_server, turn, first)) == {"type": "cache_hit"}
    events: list[Any] = list(compare(openai_server, QUESTION, first, stream=True))
    assert diagnosis(events[-1].response) == {"type": "cache_hit"}
    assert all(
        diagnosis(event.response) is None for event in events[:-1] if hasattr(event, "response")
    )


TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prompt_cache_key": "other"}, "prompt_cache_key_changed"),
        ({"tools": [TOOL]}, "tools_changed"),
        ({"parallel_tool_calls": False}, "tools_changed"),
        ({"reasoning": {"effort": "high"}}, "reasoning_effort_changed"),
        ({"text": {"verbosity": "high"}}, "verbosity_changed"),
        ({"text": {"format": {"type": "json_object"}}}, "text_format_changed"),
        ({"text": {"verbosity": "high"}, "prompt_cache_key": "x"}, "prompt_cache_key_changed"),
        ({"instructions": "Be brief."}, "input_changed"),
    ],
)
def test_diagnostics_tell_what_changed_first(
    openai_server: Server, options: dict[str, Any], reason: str
) -> None:
    first = respond(openai_server, QUESTION)
    other = compare(openai_server, QUESTION, first, **options)
    told = diagnosis(other)
    assert (told["type"], told["reason"]) == ("cache_miss", reason)
    assert told["comparison_reusable_tokens"] == counted(first).written
    assert 0 < told["cache_missed_tokens"] <= counted(other).prompt


def test_diagnostics_tell_where_the_input_changed(openai_server: Server) -> None:
    first = respond(openai_server, QUESTION)
    changed = [system(DOCUMENT[:700] + "!" + DOCUMENT[701:]), QUESTION[1]]
    told = diagnosis(compare(openai_server, changed, first))
    assert told["reason"] == "input_changed"
    whole = openai_server.model.render(QUESTION).tokens
    other = openai_server.model.render(changed).tokens
    size = min(len(whole), len(other))
    common = int(np.argmax(whole[:size] != other[:size]))
    assert 0 <= told["cache_missed_tokens"] - (len(other) - common) < 64


def test_diagnostics_tell_another_model(serve: Serve, tiny_model: TinyModel, store: Any) -> None:
    paths = [tiny_model("llama", f32=True), tiny_model("llama")]
    server = serve(options=OPTIONS, paths=paths, responses=store)
    first = respond(server, QUESTION, model=paths[0].stem)
    told = diagnosis(compare(server, QUESTION, first, model=paths[1].stem))
    assert told["reason"] == "model_changed"


@pytest.fixture
def store(tmp_path: Path) -> ResponseStore:
    return ResponseStore(tmp_path / "responses.db")


def test_diagnostics_of_nothing_to_compare_with(
    serve: Serve, store: ResponseStore, tmp_path: Path
) -> None:
    keys, (alice, bob) = issued(tmp_path, "alice", "bob")
    server = serve(options=OPTIONS, keys=keys, responses=store)
    first = respond(server, QUESTION, api_key=alice)
    loose = respond(server, QUESTION, api_key=alice, store=False)
    short = respond(server, "Hi", api_key=alice)

    def told(before: str, key: str = alice) -> Any:
        chosen = {"comparison_response_id": before}
        response = respond(server, QUESTION, api_key=key, prompt_cache_options=chosen)
        return diagnosis(response)

    assert told(first.id) == {"type": "cache_hit"}
    not_found = {"type": "comparison_response_not_found"}
    assert [told(first.id, bob), told(loose.id), told("resp_abc")] == [not_found] * 3
    assert told(short.id) == {"type": "unavailable"}, "it left nothing in the cache"


def test_diagnostics_of_what_has_expired(timed: Server, clock: ManualClock) -> None:
    first = respond(timed, QUESTION)
    clock.advance(1800)
    assert diagnosis(compare(timed, QUESTION, first)) == {"type": "unavailable"}


def test_diagnostics_of_settings_no_request_can_have_yet() -> None:
    tokens = np.arange(300, dtype=np.int32)

    def like(conditions: Conditions) -> openai_diagnostics.Likeness:
        return openai_diagnostics.likeness("openai", "m", conditions, [], tokens, 200)

    before, now = like(Conditions()), like(Conditions(text_format="json_schema"))
    told = openai_diagnostics.diagnose(before, now, tokens, 0)
    assert told["reason"] == "text_format_changed"
    assert told["cache_missed_tokens"] == 300


@pytest.mark.parametrize("position", [0, 1, 63, 64, 100, 199])
def test_diagnostics_find_the_step_before_the_first_difference(position: int) -> None:
    tokens = np.arange(300, dtype=np.int32)
    before = openai_diagnostics.likeness("local", "m", Conditions(), [], tokens, 200)
    changed = tokens.copy()
    changed[position] = 7777
    told = openai_diagnostics.diagnose(before, before, changed, 0)
    assert told["cache_missed_tokens"] == 300 - position // 64 * 64
    changed = tokens.copy()
    changed[200:] = 7777
    assert openai_diagnostics.diagnose(before, before, changed, 1) == {"type": "cache_hit"}
    shorter = openai_diagnostics.diagnose(before, before, tokens[:150], 0)
    assert shorter["cache_missed_tokens"] == 150 - 128


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("chat/completions", {"prompt_cache_options": {"ttl": "12h"}}),
        ("chat/completions", {"prompt_cache_options": {"mode": "none"}}),
        ("chat/completions", {"prompt_cache_options": 5}),
        ("chat/completions", {"prompt_cache_retention": "1h"}),
        ("chat/completions", {"verbosity": "huge"}),
        ("responses", {"prompt_cache_options": {"ttl": "5m"}}),
        ("responses", {"prompt_cache_options": {"prewarm": "yes"}}),
        ("responses", {"prompt_cache_options": {"comparison_response_id": 5}}),
        ("responses", {"prompt_cache_retention": "1h"}),
        ("responses", {"store": "yes"}),
    ],
)
def test_wrong_options_are_refused(server: Server, path: str, changes: dict[str, Any]) -> None:
    name = "messages" if path.startswith("chat") else "input"
    response = server.http().post(f"/v1/{path}", json={name: [user("Hi")], **changes})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(changes))


@pytest.mark.parametrize("mark", [{}, {"mode": "implicit"}, {"mode": "explicit", "ttl": "5m"}, 5])
def test_wrong_breakpoints_are_refused(server: Server, mark: Any) -> None:
    for path, name, kind in (
        ("chat/completions", "messages", "text"),
        ("responses", "input", "input_text"),
    ):
        body = {name: [{"role": "user", "content": [part("Hi", mark, kind)]}]}
        response = server.http().post(f"/v1/{path}", json=body)
        assert response.status_code == 400
        assert "prompt_cache_breakpoint" in response.json()["error"]["message"]


def test_a_breakpoint_on_output_is_ignored_and_named(server: Server) -> None:
    items = [
        {"role": "assistant", "content": [part("Hello", MARK, "output_text")]},
        user("Hi"),
    ]
    response = server.http().post("/v1/responses", json={"input": items, "max_output_tokens": 1})
    assert response.headers["anaphora-ignored"] == "input.content.prompt_cache_breakpoint"


def test_breakpoints_are_promises_in_the_default_profile(server: Server) -> None:
    items = [
        {"role": "system", "content": [part(OTHER[40:], LONG_MARK, "input_text")]},
        user("What?"),
    ]
    first = counted(respond(server, items))
    assert first.read + first.written == first.prompt
    assert 0 < first.for_hours < first.written
    assert counted(respond(server, items)).read == first.prompt


def test_the_async_client(openai_server: Server) -> None:
    async def talk() -> tuple[int, int]:
        async with openai_server.async_openai() as client:
            options: Any = {"model": "any", "input": QUESTION, "max_output_tokens": 1}
            options["prompt_cache_options"] = {"mode": "implicit", "ttl": "12h"}
            first = await client.responses.create(**options)
            stream = await client.responses.create(**options, stream=True)
            last: Any = [event async for event in stream][-1]
            return counted(first).for_hours, counted(last.response).read

    written, read = asyncio.run(talk())
    assert written == read > 0


@pytest.mark.parametrize("rules", ["local", "openai", "anthropic"])
def test_case_17_counters_agree_on_all_protocols(serve: Serve, tmp_path: Path, rules: str) -> None:
    options = Options(profile=rules, profiles=OPTIONS.profiles)
    folder = tmp_path / "cache"
    server = serve(options=options, cache_dir=folder, responses=ResponseStore(tmp_path / "r.db"))
    said = []
    for _ in range(2):
        for protocol in PROTOCOLS:
            said += [say(server, protocol, QUESTION) for say in (ask, hear)]
    assert len({one.prompt for one in said}) == 1
    totals = {"prompt": 0, "cache_read": 0, "cache_written": 0, "generated": 0}
    for one in said:
        totals["prompt"] += one.prompt
        totals["cache_read"] += one.read
        totals["cache_written"] += one.written
        totals["generated"] += one.output
    for name, total in totals.items():
        assert server.metric(f"anaphora_{name}_tokens_total") == total
    server.stop()
    server = serve(options=options, cache_dir=folder, responses=ResponseStore(tmp_path / "r.db"))
    for protocol in PROTOCOLS:
        again = ask(server, protocol, QUESTION)
        assert again.prompt == said[0].prompt
        if rules == "local":
            assert again.read == again.prompt
    previous = None
    for text in (DOCUMENT, "Two", "Three"):
        chained: dict[str, Any] = {} if previous is None else {"previous_response_id": previous.id}
        before, previous = previous, respond(server, text, **chained)
        if before is not None and rules != "anthropic":
            assert counted(previous).read >= counted(before).read + counted(before).written - 16


@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_case_28_history_is_edited_and_restored(openai_server: Server, protocol: Protocol) -> None:
    turns: list[Any] = [system(DOCUMENT[:400])]
    for number in range(10):
        turns += [user(f"Result {number}: " + OTHER[number : number + 300]), assistant("Fine.")]
        ask(openai_server, protocol, turns[:-1])
    history = turns[:-1]
    restored = ask(openai_server, protocol, history)

    def edited(*numbers: int) -> list[Any]:
        return [
            user("[cleared]") if index in [1 + 2 * n for n in numbers] else turn
            for index, turn in enumerate(history)
        ]

    found = ends(openai_server, history)
    third = ask(openai_server, protocol, edited(3))
    assert third.read == found[1 + 2 * 2], "what ends before the first change"
    assert ask(openai_server, protocol, edited(3, 4)).read == third.read
    untouched = ask(openai_server, protocol, history)
    assert untouched.read == restored.read == found[-1]


def test_case_28_the_change_is_told(openai_server: Server) -> None:
    history = [system(DOCUMENT), user("One"), assistant("Two"), user("Three")]
    first = respond(openai_server, history)
    moved = [history[0], user("One more"), *history[2:]]
    told = diagnosis(compare(openai_server, moved, first))
    assert told["reason"] == "input_changed"
    assert told["cache_missed_tokens"] < counted(first).prompt / 2
