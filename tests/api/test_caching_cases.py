"""Faults of caching that broke servers like this one, each as the smallest try over HTTP."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from anaphora import Model, Settings
from anaphora.api.books import Books
from anaphora.api.endpoint import Options
from anaphora.api.openai_chat import ChatRequest
from anaphora.api.serving import Serving
from anaphora.clock import ManualClock
from anaphora.profiles import PROFILES, OpenAI
from anaphora.prompt import adapt
from anaphora.prompt.conversation import Conversation
from anaphora.responses import ResponseStore
from anaphora.roster import Choice, Roster
from anaphora.usage.ledger import Ledger
from tests.api.conftest import DOCUMENT, Serve, Server
from tests.api.talk import PATHS, ask, assistant, events, request, system, user
from tests.api.test_anthropic_caching import (
    HOUR,
    MARK,
    NATIVE_TOOLS,
    body,
    counters,
    post,
    refused,
    text,
)
from tests.api.test_explain import explained
from tests.api.test_streams import NEVER_ENDING, wait_until_idle
from tests.tiny_models import CHATML
from tests.usage.test_ledger import held, settled

Json = dict[str, Any]
DAY = 86_400.0
RULES = Options(profile="anthropic")
LONG = DOCUMENT * 3


def schema(*, backwards: bool = False) -> Json:
    """Of a tool's parameters: with names and values that are in no order of their own."""
    members = {
        "type": "object",
        "properties": {"unit": {"type": "string", "enum": ["m", "km", "cm"]}, "at": {}},
        "required": ["unit", "at"],
    }
    return dict(reversed(members.items())) if backwards else members


def tools(*names: str, backwards: bool = False) -> list[Json]:
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Measures {name}.",
                "parameters": schema(backwards=backwards),
            },
        }
        for name in names
    ]


NAMES = ("width", "height", "depth")


@pytest.mark.parametrize("native", [False, True], ids=["generic", "native"])
def test_case_7_tools_are_reused_up_to_the_first_change(
    serve: Serve, tmp_path: Path, native: bool
) -> None:
    (tmp_path / "template.jinja").write_text(NATIVE_TOOLS)
    server = serve(chat_template=tmp_path / "template.jinja" if native else None)
    client: Any = server.openai().chat.completions
    turns: Any = [system(DOCUMENT), user("How wide is it?")]
    known: list[tuple[int, ...]] = []

    def read(given: list[Json]) -> tuple[int, int]:
        """What is read, and what any earlier prompt shares."""
        conversation = Conversation.parse(turns, given)
        prompt = adapt.render(server.model.renderer, conversation, tool_ends=True)
        tokens = tuple(prompt.tokens.tolist())
        told = client.create(model="any", messages=turns, tools=given, max_tokens=1)
        assert told.usage.prompt_tokens == len(tokens)
        shared = max((alike(tokens, before) for before in known), default=0)
        known.append(tokens)
        return told.usage.prompt_tokens_details.cached_tokens, shared

    first = tools(*NAMES)
    assert read(first)[0] == 0
    assert read(first)[0] == len(known[0])
    for changed in (
        tools(*NAMES, backwards=True),
        tools(*NAMES[1:], NAMES[0]),
        tools(*NAMES, "weight"),
    ):
        found, shared = read(changed)
        assert found == shared < len(known[0])
        assert read(first)[0] == len(known[0]), "what was known is known still"


def alike(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def test_case_7_lists_in_a_schema_keep_their_order(server: Server) -> None:
    given = {"messages": [user("Hi")], "tools": tools(*NAMES)}
    conversation = ChatRequest.model_validate(given).generation.prompt
    assert isinstance(conversation, Conversation)
    prompt = adapt.render(server.model.renderer, conversation).text
    assert '["m", "km", "cm"]' in prompt
    assert '["unit", "at"]' in prompt


def test_case_8_a_clock_costs_what_stands_behind_it(server: Server) -> None:
    front: list[int] = []
    end: list[int] = []
    for second in range(3):
        clock = f"Time 12:34:0{second}."
        for turns, reads in (
            ([system(f"{clock} {LONG}"), user("What time is it?")], front),
            ([system(LONG), user(f"What time is it? {clock}")], end),
        ):
            reply = server.openai().chat.completions.create(
                model="any",
                messages=turns,  # type: ignore[arg-type]
                max_tokens=1,
            )
            assert reply.usage is not None
            assert reply.usage.prompt_tokens_details is not None
            reads.append(reply.usage.prompt_tokens_details.cached_tokens or 0)
            if reads is front and second:
                found = explained(server, reply.id)
                assert found["cause"] == "timestamp"
                assert found["difference"]["place"]["kind"] == "system"
                assert found["difference"]["position"] >= reads[-1]
    assert max(front) < 40
    assert min(end[1:]) > 3000


def test_case_8_a_template_shows_the_date_of_the_day(tiny_llama: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    opening = "{{ '<|im_start|>system\nToday is ' + strftime_now('%d %B %Y') + '<|im_end|>\n' }}"
    template.write_text(opening + CHATML)
    clock = ManualClock()
    settings = Settings(cache_dir=None, memory_budget=64 << 20, threads=1, chat_template=template)
    models = Roster([Choice("tiny", tiny_llama)], lambda path: Model(path, settings, clock))
    server = Server(Serving(models.__enter__()), Options())
    server.start()
    try:
        turns = [system(DOCUMENT), user("Which day is it?")]
        days = []
        for _ in range(2):
            for again in (False, True):
                reply = server.http().post(PATHS["chat"], json=request("chat", turns)).json()
                usage = reply["usage"]
                read = usage["prompt_tokens_details"]["cached_tokens"]
                if again:
                    assert read == usage["prompt_tokens"]
                else:
                    days.append((reply["id"], read))
            shown = server.model.render(turns).text
            assert datetime.fromtimestamp(clock.now()).strftime("%d %B %Y") in shown
            clock.advance(DAY)
        (_, first), (id_, second) = days
        assert first == 0
        assert second < 40
        found = explained(server, id_)
        assert found["cause"] in ("date", "template_changed")
        assert found["difference"]["position"] >= second
    finally:
        server.stop()


def test_case_16_a_stream_ends_as_the_message_that_was_not_streamed(serve: Serve) -> None:
    server = serve(options=RULES)
    client = server.anthropic()
    asked = body(system=[text(LONG, HOUR)], max_tokens=20, extra_body={"temperature": 0})
    client.messages.create(**asked)
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        seen: list[anthropic.types.Usage] = [
            event.message.usage for event in stream if event.type == "message_start"
        ]
        final = stream.get_final_message()
    (begun,) = seen
    assert begun.cache_read_input_tokens == whole.usage.cache_read_input_tokens
    assert begun.cache_read_input_tokens is not None
    assert begun.cache_read_input_tokens > 3000
    for name in ("stop_reason", "stop_sequence", "role", "model"):
        assert getattr(final, name) == getattr(whole, name), name
    assert [block.to_dict() for block in final.content] == [b.to_dict() for b in whole.content]
    counts = final.usage.model_dump(exclude_none=True)
    assert counts == {name: whole.usage.model_dump()[name] for name in counts}


def test_case_16_who_leaves_at_the_start_is_in_the_ledger_once(
    serve: Serve, tmp_path: Path
) -> None:
    path = tmp_path / "usage.db"
    books = Books(Ledger(path))
    server = serve(options=RULES, books=books)
    asked = body(system=[text(LONG, MARK)], max_tokens=4000)
    stream = events(server, "messages", asked)
    usage = next(stream)["message"]["usage"]
    stream.close()
    wait_until_idle(server)
    books.close()
    with closing(sqlite3.connect(path)) as database:
        columns = "read, written_1h, written_5m, prompt, output"
        ((*row, prompt, output),) = database.execute(f"SELECT {columns} FROM requests")
    assert tuple(row) == counters(usage)
    assert prompt == sum(row) + usage["input_tokens"]
    assert output < 4000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (PATHS["chat"], {"messages": [user(LONG)], "max_tokens": 0}),
        (PATHS["chat"], {"messages": [user(LONG)], "max_completion_tokens": 0}),
        ("/v1/completions", {"prompt": LONG, "max_tokens": 0}),
        (PATHS["responses"], {"input": LONG, "max_output_tokens": 0}),
        (PATHS["responses"], {"input": LONG, "prompt_cache_options": {"prewarm": True}}),
    ],
)
def test_case_23_nothing_generates_without_limit(
    server: Server, path: str, asked: Json, stream: bool
) -> None:
    generated = server.metric("anaphora_generated_tokens_total")
    response = server.http().post(path, json={**asked, "stream": stream})
    assert response.status_code == 200, response.text
    assert server.metric("anaphora_generated_tokens_total") == generated
    usage = server.http().post(path, json=asked).json()["usage"]
    kind = "input" if path == PATHS["responses"] else "prompt"
    assert usage[f"{kind}_tokens_details"]["cached_tokens"] == usage[f"{kind}_tokens"]
    assert usage["total_tokens"] == usage[f"{kind}_tokens"]


@pytest.mark.parametrize("number", [-1, -(2**63), "0", None])
def test_case_23_no_limit_is_a_limit_of_its_own(server: Server, number: Any) -> None:
    asked = {"max_tokens": number, "messages": [user("Hi")]}
    response = server.http().post(PATHS["messages"], json=asked)
    assert response.status_code == 400, "a limit has to be given, and be one"
    assert "max_tokens" in response.json()["error"]["message"]


def tool_turns(results: list[str]) -> list[Json]:
    """A conversation in which a tool was called again and again."""
    turns = [system(DOCUMENT[:300]), user("Look everywhere.")]
    for number, result in enumerate(results):
        call = {"name": "look", "arguments": f'{{"at": {number}}}'}
        turns += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"c{number}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"c{number}", "content": result},
        ]
    return turns


def test_case_28_an_edited_history_is_read_up_to_the_edit(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    server = serve(cache_dir=folder, block_size=64)
    results = [f"Result {number}: {DOCUMENT[number : number + 300]}" for number in range(10)]
    for count in range(1, 11):
        ask(server, "chat", tool_turns(results[:count]), 1)
    history = tool_turns(results)
    first, second = user("Look everywhere."), user("So?")
    moved = [history[0], *history[2:], first, second]

    def tokens(turns: list[Json]) -> tuple[int, ...]:
        conversation = Conversation.parse(turns)
        return tuple(adapt.render(server.model.renderer, conversation).tokens.tolist())

    known = [tokens(history)]
    whole = ask(server, "chat", history, 1)
    assert whole.read == whole.prompt == len(known[0])
    for cleared in ((3,), (3, 4)):
        edited = tool_turns(
            ["[cleared]" if n in cleared else result for n, result in enumerate(results)]
        )
        answer = ask(server, "chat", edited, 1)
        assert answer.read == max(alike(tokens(edited), before) for before in known)
        assert answer.written == answer.prompt - answer.read
        known.append(tokens(edited))
    assert ask(server, "chat", history, 1).read == whole.prompt, "the untouched is a full hit"
    answer = ask(server, "chat", moved, 1)
    assert answer.read == max(alike(tokens(moved), before) for before in known)
    known.append(tokens(moved))
    server.stop()
    nodes = {one[:end] for one in known for end in range(1, len(one) + 1)}
    files = list(folder.glob("*/blocks/*/*"))
    assert len(files) <= len(nodes) / 64 + 16, "the shared head is stored once"


def test_case_28_messages_that_changed_are_told_with_what_was_missed(serve: Serve) -> None:
    server = serve(options=RULES)
    history = [user(text_) for text_ in ("One. " + DOCUMENT, "Two.", "Three. " + DOCUMENT)]
    turns = [history[0], assistant("A."), history[1], assistant("B.")]
    last = {"role": "user", "content": [text(history[2]["content"], MARK)]}
    head = [text(LONG, MARK)]

    def send(*messages: Json, previous: str | None = None) -> Json:
        asked = body(*messages, system=head, diagnostics={"previous_message_id": previous})
        return post(server, asked)

    first = send(*turns, last)
    cached = sum(counters(first["usage"]))
    edited = [turns[0], turns[1], user("Two, edited."), *turns[3:]]
    second = send(*edited, last, previous=first["id"])
    read = counters(second["usage"])[0]
    assert 3000 < read < cached
    assert second["diagnostics"]["cache_miss_reason"] == {
        "type": "messages_changed",
        "cache_missed_input_tokens": cached - read,
    }
    again = send(*turns, last, previous=first["id"])
    assert (counters(again["usage"])[0], again["diagnostics"]) == (cached, None)


# What no other test says


def test_no_answer_is_ever_cached(serve: Serve) -> None:
    server = serve()
    create: Any = server.openai().chat.completions.create
    texts, reads = [], []
    for _ in range(3):
        reply = create(
            model="any",
            messages=[{"role": "user", "content": DOCUMENT}],
            temperature=1,
            max_tokens=30,
            logit_bias=NEVER_ENDING,
        )
        texts.append(reply.choices[0].message.content)
        reads.append(reply.usage.prompt_tokens_details.cached_tokens)
    assert len(set(texts)) == 3
    assert reads == [0, *[reply.usage.prompt_tokens] * 2]


def test_a_system_message_cannot_be_the_first(serve: Serve) -> None:
    server = serve(options=RULES)
    for path in (PATHS["messages"], PATHS["messages"] + "/count_tokens"):
        asked = body(system("Be brief."), user("Hi"))
        assert refused(server.http().post(path, json=asked)).startswith("messages.0")


def test_tools_that_may_be_called_are_no_part_of_a_prefix(serve: Serve) -> None:
    rules = {**PROFILES, "openai": OpenAI(minimum=200)}
    server = serve(options=Options(profile="openai", profiles=rules))
    create: Any = server.openai().responses.create
    given = [{"type": "function", **one["function"]} for one in tools(*NAMES)]
    asked = {"model": "any", "input": DOCUMENT, "max_output_tokens": 1, "tools": given}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}
    first = create(**asked).usage.input_tokens_details
    assert first.cache_write_tokens > 200
    for choice in ("auto", "none", allowed):
        again = create(**asked, tool_choice=choice).usage.input_tokens_details
        assert again.cached_tokens == first.cache_write_tokens


# Books and stores that can't be used


@pytest.fixture
def ledger_path(tmp_path: Path) -> Path:
    return tmp_path / "usage.db"


def damaged(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)


def blocked(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(("spoil", "lost"), [(damaged, 0), (blocked, 2)])
def test_answers_come_whatever_becomes_of_the_ledger(
    serve: Serve, ledger_path: Path, spoil: Callable[[Path], None], lost: int
) -> None:
    spoil(ledger_path)
    ledger = Ledger(ledger_path)
    books = Books(ledger)
    server = serve(books=books)
    for _ in range(2):
        assert ask(server, "messages", [user("Hi")], 1).prompt
    books.close()
    stats = ledger.stats()
    assert (stats.written, sum(stats.lost.values())) == (2 - lost, lost)


def test_answers_do_not_wait_for_a_locked_ledger(serve: Serve, ledger_path: Path) -> None:
    ledger = Ledger(ledger_path)
    server = serve(books=Books(ledger))
    ask(server, "chat", [user("Hi")], 1)
    settled(ledger, 1)
    with held(ledger_path):
        for number in range(5):
            assert ask(server, "chat", [user(f"{number}")], 1).prompt
        assert ledger.stats().written == 1
    server.stop()
    stats = ledger.stats()
    assert stats.written + sum(stats.lost.values()) == 6


def test_answers_come_while_the_store_of_responses_is_locked(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    server = serve(responses=ResponseStore(path))
    create: Any = server.openai().responses.create
    kept = create(model="any", input="One", max_output_tokens=1)
    with held(path):
        loose = create(model="any", input="Two", max_output_tokens=1)
        assert loose.store is False
        assert server.metric("anaphora_responses_lost_total") == 1
        with pytest.raises(openai.InternalServerError, match="can't be read now"):
            create(model="any", input="Three", previous_response_id=kept.id)
    chained = create(model="any", input="Three", previous_response_id=kept.id)
    assert chained.usage.input_tokens > kept.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="any", input="Three", previous_response_id=loose.id)
    assert caught.value.code == "previous_response_not_found"


# Why it was a miss


@pytest.mark.parametrize(
    ("before", "now", "cause", "kind"),
    [
        ({}, {"tools": tools("height")}, "tools_changed", "tool"),
        ({}, {"tools": tools("width", backwards=True)}, "keys_reordered", "tool"),
        ({"system": "Be kind."}, {"system": "Be very strict."}, "system_changed", "system"),
        (
            {"system": "Session 0b9c2f6e-3d0e-4a57-9a51-5f1f6e8f2a11."},
            {"system": "Session 7d1f3c52-91aa-4c1e-8d2b-0c6a9f3b7e42."},
            "uuid",
            "system",
        ),
        ({"turns": ("One?", "Two?")}, {"turns": ("Eins?", "Two?")}, "message_changed", "message"),
    ],
)
def test_what_changed_is_named_with_what_to_do(
    serve: Serve, tmp_path: Path, before: Json, now: Json, cause: str, kind: str
) -> None:
    (tmp_path / "template.jinja").write_text(NATIVE_TOOLS)
    server = serve(chat_template=tmp_path / "template.jinja")
    ids = []
    for given in (before, now):
        one, two = given.get("turns", ("One?", "Two?"))
        turns = [
            system(given.get("system", "Be kind.") + " " + DOCUMENT),
            *(user(f"{one} {DOCUMENT}"), assistant("Yes."), user(two)),
        ]
        asked = {"messages": turns, "tools": given.get("tools", tools("width")), "max_tokens": 1}
        ids.append(server.http().post(PATHS["chat"], json=asked).json()["id"])
    found = explained(server, ids[1])
    assert found["cause"] == cause
    assert found["advice"]
    assert found["nearest"]["request_id"] == ids[0]
    difference = found["difference"]
    assert difference["place"]["kind"] == kind
    assert difference["position"] == found["nearest"]["shared_tokens"] == found["read_tokens"]
    assert difference["earlier"]["marked"] != difference["now"]["marked"]
