"""The documentation: its code runs, and it names everything there is, as it is."""

from __future__ import annotations

import ast
import json
import math
import re
import sqlite3
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import MISSING, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import typer

from anaphora import Found, Sampling, Settings, Times, Usage, errors
from anaphora.cache.format import Header, Seals
from anaphora.cache.keys import Segment, link
from anaphora.cli import app
from anaphora.cli.explain import rendered
from anaphora.config import FIELDS, load_config, spelled, variable
from anaphora.diagnose.difference import shared
from anaphora.diagnose.explain import CAUSES, explain
from anaphora.diagnose.prompts import Decision
from anaphora.engine.llamacpp.params import PASS_THROUGH, build
from anaphora.profiles import Anthropic, Local, OpenAI, Profile
from anaphora.prompt.conversation import Conversation, Message, TextPart
from anaphora.prompt.volatile import Rule, VolatileRules
from anaphora.usage.ledger import Ledger
from anaphora.usage.prices import PriceTable, presets
from anaphora.usage.record import Cost, TokenCounts
from tests.diagnose.support import FILLER, SYSTEM, VOCAB, remembered
from tests.test_serve import Start, start  # noqa: F401 - a fixture
from tests.usage.records import RECORD

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README, LIBRARY, CACHE = ROOT / "README.md", ROOT / "docs/library.md", ROOT / "docs/cache.md"
SERVER, USAGE = ROOT / "docs/server.md", ROOT / "docs/usage.md"
EXPLAIN, CACHING = ROOT / "docs/explain.md", ROOT / "docs/caching.md"
DESCRIBED = {
    "anaphora serve": (SERVER, "Options"),
    "anaphora chat": (SERVER, "`anaphora chat`"),
    "anaphora selftest": (SERVER, "`anaphora selftest`"),
    "anaphora keys add": (SERVER, "Users and keys"),
    "anaphora keys ls": (SERVER, "Users and keys"),
    "anaphora keys revoke": (SERVER, "Users and keys"),
    "anaphora keys share": (SERVER, "Users and keys"),
    "anaphora keys unshare": (SERVER, "Users and keys"),
    "anaphora usage": (USAGE, "`anaphora usage`"),
    "anaphora explain": (EXPLAIN, "`anaphora explain`"),
}
"""Where a command is explained; the README explains the others."""

_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OPTION = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*(?![\w…-])")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


@pytest.fixture
def at_home(bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache at the default place, but the bundled model is ready; a document to read."""
    cache = tmp_path / ".cache" / "anaphora"
    cache.mkdir(parents=True)
    (cache / "models").symlink_to(bundled.parent)
    (tmp_path / "handbook.txt").write_text("Desks are on the second floor, by the window. " * 40)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def run(page: Path, url: str = "") -> dict[str, Any]:
    """Run the code of a page from top to bottom; errors point into the page.

    A server it talks to is the one at ``url``.
    """
    text = page.read_text().replace("http://127.0.0.1:8080", url)
    names: dict[str, Any] = {"__name__": page.stem}
    for block in _PYTHON.finditer(text):
        code = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(code, page, "exec", dont_inherit=True), names)
    return names


@pytest.mark.model
@pytest.mark.usefixtures("at_home")
def test_the_readmes_example_reads_its_document_from_the_cache() -> None:
    usage = run(README)["reply"].usage
    assert 0 < usage.computed_tokens < 64 < usage.read_tokens
    usage = run(README)["reply"].usage  # a second time, from disk
    assert usage.computed_tokens < 64 < usage.read_tokens


@pytest.mark.model
@pytest.mark.usefixtures("at_home")
def test_the_code_of_the_library_page_runs() -> None:
    run(LIBRARY)


@pytest.mark.model
@pytest.mark.usefixtures("at_home")
def test_the_second_question_of_the_caching_page_reads_what_the_first_wrote(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(CACHING)
    first, second = (line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert first[0] == "0"
    assert first[1].startswith(f"{{'5m': {second[0]}}}")
    assert second[1].startswith("{} ")


def test_no_page_has_code_that_is_not_run() -> None:
    found = {page for page in PAGES if _PYTHON.search(page.read_text())}
    assert found == {README, LIBRARY, SERVER, CACHING}


def test_a_server_is_as_the_server_page_says(
    start: Start,  # noqa: F811 - the fixture
    capsys: pytest.CaptureFixture[str],
) -> None:
    served = start()
    shown = [line.split()[0] for line in served.shown.splitlines() if line]
    assert shown == [line.split()[0] for line in code(SERVER, "text").splitlines() if line]

    command = code(SERVER, "sh").replace("http://127.0.0.1:8080", served.url)
    reply = subprocess.run(["sh", "-c", command], capture_output=True, check=True, timeout=60)
    assert json.loads(reply.stdout)["type"] == "message"

    usage = run(SERVER, served.url)["answer"].usage
    assert usage.cache_read_input_tokens > 0, "the same prompt as before"
    assert f"{usage.cache_read_input_tokens} read, 0 new" in capsys.readouterr().out

    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    metrics = httpx.get(f"{served.url}/metrics").text
    names = set(re.findall(r"^# TYPE (anaphora_\w+) ", metrics, re.MULTILINE))
    named = {name for first, *_ in rows(SERVER, "metric") for name in re.findall(r"`(.*?)`", first)}
    assert named == {name for name in names if not name.endswith("_created")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        assert other.is_file(), target
        if anchor:
            assert anchor in anchors(other), target


def test_every_setting_is_there_with_its_default() -> None:
    assert documented_defaults("setting") == defaults(Settings)


def test_every_sampling_value_is_there_with_its_default() -> None:
    assert documented_defaults("`Sampling`") == defaults(Sampling)


@pytest.mark.parametrize(("title", "kind"), [("`reply.usage`", Usage), ("`reply.times`", Times)])
def test_every_figure_is_explained(title: str, kind: type[Any]) -> None:
    rows = dict(table(LIBRARY, title))
    assert rows.keys() == {f.name for f in fields(kind)}
    if kind is Usage:
        assert all(f"`{f.name}`" in rows["found"] for f in fields(Found))


@pytest.mark.parametrize("profile", [Local(), Anthropic(), OpenAI()], ids=lambda p: p.name)
def test_every_setting_of_a_profile_is_there_with_its_default(profile: Profile) -> None:
    text = section(CACHING, f"`{profile.name}`").split("| setting |")[1]
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| .+ \|$", text, re.MULTILINE)
    described = {name: ast.literal_eval(default) for name, default in rows}
    assert described == {f.name: getattr(profile, f.name) for f in fields(profile)}


def test_every_test_that_holds_a_rule_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", CACHING.read_text()))
    files = (ROOT / "tests").rglob("test_*.py")
    found = {name for f in files for name in re.findall(r"def (test_\w+)\(", f.read_text())}
    assert named
    assert named <= found


def test_every_error_is_explained_once() -> None:
    every = {name for name, value in vars(errors).items() if isinstance(value, type)}
    explained = [name for page in (LIBRARY, SERVER) for name, _ in table(page, "error")]
    assert sorted(explained) == sorted(every - {"AnaphoraError"})


def test_every_option_of_the_server_is_there_with_its_default() -> None:
    described = list(rows(SERVER, "option"))
    assert [row[1] for row in described] == [f"`{spelled(name)}`" for name in FIELDS]
    for (flag, key, named, default, meaning), (name, item) in zip(
        described, FIELDS.items(), strict=True
    ):
        assert flag == ("`MODEL`" if name == "model" else f"`--{spelled(name)}`")
        assert named == f"`{variable(name)}`"
        assert meaning
        if item.default is None:
            assert not default, key
        else:
            written = tomllib.loads(f"value = {default.strip('`')}")["value"]
            meant = item.metadata["option"].parse(written)
            expected = item.default
            assert meant == (expected.expanduser() if isinstance(expected, Path) else expected), key


def test_the_configuration_file_of_the_server_page_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "anaphora.toml"
    file.write_text(code(SERVER, "toml"))
    config = load_config({}, {}, file)
    assert config.disk_budget == 200 << 30
    for name, value in config.llama:
        build(Settings(llama={name: value}))


def test_builds_for_gpus_are_of_the_llama_cpp_that_is_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set(re.findall(r"llama-cpp-python==[\d.]+", section(SERVER, "GPUs")))
    assert named == {text for text in project["dependencies"] if text.startswith("llama-cpp")}


def test_parameters_of_llama_cpp_on_the_server_page_are_among_them() -> None:
    text = section(SERVER, "Options").split("### Parameters of llama.cpp")[1]
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 10
    assert named <= set(PASS_THROUGH)


def test_every_parameter_of_llama_cpp_is_named() -> None:
    text = LIBRARY.read_text()
    assert [name for name in PASS_THROUGH if f"`{name}`" not in text] == []


def test_every_command_is_in_the_readme_and_every_option_where_it_is_explained() -> None:
    readme = README.read_text()
    for name, command in commands(typer.main.get_command(app)):
        assert f"`{name}`" in readme
        text = section(*DESCRIBED[name]) if name in DESCRIBED else readme
        options = {p.opts[0] for p in command.params if p.param_type_name == "option"}
        assert options - set(_OPTION.findall(text)) == set(), name


def test_no_option_is_explained_that_there_is_not() -> None:
    every = {"--version", "--install-completion", "--show-completion"}
    every |= {"--no-binary", "--no-cache-dir"}  # pip's
    for _, command in commands(typer.main.get_command(app)):
        every.update(*((*p.opts, *p.secondary_opts) for p in command.params))
    for page in README, SERVER, USAGE, EXPLAIN:
        assert set(_OPTION.findall(page.read_text())) <= every


@pytest.mark.parametrize(
    "name", ["anaphora chat", "anaphora selftest", "anaphora usage", "anaphora explain"]
)
def test_these_commands_explain_their_own_options_only(name: str) -> None:
    command = dict(commands(typer.main.get_command(app)))[name]
    every = {p.opts[0] for p in command.params}
    assert set(_OPTION.findall(section(*DESCRIBED[name]))) <= every


def test_every_own_option_of_chat_is_there_with_its_default() -> None:
    command = dict(commands(typer.main.get_command(app)))["anaphora chat"]
    text = section(*DESCRIBED["anaphora chat"])
    described = dict(re.findall(r"^\| `--([a-z-]+)` \| (.*?) ?\|", text, re.MULTILINE))
    own = {p.opts[0][2:]: p.default for p in command.params if p.name not in FIELDS}
    del own["config"]
    assert described == {name: "" if d is None else str(d) for name, d in own.items()}


def test_the_header_of_a_block_file_is_as_described() -> None:
    block = link(b"p" * 32, Segment("owner", b"salt"), 512, np.array([7, -1, 9], np.int32))
    seals = Seals(b"s" * 32)
    header = Header(block, "base", 513, True, 99, b"m" * 32)
    data = seals.sealed_header(header)
    values: dict[str, bytes] = {}
    sizes = {"o": 5, "p": 4, "n": 3}
    place = 0
    for offset, size, meaning in rows(CACHE, "offset"):
        assert evaluate(offset, sizes) == place, meaning
        place += evaluate(size, sizes)
        values[meaning.split(":")[0].split(",")[0]] = data[place - evaluate(size, sizes) : place]
    assert place == len(data)

    def number(value: int, size: int) -> bytes:
        return value.to_bytes(size, "little", signed=True)

    assert list(values.values()) == [
        *(b"ANAPHORA", number(1, 2), number(1, 2), block.key, b"p" * 32, block.segment),
        *(number(512, 8), number(513, 8), number(99, 8), b"m" * 32),
        *(number(3, 4), number(5, 2), number(4, 2), b"owner", b"base"),
        *(b"".join(number(token, 4) for token in (7, -1, 9)), data[-32:]),
    ]
    assert len(seals.page(header)) == 4096


def test_every_column_of_the_ledger_is_explained(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "usage.db")
    ledger.add(RECORD)
    ledger.close()
    with closing(sqlite3.connect(tmp_path / "usage.db")) as database:
        columns = [name for _, name, *_ in database.execute("PRAGMA table_info(requests)")]
    named = [name for first, *_ in rows(USAGE, "column") for name in re.findall(r"`(.*?)`", first)]
    assert sorted(named) == sorted(columns)


def test_every_preset_is_there_with_its_prices() -> None:
    described = {row[0].strip("`"): row[1:] for row in rows(USAGE, "preset")}
    assert described.keys() == presets().keys()
    for name, (as_of, *amounts) in described.items():
        preset = presets()[name]
        price = preset.bands[-1][1]
        expected = [price.input, price.read, price.write, *price.writes.values(), price.output]
        assert as_of == str(preset.as_of)
        figures = [re.sub(r"\d+h ", "", amount).split("; ") for amount in amounts]
        assert [Decimal(figure) for cell in figures for figure in cell] == expected, name


def test_the_prices_of_the_usage_page_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(code(USAGE, "toml"))
    cost = PriceTable.load(file).cost("acme", "small", TokenCounts(10**6))
    assert cost == Cost(200_000_000, 200_000_000, "EUR")


def test_every_cause_of_a_miss_is_explained() -> None:
    named = [name for first, *_ in rows(EXPLAIN, "cause") for name in re.findall(r"`(.*?)`", first)]
    assert sorted(named) == sorted(CAUSES)


def test_an_explanation_looks_as_it_is_shown() -> None:
    earlier, now = (
        remembered([(SYSTEM, f"You are kind. Time {clock}. {FILLER * 9}")], request_id, time=time)
        for request_id, clock, time in (
            ("chatcmpl-81aa", "12:34:56", 0.0),
            ("chatcmpl-4f0c", "12:35:59", 63.2),
        )
    )
    read = shared(earlier.tokens, now.tokens)
    now = replace(now, decision=Decision(read, reused=read))
    shown = rendered(explain(now, [earlier], VOCAB)).plain
    assert shown == code(EXPLAIN, "text").rstrip("\n")


def test_the_rules_of_the_explain_page_can_be_read() -> None:
    data = tomllib.loads(code(EXPLAIN, "toml"))["volatile"]
    system = Message("system", (TextPart("Time 12:34:56. Session ID: 0d1e2-f. Be kind."),))
    conversation = Conversation((system, Message("user", (TextPart("Hi"),))))
    applied = VolatileRules.parse(data).apply(conversation)
    assert applied.rules == ("clock", "session")
    assert applied.conversation.messages[0].text == "Session id: (left out). Be kind."
    members = {name for name, _ in table(EXPLAIN, "member")}
    assert members == {f.name for f in fields(Rule)}


def anchors(page: Path) -> set[str]:
    """The anchors GitHub gives the headings of a page."""
    headings = _HEADING.findall(page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(page: Path, title: str) -> str:
    """What stands under a heading of the second level."""
    return page.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def code(page: Path, language: str) -> str:
    """The only block of code in this language."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)
    return str(block)


def rows(page: Path, title: str) -> Iterator[list[str]]:
    """Cells of the table whose first column has this title, without the heading."""
    lines = page.read_text().splitlines()
    top = next(n for n, line in enumerate(lines) if line.startswith(f"| {title} |"))
    for line in lines[top + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def table(page: Path, title: str) -> Iterator[tuple[str, str]]:
    """First and second cell of every row, the first without its backticks."""
    for first, second, *_ in rows(page, title):
        yield first.strip("`"), second


def documented_defaults(title: str) -> dict[str, object]:
    return {name: ast.literal_eval(value.strip("`")) for name, value in table(LIBRARY, title)}


def defaults(kind: type[Any]) -> dict[str, object]:
    """Defaults of a dataclass as Python literals."""
    found: dict[str, object] = {}
    for f in fields(kind):
        value = f.default_factory() if f.default_factory is not MISSING else f.default
        value = str(value) if isinstance(value, Path) else value
        found[f.name] = dict(value) if isinstance(value, Mapping) else value
    return found


def commands(command: Any, name: str = "anaphora") -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its full name."""
    parts = getattr(command, "commands", {})
    for part, below in parts.items():
        yield from commands(below, f"{name} {part}")
    if not parts:
        yield name, command


def evaluate(formula: str, values: Mapping[str, int]) -> int:
    """The value of a sum of products such as ``156 + 4 x *n*``, with the cross typed properly."""
    terms = formula.replace("*", "").split("+")
    factors = [[part.strip() for part in term.split("\N{MULTIPLICATION SIGN}")] for term in terms]
    return sum(math.prod(values.get(part) or int(part) for part in term) for term in factors)
