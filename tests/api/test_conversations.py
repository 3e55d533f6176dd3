"""Long conversations, by the official clients: a turn computes what is new in it, and little else.

``ANAPHORA_SOAK=1`` (``make soak``) holds them with the bundled model too.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import pytest

from anaphora.bundled import source_path
from anaphora.responses import ResponseStore
from tests.api.conftest import DOCUMENT, Serve, Server
from tests.api.talk import PROTOCOLS, Protocol, Turn, assistant, system, user
from tests.conftest import SOAK

TURNS = 30
SLACK = 64
"""Tokens of a turn that may be computed besides those that are new in it."""

Counted = tuple[str, int, int]
"""The text of an answer, the tokens of its prompt and its own."""


def by_chat(server: Server, turns: list[Turn], limit: int, streamed: bool) -> Counted:
    options: Any = {"model": "any", "messages": turns, "max_completion_tokens": limit}
    create = server.openai().chat.completions.create
    if not streamed:
        reply = create(**options, temperature=0)
        text, usage = reply.choices[0].message.content, reply.usage
    else:
        options["stream_options"] = {"include_usage": True}
        chunks = list(create(**options, temperature=0, stream=True))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        usage = chunks[-1].usage
    return text, usage.prompt_tokens, usage.completion_tokens


def by_messages(server: Server, turns: list[Turn], limit: int, streamed: bool) -> Counted:
    head, *rest = turns
    options: Any = {"model": "any", "system": head["content"], "messages": rest}
    options = {**options, "max_tokens": limit, "extra_body": {"temperature": 0}}
    messages = server.anthropic().messages
    if streamed:
        with messages.stream(**options) as stream:
            reply = stream.get_final_message()
    else:
        reply = messages.create(**options)
    usage = reply.usage
    read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    prompt = usage.input_tokens + (read or 0) + (written or 0)
    text = "".join(block.text for block in reply.content if block.type == "text")
    return text, prompt, usage.output_tokens


def by_responses(server: Server, turns: list[Turn], limit: int, streamed: bool) -> Counted:
    options: Any = {"model": "any", "input": turns, "max_output_tokens": limit, "temperature": 0}
    return counted(server.openai().responses.create(**options, stream=streamed))


def counted(reply: Any) -> Counted:
    """Of a response, streamed or not."""
    response = reply if hasattr(reply, "output_text") else list(reply)[-1].response
    usage = response.usage
    return response.output_text, usage.input_tokens, usage.output_tokens


WAYS = {"chat": by_chat, "messages": by_messages, "responses": by_responses}


class Cost:
    """Watches what each turn computes."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._computed = 0.0
        self._known = 0
        """Tokens of the prompt and the answer before."""
        self.over: list[float] = []
        """By how much each turn but the first computed more than what is new."""

    def note(self, prompt: int, output: int) -> None:
        computed = self._server.metric("anaphora_computed_tokens_total")
        if self._known:
            self.over.append(computed - self._computed - (prompt - self._known))
        self._computed, self._known = computed, prompt + output


@pytest.fixture(scope="module")
def bundled_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model's own chat template."""
    found = gguf.GGUFReader(source_path()).fields["tokenizer.chat_template"].contents()
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(str(found))
    return path


def hold(server: Server, protocols: tuple[Protocol, ...], streamed: bool, limit: int) -> None:
    """A conversation whose turns are asked for by each of ``protocols`` in turn."""
    cost = Cost(server)
    opening = f"{'/'.join(protocols)} {streamed}. {DOCUMENT}"
    history = [system(opening)]
    for number, protocol in zip(range(TURNS), cycle(protocols), strict=False):
        history.append(user(f"Question {number}: what do the clocks strike now, and why is that?"))
        text, prompt, output = WAYS[protocol](server, history, limit, streamed)
        cost.note(prompt, output)
        history.append(assistant(text or "-"))
    assert len(cost.over) == TURNS - 1
    assert max(cost.over) <= SLACK


CONVERSATIONS: list[tuple[Protocol, ...]] = [*((one,) for one in PROTOCOLS), PROTOCOLS]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("protocols", CONVERSATIONS, ids="-".join)
def test_a_turn_computes_what_is_new(
    serve: Serve, bundled_template: Path, protocols: tuple[Protocol, ...], streamed: bool
) -> None:
    hold(serve(chat_template=bundled_template), protocols, streamed, 40)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_chain_of_stored_responses_computes_what_is_new(
    serve: Serve, bundled_template: Path, tmp_path: Path, streamed: bool
) -> None:
    store = ResponseStore(tmp_path / "responses.db")
    server = serve(chat_template=bundled_template, responses=store)
    create: Any = server.openai().responses.create
    cost, before = Cost(server), None
    for number in range(TURNS):
        reply = create(
            model="any",
            instructions=DOCUMENT,
            input=f"Question {number}: what do the clocks strike now?",
            previous_response_id=before,
            max_output_tokens=40,
            temperature=0,
            stream=streamed,
        )
        response = list(reply)[-1].response if streamed else reply
        before = response.id
        cost.note(response.usage.input_tokens, response.usage.output_tokens)
    assert max(cost.over) <= SLACK


@pytest.mark.model
@pytest.mark.skipif(not SOAK, reason="thirty real answers take minutes")
@pytest.mark.parametrize("protocols", CONVERSATIONS, ids="-".join)
def test_a_turn_of_the_bundled_model_computes_what_is_new(
    serve: Serve, bundled: Path, protocols: tuple[Protocol, ...]
) -> None:
    hold(serve(paths=[bundled], threads=2), protocols, True, 90)
