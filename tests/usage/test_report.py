"""Sums over the ledger agree with the records, and the command shows them."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from anaphora.cli import app
from anaphora.errors import UsageError
from anaphora.usage.ledger import Ledger
from anaphora.usage.record import Cost, Record, TokenCounts
from anaphora.usage.report import Money, totals
from tests.usage.records import NOON, record

DAY = 86400


@pytest.fixture(autouse=True)
def _zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


RECORDS = [
    record(
        number,
        time=NOON + (number % 3) * DAY,
        tenant=("acme", "beta [x]")[number % 2],
        model=("small", "large")[number % 5 == 0],
        tokens=TokenCounts(100 * number, 10 * number, {"5m": number, "12h": 2}, number, 7),
        cost=Cost(number, 10 * number + 1, "USD") if number % 4 else None,
    )
    for number in range(1, 41)
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ledger = Ledger(tmp_path / "usage.db")
    for one in RECORDS:
        ledger.add(one)
    ledger.close()
    return tmp_path / "usage.db"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["usage", *map(str, arguments)])


def prompt_tokens(records: list[Record]) -> int:
    return sum(one.tokens.prompt for one in records)


def test_totals_are_the_sums_of_the_records(path: Path) -> None:
    priced, unpriced = (
        [one for one in RECORDS if (one.cost is None) == missing] for missing in (False, True)
    )
    without, with_price = totals(path)
    assert (without.requests, with_price.requests) == (len(unpriced), len(priced))
    assert without.money is None
    assert with_price.money == Money(
        Decimal(sum(one.cost.amount for one in priced if one.cost)).scaleb(-9),
        Decimal(sum(one.cost.uncached for one in priced if one.cost)).scaleb(-9),
        "USD",
    )
    assert with_price.tokens.prompt == prompt_tokens(priced)
    assert with_price.tokens.read == prompt_tokens(priced) // 10
    assert with_price.tokens.written["12h"] == 2 * len(priced)
    assert with_price.tokens.written["1h"] == 0
    assert with_price.tokens.uncached == sum(one.tokens.uncached for one in priced)
    assert with_price.tokens.output == 7 * len(priced)
    assert with_price.hit_share == 0.1


def test_groups_divide_the_records(path: Path) -> None:
    found = Counter[tuple[str, ...]]()
    for one in totals(path, ["tenant", "model", "day"]):
        found[tuple(one.group.values())] += one.requests
    expected = Counter(
        (one.tenant, one.model, str(date.fromtimestamp(one.time))) for one in RECORDS
    )
    assert found == expected
    days = [one.group["day"] for one in totals(path, ["day"])]
    assert days == sorted(days)


def test_days_are_those_of_the_time_zone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = date.fromtimestamp(NOON)
    assert sum(one.requests for one in totals(path, since=first, until=first)) == 13
    monkeypatch.setenv("TZ", "UTC-14")  # fourteen hours ahead, where it is the next day already
    time.tzset()
    assert {one.group["day"] for one in totals(path, ["day"])} == {
        str(date.fromtimestamp(NOON + n * DAY)) for n in range(3)
    }
    assert totals(path, since=first, until=first) == []
    assert date.fromtimestamp(NOON) > first


def test_requests_can_be_limited_by_day_and_tenant(path: Path) -> None:
    second = date.fromtimestamp(NOON + DAY)
    for limits, expected in (
        ({"since": second}, [one for one in RECORDS if one.time > NOON]),
        ({"until": second}, [one for one in RECORDS if one.time < NOON + 2 * DAY]),
        ({"tenant": "acme"}, [one for one in RECORDS if one.tenant == "acme"]),
        ({"tenant": "nobody"}, []),
        ({"tenant": "' OR 1=1 --"}, []),
    ):
        found = totals(path, **limits)
        assert sum(one.tokens.prompt for one in found) == prompt_tokens(expected)


def test_reading_works_while_records_are_written(path: Path) -> None:
    ledger = Ledger(path)
    seen = 0
    for number in range(100, 150):
        ledger.add(record(number))
        requests = sum(one.requests for one in totals(path))
        assert requests >= max(seen, len(RECORDS))
        seen = requests
    ledger.close()
    assert ledger.stats().lost == {}
    assert sum(one.requests for one in totals(path)) == len(RECORDS) + 50


def test_a_file_that_is_no_ledger_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, but long enough to be looked at " * 100)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").write_text("")
    for name in ("none", "text", "folder", "empty"):
        with pytest.raises(UsageError, match="--usage-file") as caught:
            totals(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "none").exists()


def test_the_command_prints_a_table(path: Path) -> None:
    command = [sys.executable, "-m", "anaphora.cli", "usage", "--by", "tenant", "--by", "day"]
    command += ["--cache-dir", str(path.parent)]
    environment = {**os.environ, "COLUMNS": "160", "TZ": "UTC"}
    shown = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert shown.returncode == 0, shown.stderr
    assert "\x1b[" not in shown.stdout
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert lines[1][:5] == ["tenant", "day", "requests", "prompt", "read"]
    assert "beta [x]" in shown.stdout
    assert "10.0%" in shown.stdout
    assert "USD" in shown.stdout
    assert [line[0] for line in lines if line and line[0] == "total"] == ["total"] * 2


def test_the_command_prints_json_and_csv_with_exact_money(path: Path) -> None:
    found = json.loads(run("--usage-file", path, "--by", "model", "--json").stdout)
    (priced,) = [one for one in found["totals"] if one["currency"]]
    expected = [one for one in RECORDS if one.cost]
    assert Decimal(priced["cost"]) == Decimal(sum(o.cost.amount for o in expected if o.cost)) / (
        10**9
    )
    assert priced["prompt_tokens"] == prompt_tokens(expected)
    text = run("--usage-file", path, "--by", "model", "--csv").stdout
    table = list(csv.DictReader(io.StringIO(text)))
    assert [row["model"] for row in table] == [one["model"] for one in found["groups"]]
    assert [int(row["read_tokens"]) for row in table] == [
        one["read_tokens"] for one in found["groups"]
    ]
    assert [row["saved"] for row in table] == [one["saved"] or "" for one in found["groups"]]


def test_the_command_can_have_nothing_to_show(path: Path, tmp_path: Path) -> None:
    nobody = run("--usage-file", path, "--tenant", "nobody")
    assert (nobody.exit_code, nobody.stdout.strip()) == (0, "no requests")
    assert json.loads(run("--usage-file", path, "--tenant", "nobody", "--json").stdout) == {
        "groups": [],
        "totals": [],
    }
    assert run("--usage-file", path, "--tenant", "nobody", "--csv").stdout == ""
    missing = run("--usage-file", tmp_path / "none")
    assert isinstance(missing.exception, UsageError)
    assert run("--usage-file", path, "--csv", "--json").exit_code == 2
    assert run("--usage-file", path, "--by", "hour").exit_code == 2
    assert run("--usage-file", path, "--since", "yesterday").exit_code == 2
