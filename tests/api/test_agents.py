"""Coding agents: long sessions with many tools, and requests of real ones, given again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anaphora.api.books import Books
from anaphora.api.endpoint import Options
from anaphora.api.serving import Serving
from anaphora.cache.index import common_prefix
from anaphora.cache.keys import Tokens
from anaphora.diagnose.memory import PromptMemory
from anaphora.diagnose.prompts import Remembered
from anaphora.keys import Tenant
from tests.agents import FIXTURES, called, load, long_model, words
from tests.api.conftest import Server, roster
from tests.api.talk import PATHS, PROTOCOLS, Protocol, request, said, user
from tests.api.test_tools import result

Json = dict[str, Any]
TURNS, TOOLS, SLACK = 30, 15, 64
CALL = json.dumps({"name": "tool_7", "arguments": {"path": "src/part.py", "first": 12}})
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": words(12, "path")},
        "first": {"type": "integer", "description": words(20, "first")},
    },
    "required": ["path"],
}


class Prompts(PromptMemory):
    """Keeps the tokens of all prompts in the order of their arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[Tokens] = []

    def remember(self, tenant: Tenant, model: str, prompt: Remembered) -> None:
        self.tokens.append(prompt.tokens)
        super().remember(tenant, model, prompt)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts()


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory, prompts: Prompts) -> Iterator[Server]:
    """A server with a long context, whose model calls a tool in every answer."""
    path = long_model(tmp_path_factory.mktemp("agents") / "agent.gguf", called(CALL))
    models = roster([path], parallel=1, context_size=65_536)
    server = Server(Serving(models, books=Books(memory=prompts)), Options())
    server.start()
    yield server
    server.stop()


def tools(protocol: Protocol) -> list[Json]:
    given = []
    for number in range(TOOLS):
        name, about = f"tool_{number}", words(150, f"tool {number}")
        match protocol:
            case "chat":
                function = {"name": name, "description": about, "parameters": SCHEMA}
                given.append({"type": "function", "function": function})
            case "messages":
                given.append({"name": name, "description": about, "input_schema": SCHEMA})
            case "responses":
                given.append(
                    {"type": "function", "name": name, "description": about, "parameters": SCHEMA}
                )
    return given


def sent_back(protocol: Protocol, reply: Json) -> tuple[list[Json], list[str]]:
    """An answer as its client sends it back, and the ids of its calls."""
    match protocol:
        case "chat":
            message = reply["choices"][0]["message"]
            return [message], [call["id"] for call in message.get("tool_calls", ())]
        case "messages":
            blocks = reply["content"]
            ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
            return [{"role": "assistant", "content": blocks}], ids
        case "responses":
            items = reply["output"]
            return items, [item["call_id"] for item in items if item["type"] == "function_call"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_each_turn_of_a_long_session_computes_what_is_new(
    agents: Server, protocol: Protocol
) -> None:
    """Two turns answer calls, the third is the user's, and so on."""
    turns = [user(f"By {protocol}. {words(400, 'task')}")]
    head: Json = {"tools": tools(protocol), "temperature": 0}
    match protocol:
        case "chat":
            turns.insert(0, {"role": "system", "content": words(1500, "rules")})
        case "messages":
            head["system"] = words(1500, "rules")
        case "responses":
            head["instructions"] = words(1500, "rules")
    known, made = 0, 0
    for number in range(TURNS):
        if talks := number % 3 == 2:
            # The model would call a tool again, but nobody takes it for a call.
            head["tool_choice"] = {"type": "none"} if protocol == "messages" else "none"
        body = request(protocol, turns, max_tokens=200, **head)
        head.pop("tool_choice", None)
        response = agents.http().post(PATHS[protocol], json=body)
        assert response.status_code == 200, response.text
        reply = response.json()
        counted = said(protocol, reply)
        computed = int(response.headers["anaphora-computed-tokens"])
        assert computed <= counted.prompt - known + SLACK
        assert counted.read + counted.written == counted.prompt
        known = counted.prompt + counted.output
        back, ids = sent_back(protocol, reply)
        assert bool(ids) is not talks
        made += len(ids)
        turns += back
        turns += [result(protocol, one, words(120 * number, f"found {number}")) for one in ids]
        if talks:
            turns.append(user(f"{number}: {words(30, f'wish {number}')}"))
    assert made == TURNS - TURNS // 3
    assert known > 20_000


def fixtures() -> list[Path]:
    return sorted(FIXTURES.glob("*.json"))


def test_there_are_fixtures() -> None:
    assert {path.stem for path in fixtures()} >= {"aider", "claude-code", "codex", "opencode"}


@pytest.mark.parametrize("path", fixtures(), ids=lambda path: path.stem)
def test_requests_of_a_real_agent(agents: Server, prompts: Prompts, path: Path) -> None:
    """Each is taken as it is, and computes what no earlier one began with."""
    first = len(prompts.tokens)
    with agents.http() as http:
        for recorded in load(path):
            response = http.request(
                recorded.method, recorded.path, headers=recorded.headers, json=recorded.body
            )
            assert response.status_code == 200, response.text
            found = http.get(f"/v1/cache/explain/{response.headers['request-id']}").json()
            *earlier, tokens = prompts.tokens[first:]
            assert found["prompt_tokens"] == len(tokens)
            shared = max((common_prefix(tokens, before) for before in earlier), default=0)
            assert found["computed_tokens"] <= len(tokens) - shared + SLACK
    assert len(prompts.tokens) == first + len(load(path))
