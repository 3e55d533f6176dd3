"""Random conversations through the whole server: answers, ledger and metrics tell the same.

Asked by the official clients, on three protocols, by the rules of three profiles. Clients leave,
time passes, servers stop and another one starts on their folder, space runs out.
``ANAPHORA_SOAK=1`` (``make soak``) runs thousands.
"""

from __future__ import annotations

import json
import re
import sqlite3
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import pytest
from anthropic import Anthropic as AnthropicClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import OpenAI as OpenAIClient
from typer.testing import CliRunner

from anaphora import Model, Settings
from anaphora.api.books import Books
from anaphora.api.endpoint import Options
from anaphora.api.serving import Serving
from anaphora.cli import app
from anaphora.clock import ManualClock
from anaphora.keys import KeyFile, Keys
from anaphora.profiles import Anthropic, Local, OpenAI, Profile
from anaphora.profiles.outline import LIFETIMES, Boundary, Outline, Ttl
from anaphora.roster import Choice, Roster
from anaphora.usage.ledger import Ledger
from anaphora.usage.prices import PriceTable
from tests.api.conftest import Server
from tests.api.talk import PROTOCOLS, Protocol
from tests.conftest import SOAK
from tests.profiles import naive
from tests.profiles.naive import Account, Promise, agreeing
from tests.usage.test_ledger import settled

Json = dict[str, Any]
Row = dict[str, Any]
Way = Literal["whole", "streamed", "left"]
Mark = Literal["short", "long"] | None
Marks = tuple[tuple[Mark, ...], ...]
Turns = tuple[tuple[str, ...], ...]

EXAMPLES = 300 if SOAK else 8
RULES: dict[str, Profile] = {
    "local": Local(),
    "anthropic": Anthropic(minimum=60, look_back=3),
    "openai": OpenAI(minimum=60, most_writes=3, most_explicit=3, most_messages=2),
}
NATIVE: dict[str, tuple[Protocol, ...]] = {
    "local": PROTOCOLS,
    "anthropic": ("messages",),
    "openai": ("chat", "responses"),
}
"""Protocols whose breakpoints are those of the rules."""
TEXTS = [
    "Apples lie on floor one. " * 4,
    "Books stand by the door. " * 2,
    "Chairs.",
    "Desks have a lamp each. " * 5,
]
"""No two begin alike, and no token is part of two of them."""
ROOMY: Json = {"memory_budget": 64 << 20}
TIGHT: Json = {
    "memory_budget": 0,
    "disk_budget": 150_000,
    "block_size": 64,
    "context_size": 2048,
    "parallel": 1,
}
PRICES: dict[str, Fraction] = {
    **{"uncached": Fraction(4), "read": Fraction("0.4"), "output": Fraction(20)},
    **{"written_5m": Fraction(5), "written_30m": Fraction(5), "written_1h": Fraction(8)},
    **{"written_12h": Fraction(12), "written_unlimited": Fraction(0)},
}
TABLE = PriceTable(
    [
        {
            **{"input": 4, "read": "0.1x", "output": 20, "write": "1.25x"},
            **{"write-1h": "2x", "write-12h": 12, "write-unlimited": 0},
        }
    ]
)
WRITTEN = ("written_5m", "written_30m", "written_1h", "written_12h", "written_unlimited")


@dataclass(frozen=True)
class Asked:
    """A request, before it is put in the words of a protocol."""

    rules: str
    protocol: Protocol
    tenant: str
    turns: Turns
    """Texts of the system message, of the user's, of the assistant's, and so on."""
    marks: Marks
    """A breakpoint on each of the texts."""
    other: bool
    """Under other conditions than most."""
    explicit: bool
    way: Way
    max_tokens: int
    wait: float
    """Seconds since the request before it."""
    restart: bool
    """The server stops after it, and another one starts."""

    @property
    def messages(self) -> Iterator[tuple[str, list[tuple[str, Ttl | None]]]]:
        """Roles, and texts with the lifetimes asked for, as far as the protocol can say so."""
        short, long = ("5m", "1h") if self.protocol == "messages" else ("30m", "12h")
        names: dict[str | None, Ttl | None] = {None: None, "short": short, "long": long}  # type: ignore[dict-item]
        places = [
            (number, place)
            for number, marks in enumerate(self.marks)
            for place, mark in enumerate(marks)
            if mark is not None
        ]
        left = set(places[-4:] if self.protocol == "messages" else places)
        for number, (texts, marks) in enumerate(zip(self.turns, self.marks, strict=True)):
            role = "system" if number == 0 else ("assistant", "user")[number % 2]
            parts = []
            for place, (text, mark) in enumerate(zip(texts, marks, strict=True)):
                spoken = mark if (number, place) in left else None
                if self.protocol == "responses" and role == "assistant":
                    spoken = None
                if spoken == "short" and self.protocol == "messages":
                    names["long"] = "5m"  # one hour can't come after five minutes
                parts.append((text, names[spoken]))
            yield role, parts

    @property
    def plain(self) -> list[Json]:
        """The conversation alone."""
        return [
            {"role": role, "content": [{"type": "text", "text": text} for text, _ in parts]}
            for role, parts in self.messages
        ]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Turns, Marks]:
    texts = st.lists(st.sampled_from(TEXTS), min_size=1, max_size=2).map(tuple)
    turns = tuple(draw(texts) for _ in range(6))
    return turns, draw(marked(turns))


@st.composite
def marked(draw: st.DrawFn, turns: Turns) -> Marks:
    mark: st.SearchStrategy[Mark] = st.sampled_from([None, None, "short", "long"])
    return tuple(tuple(draw(mark) for _ in turn) for turn in turns)


@st.composite
def histories(draw: st.DrawFn, rules: list[str], native: bool) -> list[Asked]:
    """Requests of few senders, that are turns of few conversations."""
    talks = draw(st.lists(conversations(), min_size=1, max_size=2))
    asked = requests(st.sampled_from(talks), st.sampled_from(rules), native)
    return draw(st.lists(asked, min_size=12, max_size=24))


@st.composite
def requests(
    draw: st.DrawFn,
    talks: st.SearchStrategy[tuple[Turns, Marks]],
    profiles: st.SearchStrategy[str],
    native: bool,
) -> Asked:
    rules = draw(profiles)
    turns, marks = draw(talks)
    rarely = st.sampled_from([False] * 5 + [True])
    if draw(rarely):
        marks = draw(marked(turns))
    count = draw(st.sampled_from([2, 4, 6]))
    ways: list[Way] = ["whole", "whole", "streamed", "left"]
    way = draw(st.sampled_from(ways))
    least = {"whole": 0, "streamed": 1, "left": 100}[way]
    return Asked(
        rules,
        draw(st.sampled_from(NATIVE[rules] if native else PROTOCOLS)),
        draw(st.sampled_from("aaaaab")),
        turns[:count],
        marks[:count],
        draw(rarely),
        draw(rarely),
        way,
        least + draw(st.integers(0, 2)),
        draw(st.sampled_from([0.0, 1.0, 150.0, 150.0, 299.0, 299.0, 1799.0, 3600.0])),
        draw(rarely),
    )


def body(asked: Asked) -> Json:
    """In the words of the official client."""
    kinds = {"responses": ("input_text", "output_text")}.get(asked.protocol, ("text", "text"))
    name = "cache_control" if asked.protocol == "messages" else "prompt_cache_breakpoint"
    kind = {"type": "ephemeral"} if asked.protocol == "messages" else {"mode": "explicit"}
    messages = [
        {
            "role": role,
            "content": [
                {
                    "type": kinds[role == "assistant"],
                    "text": text,
                    **({name: {**kind, "ttl": ttl}} if ttl else {}),
                }
                for text, ttl in parts
            ],
        }
        for role, parts in asked.messages
    ]
    options: Json = {"model": "tiny", "extra_body": {}}
    limit = {"chat": "max_completion_tokens", "responses": "max_output_tokens"}
    options[limit.get(asked.protocol, "max_tokens")] = asked.max_tokens
    if asked.protocol == "messages":
        if asked.other:
            options["thinking"] = {"type": "adaptive"}
        return {**options, "system": messages[0]["content"], "messages": messages[1:]}
    if asked.explicit:
        options["prompt_cache_options"] = {"mode": "explicit"}
    if asked.other:
        options["prompt_cache_key"] = "other"
    return {**options, "messages" if asked.protocol == "chat" else "input": messages}


@dataclass
class Told:
    """What an answer says, as far as it was heard."""

    id: str
    counters: tuple[int, int, int, int] | None = None
    """Prompt, read, written, output; ``None``: left before they came."""
    hours: int | None = None
    """Of what is written, under the longer lifetime of the protocol."""
    computed: int | None = None
    final: bool = True


class Client:
    """The official clients, with a key."""

    def __init__(self, openai: OpenAIClient, anthropic: AnthropicClient, key: str) -> None:
        self.openai = openai.with_options(api_key=key)
        self.anthropic = anthropic.with_options(api_key=key)

    def ask(self, asked: Asked) -> Told:
        if asked.way == "whole":
            return self._whole(asked)
        told = Told("")
        options = {"chat": {"stream_options": {"include_usage": True}}}.get(asked.protocol, {})
        with self._resource(asked).create(**body(asked), stream=True, **options) as stream:
            for event in stream:
                begun = self._hear(asked.protocol, event, told)
                if asked.way == "left" and begun:
                    told.final = False
                    break
        return told

    def _whole(self, asked: Asked) -> Told:
        raw = self._resource(asked).with_raw_response.create(**body(asked))
        reply = raw.parse()
        told = Told(reply.id, computed=int(raw.headers["anaphora-computed-tokens"]))
        told.counters, told.hours = counters(asked.protocol, reply.usage)
        return told

    def _resource(self, asked: Asked) -> Any:
        return {
            "chat": self.openai.chat.completions,
            "messages": self.anthropic.messages,
            "responses": self.openai.responses,
        }[asked.protocol]

    def _hear(self, protocol: Protocol, event: Any, told: Told) -> bool:
        """Whether the answer has begun."""
        if protocol == "chat":
            told.id = event.id
            if event.usage is not None:
                told.counters, told.hours = counters(protocol, event.usage)
            return any(choice.delta.content or choice.finish_reason for choice in event.choices)
        if protocol == "responses":
            if hasattr(event, "response"):
                told.id = event.response.id
                if event.response.usage is not None:
                    told.counters, told.hours = counters(protocol, event.response.usage)
            return event.type == "response.output_text.delta" or told.counters is not None
        if event.type == "message_start":
            told.id = event.message.id
            told.counters, told.hours = counters(protocol, event.message.usage)
        if event.type == "message_delta" and told.counters is not None:
            told.counters = (*told.counters[:3], event.usage.output_tokens)
        return event.type in ("content_block_delta", "message_delta")


def counters(protocol: Protocol, usage: Any) -> tuple[tuple[int, int, int, int], int | None]:
    """Of an answer's usage: prompt, read, written, output; and what is written for longer."""
    if protocol == "messages":
        split = usage.cache_creation
        written = usage.cache_creation_input_tokens
        hours = split.ephemeral_1h_input_tokens
        assert written == hours + split.ephemeral_5m_input_tokens
        read, rest = usage.cache_read_input_tokens, usage.input_tokens
        assert min(read, written, rest, hours) >= 0
        return (read + written + rest, read, written, usage.output_tokens), hours
    if protocol == "chat":
        prompt, details, output = usage.prompt_tokens, usage.prompt_tokens_details, "completion"
    else:
        prompt, details, output = usage.input_tokens, usage.input_tokens_details, "output"
    produced = getattr(usage, f"{output}_tokens")
    read, written = details.cached_tokens, details.cache_write_tokens
    assert usage.total_tokens == prompt + produced
    assert min(read, written, prompt - read - written) >= 0
    if protocol == "chat":
        return (prompt, read, written, produced), None
    split = details.cache_write_tokens_details
    assert written == split.ttl_30m_tokens + split.ttl_12h_tokens
    return (prompt, read, written, produced), split.ttl_12h_tokens


@dataclass
class Expected:
    """What the plain rules say of a request, and what came of it."""

    asked: Asked
    told: Told
    prompt: int
    most: int
    """More can't be read."""
    counters: naive.Counters | None = None
    """Read, and written by lifetime; ``None``: not known to the token."""


class House:
    """One folder, and the servers that serve from it one after the other."""

    def __init__(self, path: Path, folder: Path, *, roomy: bool) -> None:
        self.roomy = roomy
        self.clock = ManualClock()
        self.ledger_path = folder / "usage.db"
        self._settings = Settings(
            cache_dir=folder / "cache", threads=1, **(ROOMY if roomy else TIGHT)
        )
        self._path = path
        file = KeyFile(folder / "keys.json")
        self._keys_path = file.path
        self._keys = {
            (rules, tenant): file.add(f"{rules}-{tenant}", tenant, profile=rules)
            for rules in RULES
            for tenant in "ab"
        }
        self._accounts: dict[tuple[str, str], Account] = defaultdict(Account)
        self._prompts: dict[tuple[str, str], list[tuple[float, tuple[int, ...]]]]
        self._prompts = defaultdict(list)
        self.lost = Counter[str]()
        """What had to go for want of space."""
        self._rows = 0

    def live(self, history: list[Asked]) -> None:
        while history:
            end = next((n for n, asked in enumerate(history, 1) if asked.restart), len(history))
            with self._server() as server:
                expected = [
                    self._serve(server, asked, number)
                    for number, asked in enumerate(history[:end], start=1)
                ]
                settled(self._ledger, end)
                metrics = self._metrics(server)
                stats = server.model.stats()
                assert stats is not None
                self.lost["broken"] += stats.broken_promises
                self.lost["disk"] += stats.evicted_from_disk
                self.lost["memory"] += stats.evicted_from_memory
            self._check(expected, metrics)
            history = history[end:]

    @contextmanager
    def _server(self) -> Iterator[Server]:
        roster = Roster(
            [Choice("tiny", self._path)], lambda path: Model(path, self._settings, self.clock)
        )
        self._ledger = Ledger(self.ledger_path)
        serving = Serving(roster.__enter__(), books=Books(self._ledger, TABLE))
        server = Server(serving, Options(profiles=RULES), Keys(self._keys_path, [OPERATOR]))
        server.start()
        try:
            with server.openai() as openai, server.anthropic() as anthropic:
                self._clients = {
                    who: Client(openai, anthropic, key) for who, key in self._keys.items()
                }
                yield server
        finally:
            server.stop()

    def _metrics(self, server: Server) -> dict[str, float]:
        """Sums over tenants."""
        with server.http(headers={"x-api-key": OPERATOR}) as http:
            text = http.get("/metrics").text
        found = dict.fromkeys(SUMS, 0.0)
        for name, value in re.findall(r"^anaphora_(\w+)_tokens_total{\S*} (\S+)$", text, re.M):
            if name in found:
                found[name] += float(value)
        return found

    def _serve(self, server: Server, asked: Asked, number: int) -> Expected:
        """Ask for ``asked``, the ``number``-th of this server."""
        self.clock.advance(asked.wait)
        party = asked.rules, asked.tenant
        now, client = self.clock.now(), self._clients[party]
        rendered = server.model.render(asked.plain)
        tokens = tuple(rendered.tokens.tolist())
        marked = {name: value for name, value in body(asked).items() if name in COUNTED}
        if asked.protocol != "messages":
            system, *messages = asked.plain
            marked = {"model": "tiny", "system": system["content"], "messages": messages}
        count = client.anthropic.messages.count_tokens(**marked).input_tokens
        assert count == len(tokens)
        most = max(
            (
                agreeing(tokens, before) + 3  # an answer may go on as the next turn does
                for time, before in self._prompts[party]
                if asked.rules == "local" or now - time < LIFETIMES["12h"]
            ),
            default=0,
        )
        expected = None
        if self.roomy:
            expected = self._decide(asked, rendered.boundaries, tokens, now)
        told = client.ask(asked)
        if asked.way == "left":
            settled(self._ledger, number)
        self._prompts[party].append((now, tokens))
        return Expected(asked, told, len(tokens), most, expected)

    def _decide(
        self, asked: Asked, places: Any, tokens: tuple[int, ...], now: float
    ) -> naive.Counters:
        """What the plain rules say, while everything finds room."""
        outline = outlined(asked, places)
        account = self._accounts[asked.rules, asked.tenant]
        rules = RULES[asked.rules]
        plainly: Any = getattr(naive, asked.rules)
        counters: naive.Counters = plainly(rules, account, tokens, outline, now)
        view = account.view(tokens, outline, now)
        decision = rules.decide(outline, len(tokens), view, now)
        read = [
            (boundary.position, boundary.match)
            for boundary in outline.boundaries
            if boundary.position <= counters[0]
            and account.lives(tokens[: boundary.position], boundary.match, now)
        ]
        # What is read lives on, and so do all entries before its end.
        account.apply(tokens, replace(decision, refreshed=tuple(read)))
        if asked.rules == "local":
            account.promises.append(Promise(tokens, "", None, None))
        return counters

    def _check(self, history: list[Expected], metrics: dict[str, float]) -> None:
        """That answers, plain rules, rows and metrics agree."""
        with closing(sqlite3.connect(self.ledger_path)) as database:
            database.row_factory = sqlite3.Row
            query = "SELECT * FROM requests ORDER BY time LIMIT -1 OFFSET ?"
            rows = [dict(row) for row in database.execute(query, (self._rows,))]
        self._rows += len(rows)
        assert [row["id"] for row in rows] == [one.told.id for one in history]
        for one, row in zip(history, rows, strict=True):
            check_row(one, row)
        sums = Counter[str]()
        for row in rows:
            for name, columns in SUMS.items():
                sums[name] += sum(row[column] for column in columns)
        assert metrics == {name: sums[name] for name in metrics}


OPERATOR = "operators-own"
COUNTED = ("model", "system", "messages", "thinking")
SUMS = {
    **{"prompt": ("prompt",), "cache_read": ("read",), "cache_written": WRITTEN},
    **{"computed": ("computed",), "generated": ("output",)},
}


def outlined(asked: Asked, places: Any) -> Outline:
    """Where the request has boundaries, by the words of the provider's page."""
    boundaries = []
    by_blocks = asked.protocol == "messages"
    for (role, parts), place in zip(asked.messages, places, strict=True):
        level = "messages" if role != "system" else "system"
        condition = "other" if asked.other and level == "messages" else ""
        match = f"{level} {condition}" if by_blocks else str(asked.other)
        for (_, ttl), position in zip(parts, place.parts, strict=True):
            if ttl is not None or by_blocks:
                boundaries.append(Boundary(position, "block", match, ttl))
        if not by_blocks and role != "assistant":
            kind: Any = "developer" if role == "system" else "message"
            boundaries.append(Boundary(place.end, kind, match))
    return Outline(tuple(boundaries), None if asked.explicit else "30m")


def check_row(one: Expected, row: Row) -> None:
    asked, told = one.asked, one.told
    prompt, read, output = row["prompt"], row["read"], row["output"]
    written = {name.removeprefix("written_"): row[name] for name in WRITTEN if row[name]}
    total = sum(written.values())
    assert prompt == one.prompt
    assert min(read, row["uncached"], *written.values()) >= 0
    assert read + total + row["uncached"] == prompt
    assert read <= one.most
    if told.counters is not None:
        assert told.counters[:3] == (prompt, read, total)
        if told.final:
            assert told.counters[3] == output
    if told.hours is not None:
        longer = "1h" if asked.protocol == "messages" else "12h"
        assert told.hours == written.get(longer, 0)
    if told.computed is not None:
        assert told.computed == row["computed"]
    assert row["computed"] <= prompt
    if asked.rules == "local":
        assert row["uncached"] == 0
    names = (asked.protocol, asked.tenant, asked.rules, asked.way != "whole")
    assert (row["api"], row["tenant"], row["profile"], row["streamed"]) == names
    if one.counters is not None and (asked.rules != "local" or read == one.counters[0]):
        assert (read, written) == one.counters
    elif one.counters is not None:
        # An earlier answer went on in the same words.
        assert one.counters[0] < read <= one.most
    amounts = {**row, "read": read, "output": output}
    cost = sum((amounts[name] * price for name, price in PRICES.items()), Fraction())
    assert row["cost"] == 1000 * cost
    assert row["cost_uncached"] == 1000 * (4 * prompt + 20 * output)


def shown(path: Path) -> list[Json]:
    """What ``anaphora usage`` says, by tenant."""
    command = ["usage", "--usage-file", str(path), "--by", "tenant", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    groups: list[Json] = json.loads(result.output)["groups"]
    return groups


@pytest.mark.parametrize("rules", RULES)
def test_where_there_is_room_the_plain_rules_hold_to_the_token(
    tiny_llama: Path, rules: str
) -> None:
    lost = live(tiny_llama, [rules], roomy=True)
    assert lost["broken"] == 0


def test_where_there_is_none_everything_told_agrees_all_the_same(tiny_llama: Path) -> None:
    lost = live(tiny_llama, list(RULES), roomy=False)
    assert min(lost["broken"], lost["disk"], lost["memory"]) > 0


def live(path: Path, rules: list[str], *, roomy: bool) -> Counter[str]:
    """Many histories, each on a folder of its own. Returns what was lost for want of space."""
    lost = Counter[str]()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(histories(rules, native=roomy))
    def lives(history: list[Asked]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            house = House(path, Path(folder), roomy=roomy)
            house.live(history)
            with closing(sqlite3.connect(house.ledger_path)) as database:
                names = ("prompt", "read", "computed", "output")
                sums = ", ".join(f"sum({name})" for name in names)
                query = f"SELECT tenant, count(*), {sums} FROM requests GROUP BY 1 ORDER BY 1"
                found = database.execute(query).fetchall()
            groups = shown(house.ledger_path)
            columns = ("tenant", "requests", *(f"{name}_tokens" for name in names))
            assert [tuple(group[name] for name in columns) for group in groups] == found
        lost.update(house.lost)

    lives()
    return lost
