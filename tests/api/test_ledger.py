"""The ledger behind the server: a row for every request that reached the engine."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anaphora.api.books import Books
from anaphora.api.endpoint import Options
from anaphora.cli import app
from anaphora.keys import KeyFile, Keys
from anaphora.usage.ledger import Ledger
from anaphora.usage.prices import PriceTable
from tests.api.conftest import DOCUMENT, Serve, issued
from tests.api.talk import PATHS, PROTOCOLS, Said, ask, events, hear, request, said, system, user
from tests.api.test_streams import NEVER_ENDING, wait_until_idle
from tests.engine.test_process import kill
from tests.usage.test_ledger import held, settled

Row = dict[str, Any]
WRITTEN = ("written_5m", "written_30m", "written_1h", "written_12h", "written_unlimited")
TURNS = [system(DOCUMENT), user("What time is it?")]
PRICES = PriceTable([{"tenant": "l*", "input": 2, "read": "0.5x", "output": 8}], "EUR")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.db"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    return Ledger(path)


@pytest.fixture
def books(ledger: Ledger) -> Books:
    return Books(ledger, PRICES)


def rows(path: Path) -> list[Row]:
    with closing(sqlite3.connect(path)) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute("SELECT * FROM requests ORDER BY time")]


def counted(row: Row) -> tuple[int, int, int, int]:
    return row["prompt"], row["read"], sum(row[name] for name in WRITTEN), row["output"]


def reported(answer: Said) -> tuple[int, int, int, int]:
    return answer.prompt, answer.read, answer.written, answer.output


def test_each_answer_has_a_row_with_the_counters_it_told(
    serve: Serve, books: Books, path: Path
) -> None:
    server = serve(books=books)
    told, asked = [], []
    for protocol in PROTOCOLS:
        for streamed, way in ((0, ask), (1, hear)):
            told.append(
                reported(way(server, protocol, [*TURNS[:1], user(f"{protocol} {streamed}")]))
            )
            asked.append((protocol, streamed, "local", server.model.path.stem, "local"))
    text = server.openai().completions.create(model="any", prompt="A", max_tokens=2)
    assert text.usage is not None
    books.close()
    found = rows(path)
    *chats, raw = found
    names = ("api", "streamed", "tenant", "model", "profile")
    assert [tuple(row[name] for name in names) for row in chats] == asked
    assert [counted(row) for row in chats] == told
    assert (raw["api"], raw["id"], raw["prompt"]) == ("completions", text.id, 1)
    for row in found:
        assert row["uncached"] == 0, "the profile writes all that it doesn't read"
        assert 0 < row["computed"] <= row["prompt"]
        assert 0 <= row["queued"] <= row["first_token"] <= row["total"]
        assert row["finish"] in ("end", "length")
        prompt, read, written, output = counted(row)
        assert row["currency"] == "EUR"
        assert row["cost"] == 1000 * (2 * written + read + 8 * output)
        assert row["cost_uncached"] == 1000 * (2 * prompt + 8 * output)
    assert [row["miss"] for row in found[1:]] == [None] * 6, "nothing was missed that is worth it"
    assert found[0]["miss"] == "first_request"


def test_lifetimes_have_columns_of_their_own(serve: Serve, books: Books, path: Path) -> None:
    server = serve(books=books, options=Options(profile="anthropic"))
    hour, minutes = ({"type": "ephemeral", "ttl": ttl} for ttl in ("1h", "5m"))
    body = {
        "max_tokens": 2,
        "system": [{"type": "text", "text": DOCUMENT * 2, "cache_control": hour}],
    }
    told = []
    for text in ("Hi", "Hi", "Ho"):
        content = [{"type": "text", "text": text * 20, "cache_control": minutes}]
        asked = {**body, "messages": [{"role": "user", "content": content}]}
        told.append(server.http().post(PATHS["messages"], json=asked).json()["usage"])
    books.close()
    for row, usage in zip(rows(path), told, strict=True):
        split = usage["cache_creation"]
        assert row["profile"] == "anthropic"
        assert row["written_1h"] == split["ephemeral_1h_input_tokens"]
        assert row["written_5m"] == split["ephemeral_5m_input_tokens"]
        assert row["read"] == usage["cache_read_input_tokens"]
        assert row["uncached"] == usage["input_tokens"]
        assert row["output"] == usage["output_tokens"]
    first, second, third = rows(path)
    assert min(first["written_1h"], first["written_5m"], second["uncached"]) > 0
    assert second["read"] == first["written_1h"] + first["written_5m"]
    assert third["read"] == first["written_1h"]


def test_official_clients_find_their_answers_by_id(serve: Serve, books: Books, path: Path) -> None:
    server = serve(books=books)
    chat = server.openai().chat.completions.create(model="x", messages=TURNS, max_tokens=3)  # type: ignore[arg-type]
    message = server.anthropic().messages.create(
        model="x", max_tokens=3, messages=[{"role": "user", "content": "Hi"}]
    )
    response = server.openai().responses.create(model="x", input="Hi", max_output_tokens=3)
    books.close()
    assert [row["id"] for row in rows(path)] == [chat.id, message.id, response.id]


def test_one_who_leaves_pays_for_the_input_once_and_for_what_was_made(
    serve: Serve, books: Books, path: Path
) -> None:
    server = serve(books=books)
    body = {"messages": TURNS, "max_tokens": 5000, "logit_bias": NEVER_ENDING}
    stream = events(server, "chat", body)
    heard = [next(stream) for _ in range(5)]
    stream.close()
    wait_until_idle(server)
    books.close()
    (row,) = rows(path)
    assert row["finish"] == "cancelled"
    assert row["id"] == heard[0]["id"]
    assert row["prompt"] == row["read"] + row["written_unlimited"]
    assert row["prompt"] > len(DOCUMENT) // 2
    assert 0 < row["output"] < 5000


def test_what_is_refused_or_only_counted_has_no_row(serve: Serve, books: Books, path: Path) -> None:
    server = serve(books=books, context_size=256)
    http = server.http()
    assert http.post(PATHS["chat"], json={"messages": TURNS}).status_code == 400
    assert http.post(PATHS["chat"], json={"messages": []}).status_code == 400
    count = {"messages": [user("Hi")]}
    assert http.post("/v1/messages/count_tokens", json=count).status_code == 200
    books.close()
    assert not path.exists() or rows(path) == []


def test_a_request_that_fails_has_a_row(serve: Serve, books: Books, path: Path) -> None:
    server = serve(books=books, engine="process")
    stream = events(
        server, "chat", {"messages": TURNS, "max_tokens": 5000, "logit_bias": NEVER_ENDING}
    )
    heard = next(stream)
    kill()
    for _ in stream:
        pass
    wait_until_idle(server)
    books.close()
    (row,) = rows(path)
    assert (row["id"], row["finish"]) == (heard["id"], "failed")
    assert row["prompt"] == row["written_unlimited"]
    assert row["total"] > 0


def test_tenants_have_rows_and_prices_of_their_own(
    serve: Serve, books: Books, path: Path, tmp_path: Path
) -> None:
    keys, of_tenants = issued(tmp_path, "lara", "max")
    server = serve(books=books, keys=keys)
    for key in of_tenants:
        body = request("chat", TURNS)
        reply = server.http().post(PATHS["chat"], json=body, headers={"x-api-key": key})
        assert said("chat", reply.json()).read < 32
    books.close()
    shown = [(row["tenant"], row["cost"] is None, row["miss"]) for row in rows(path)]
    assert shown == [("lara", False, "first_request"), ("max", True, "first_request")]


def test_the_command_reads_while_the_server_runs(
    serve: Serve, ledger: Ledger, books: Books, path: Path
) -> None:
    server = serve(books=books)
    answers = [ask(server, "chat", [*TURNS[:1], user(f"Number {n}?")]) for n in range(3)]
    settled(ledger, 3)
    command = ["usage", "--usage-file", str(path), "--by", "tenant", "--json"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    (group,) = json.loads(shown.output)["groups"]
    assert group["tenant"] == "local"
    assert group["requests"] == 3
    assert group["prompt_tokens"] == sum(answer.prompt for answer in answers)
    assert group["read_tokens"] == sum(answer.read for answer in answers)


def test_a_place_that_cannot_be_written_costs_the_rows_and_nothing_else(
    serve: Serve, ledger: Ledger, books: Books, path: Path, tmp_path: Path
) -> None:
    path.mkdir()
    file = KeyFile(tmp_path / "keys.json")
    keys = [file.add(name) for name in ("lara", "max")]
    server = serve(books=books, keys=Keys(file.path))

    def ask_as(key: str) -> None:
        body = request("chat", [user("Hi")])
        reply = server.http().post(PATHS["chat"], json=body, headers={"x-api-key": key})
        assert reply.status_code == 200

    for key in (*keys, keys[0]):
        ask_as(key)
    settled(ledger, 3)
    shown = {keys[0]: ["lara 2"], keys[1]: ["max 1"], file.add("boss", operator=True): None}
    lost = re.compile(r'^anaphora_usage_rows_lost_total{tenant="(\w+)"} (\d+)', re.MULTILINE)
    for key, expected in shown.items():
        metrics = server.http().get("/metrics", headers={"x-api-key": key}).text
        told = [" ".join(one) for one in lost.findall(metrics)]
        assert told == (expected or ["lara 2", "max 1"])
    path.rmdir()
    ask_as(keys[1])
    books.close()
    assert [row["tenant"] for row in rows(path)] == ["max"], "it is tried again with each row"


def test_a_file_that_somebody_holds_costs_the_rows_and_nothing_else(
    serve: Serve, path: Path
) -> None:
    ledger = Ledger(path, queue_size=1)
    server = serve(books=Books(ledger, PRICES))
    ask(server, "chat", [user("0")])
    settled(ledger, 1)
    with held(path):
        for number in range(1, 6):
            assert ask(server, "chat", [user(f"{number}")]).prompt
        lost = server.metric("anaphora_usage_rows_lost_total")
        assert lost >= 3, "one is being written, one waits"
    server.serving.books.close()
    assert len(rows(path)) == 6 - server.metric("anaphora_usage_rows_lost_total")


def test_a_damaged_file_costs_no_row_of_the_running_server(
    serve: Serve, ledger: Ledger, books: Books, path: Path
) -> None:
    server = serve(books=books)
    ask(server, "chat", [user("Before")])
    settled(ledger, 1)
    for file in path.parent.glob("usage.db*"):
        file.unlink()
    path.write_bytes(b"no database" * 1000)
    answers = [ask(server, "chat", [user(text)]) for text in ("One", "Two")]
    books.close()
    assert path.with_name("usage.db.damaged-1").read_bytes() == b"no database" * 1000
    assert [counted(row) for row in rows(path)] == [reported(answer) for answer in answers]
    assert server.metric("anaphora_usage_rows_lost_total") == 0
