"""Stop sequences: an answer is the one without them, up to the first that is complete in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from anaphora.api.endpoint import Options
from anaphora.api.serving import Serving
from tests.api.conftest import Server, roster
from tests.conftest import TinyModel

SAID = "aaab one 👩‍👩‍👧 two\n\nthree é漢字 four — five STOPSTOPPED; six."
"""Tokens of three characters and more, whose edges have nothing to do with any stop sequence."""


@pytest.fixture(scope="module")
def speaker(tiny_model: TinyModel) -> Iterator[Server]:
    """A server whose model says :data:`SAID`."""
    server = Server(Serving(roster([tiny_model("script", script=SAID)])), Options())
    server.start()
    yield server
    server.stop()


def cut(stop: Sequence[str]) -> tuple[str, str | None]:
    """What :data:`SAID` is up to the first stop sequence that is complete, and which that is."""
    for end in range(len(SAID) + 1):
        found = [one for one in stop if one and SAID[:end].endswith(one)]
        if found:
            longest = max(found, key=len)
            return SAID[: end - len(longest)], longest
    return SAID, None


def chat(server: Server, stop: list[str], *, stream: bool) -> tuple[str, str | None]:
    turns: Any = [{"role": "user", "content": "Hi"}]
    asked: dict[str, Any] = {"model": "x", "messages": turns, "temperature": 0, "stop": stop}
    client = server.openai().chat.completions
    if not stream:
        (choice,) = client.create(**asked).choices
        return choice.message.content or "", choice.finish_reason
    choices = [chunk.choices[0] for chunk in client.create(**asked, stream=True)]
    text = "".join(choice.delta.content or "" for choice in choices)
    return text, choices[-1].finish_reason


def complete(server: Server, stop: list[str], *, stream: bool) -> tuple[str, str | None]:
    asked: dict[str, Any] = {"model": "x", "prompt": "Hi\n", "temperature": 0, "stop": stop}
    asked["max_tokens"] = 200
    client = server.openai().completions
    if not stream:
        (choice,) = client.create(**asked).choices
        return choice.text, choice.finish_reason
    choices = [chunk.choices[0] for chunk in client.create(**asked, stream=True)]
    return "".join(choice.text for choice in choices), choices[-1].finish_reason


def say(server: Server, stop: list[str], *, stream: bool) -> tuple[str, str | None, str | None]:
    turns: Any = [{"role": "user", "content": "Hi"}]
    asked: dict[str, Any] = {"model": "x", "messages": turns, "max_tokens": 200}
    asked["extra_body"] = {"temperature": 0}
    client = server.anthropic().messages
    if stream:
        with client.stream(**asked, stop_sequences=stop) as events:
            pieces = "".join(events.text_stream)
            message = events.get_final_message()
    else:
        message = client.create(**asked, stop_sequences=stop)
    text = "".join(block.text for block in message.content if block.type == "text")
    assert not stream or pieces == text
    return text, message.stop_reason, message.stop_sequence


stretches = st.tuples(st.integers(0, len(SAID) - 1), st.integers(1, 9)).map(
    lambda place: SAID[place[0] : sum(place)]
)
absent = st.sampled_from(
    ["", "zzz", "six.!", "aaaa", "STOPPING", "👩‍👩‍👦", "\N{ZERO WIDTH JOINER}x"]
)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(stretches | absent, min_size=1, max_size=4))
@example([SAID])
@example([SAID, SAID[:-1]])
@example([SAID + "more"])
@example([SAID[0]])
@example(["aab", "aaab", "ab"])
@example(["STOPPED", "STOP"])
@example(["👧"])
@example(["\N{ZERO WIDTH JOINER}"])
@example(["é", "é漢字 four"])
@example(["six.", "."])
def test_the_answer_ends_where_a_stop_sequence_does(speaker: Server, stop: list[str]) -> None:
    text, found = cut(stop)
    for stream in (False, True):
        assert chat(speaker, stop, stream=stream) == (text, "stop")
        assert complete(speaker, stop, stream=stream) == (text, "stop")
        ended = "end_turn" if found is None else "stop_sequence"
        assert say(speaker, stop, stream=stream) == (text, ended, found)


def test_none_is_found_across_the_edge_of_the_prompt(speaker: Server) -> None:
    """The prompt ends with a line end, and the answer begins with letters."""
    assert complete(speaker, ["\naaab"], stream=False) == (SAID, "stop")


@pytest.mark.parametrize("stop", ["two", ["two"]])
def test_one_may_be_no_list(speaker: Server, stop: str | list[str]) -> None:
    turns: Any = [{"role": "user", "content": "Hi"}]
    client = speaker.openai().chat.completions
    (choice,) = client.create(model="x", messages=turns, temperature=0, stop=stop).choices
    assert choice.message.content == SAID.partition("two")[0]


def test_max_tokens_before_a_stop_sequence_is_complete(speaker: Server) -> None:
    """What could have become one is given out."""
    turns: Any = [{"role": "user", "content": "Hi"}]
    asked: dict[str, Any] = {"model": "x", "messages": turns, "temperature": 0, "max_tokens": 2}
    (whole,) = speaker.openai().chat.completions.create(**asked).choices
    assert whole.message.content
    stop = SAID[1 : len(whole.message.content) + 1]
    (choice,) = speaker.openai().chat.completions.create(**asked, stop=stop).choices
    assert (choice.message.content, choice.finish_reason) == (whole.message.content, "length")
