"""Requests of coding agents: recorded at a server, cleaned, and read again.

To record what an agent asks, with a model that calls a tool of it in every other answer::

    python -m tests.agents model FILE '{"name": "bash", "arguments": {"command": "cat notes.md"}}'
    python -m tests.agents model FILE    # one that calls nothing
    python -m tests.agents serve RECORD FILE [OPTION of anaphora serve ...]
    python -m tests.agents clean RECORD FIXTURE AGENT VERSION

A fixture has nothing of the agents' own prose. Each line of a text is a stand-in, ``⟦12 3f9a⟧``: so
many tokens, and what they are made of; the same line has the same stand-in wherever it occurs.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2s
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anaphora import Model, serve
from anaphora.api.app import create_app
from anaphora.bundled import source_path
from anaphora.cli import main
from tests.answer.templates import TEMPLATES
from tests.tiny_models import Options, write_model

Json = dict[str, Any]
FIXTURES = Path(__file__).parent / "fixtures/agents"
CONTEXT = 131_072
WORDS = (
    "time way day thing world life hand part place case week point work number group fact".split()
)
"""Each is one token of the bundled model's vocabulary."""

_STAND_IN = re.compile("⟦([0-9]+) ([0-9a-f]+)⟧")
_TEXTS = frozenset(
    "text content description instructions definition system output thinking title "
    "x-codex-turn-metadata".split()
)
"""Members whose strings are prose, or tell of the machine."""
_ARGUMENTS = frozenset({"arguments", "input"})
"""Members that come from the script of the model."""
_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{24,}")
_HEADERS = re.compile(
    "accept$|anthropic-|content-type$|openai-beta$|user-agent$|x-app$|x-stainless"
)
_BILLING = re.compile("(x-anthropic-billing-header:.*?cch=)[0-9a-f]+(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request of an agent."""

    method: str
    path: str
    headers: dict[str, str]
    body: Json


def long_model(path: Path, script: str, alternative: str = "") -> Path:
    """Write a tiny model of 131,072 tokens with a real vocabulary, which says ``script``."""
    options = Options(
        script=script,
        alternative=alternative,
        template=TEMPLATES["hermes"],
        context=CONTEXT,
        vocabulary=source_path(),
    )
    return write_model(path, "script", options)


def called(call: str) -> str:
    """The script of an answer that makes ``call``, which is a JSON object."""
    return f"I will look.\n<tool_call>\n{call}\n</tool_call>"


def words(count: int, seed: str) -> str:
    """A text of so many tokens."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def load(path: Path) -> list[Recorded]:
    """The requests of a fixture, with text in the place of the stand-ins."""
    return [Recorded(**_filled(request)) for request in json.loads(path.read_text())["requests"]]


def _filled(value: Any) -> Any:
    match value:
        case str():
            return _STAND_IN.sub(lambda match: words(int(match[1]), match[2]), value)
        case dict():
            return {name: _filled(item) for name, item in value.items()}
        case list():
            return [_filled(item) for item in value]
    return value


class Recorder:
    """Writes requests down, one JSON object a line, on their way to ``app``."""

    def __init__(self, app: ASGIApp, path: Path) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        whole: list[Message] = [{"type": "http.request", "body": body}]

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._write(scope, body, message)
            await send(message)

        await self._app(scope, again, told)

    def _write(self, scope: Scope, body: bytes, start: Message) -> None:
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        query = scope["query_string"].decode()
        line = {
            "method": scope["method"],
            "path": scope["path"] + (f"?{query}" if query else ""),
            "headers": {name.decode(): value.decode() for name, value in scope["headers"]},
            "body": json.loads(body) if body else {},
            "status": start["status"],
            "told": {name: text for name, text in headers.items() if name != "date"},
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


class Cleaner:
    """Takes out whatever is prose or personal."""

    def __init__(self, count: Callable[[str], int]) -> None:
        """
        :param count: the tokens of a text.
        """
        self._count = count
        self._ids: dict[str, str] = {}

    def clean(self, request: Json) -> Json:
        headers = {name: text for name, text in request["headers"].items() if _HEADERS.match(name)}
        return {
            "method": request["method"],
            "path": request["path"],
            "headers": {name: self._without_ids(text) for name, text in headers.items()},
            "body": self._value(request["body"], ""),
        }

    def _value(self, value: Any, name: str) -> Any:
        match value:
            case str() if name in _TEXTS:
                return self._text(value)
            case str():
                return self._without_ids(value)
            case dict() if name in _ARGUMENTS:
                return value
            case dict():
                return {key: self._value(item, key) for key, item in value.items()}
            case list():
                return [self._value(item, name if isinstance(item, str) else "") for item in value]
        return value

    def _text(self, text: str) -> str:
        if billing := _BILLING.fullmatch(text):
            return f"{billing[1]}00000{billing[2]}"
        return "\n".join(map(self._line, text.split("\n")))

    def _line(self, line: str) -> str:
        if not line.strip():
            return line
        indent = line[: len(line) - len(line.lstrip())]
        digest = blake2s(line.encode(), digest_size=4).hexdigest()
        return f"{indent}⟦{self._count(line.strip())} {digest}⟧"

    def _without_ids(self, text: str) -> str:
        """Ids become numbers in the order of their first occurrence, of the same length."""

        def number(match: re.Match[str]) -> str:
            given = match[0]
            count = f"{len(self._ids):x}"
            shape = re.sub("[0-9a-f]", "0", given)
            return self._ids.setdefault(given, shape[: -len(count)] + count)

        return _ID.sub(number, text)


def _recorded(path: Path) -> Iterator[Json]:
    with path.open() as file:
        yield from map(json.loads, file)


def _recorded_app(record: Path, *given: Any) -> Recorder:
    return Recorder(create_app(*given), record)


def _main(command: str, *arguments: str) -> None:
    match command, arguments:
        case "model", (path,):
            long_model(Path(path), "It is done.")
        case "model", (path, call):
            long_model(Path(path), called(call), "It is done.")
        case "serve", (record, *options):
            setattr(serve, "create_app", partial(_recorded_app, Path(record)))  # noqa: B010
            sys.argv[1:] = ["serve", *options]
            main()
        case "clean", (record, fixture, agent, version):
            with Model.load(source_path(), cache_dir=None, context_size=64, parallel=1) as model:
                cleaner = Cleaner(lambda text: len(model.vocabulary.encode(text)))
                requests = [cleaner.clean(request) for request in _recorded(Path(record))]
            about = {"agent": agent, "version": version, "requests": requests}
            text = json.dumps(about, ensure_ascii=False, indent=1)
            Path(fixture).write_text(text + "\n")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    _main(*sys.argv[1:])
