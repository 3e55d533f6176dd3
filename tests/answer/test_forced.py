"""Answers that have to be calls: always calls, whatever the model would rather say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from anaphora import Sampling
from anaphora.answer.forced import MOST_CALLS, forced
from anaphora.answer.forms import Form
from anaphora.answer.pieces import Call
from anaphora.answer.syntaxes import SYNTAXES, Syntax
from anaphora.engine.llamacpp.load import load_engine
from anaphora.errors import GrammarError
from anaphora.settings import Settings
from tests.conftest import SOAK, TinyModel
from tests.driver import Driver
from tests.engine.test_grammar import schemas

PROMPT = np.random.default_rng(7).integers(0, 256, 64).astype(np.int32)
MARKERS = tuple(sorted({marker for syntax in SYNTAXES for marker in syntax.markers}))
NAMES = st.one_of(
    st.text("abc_-.", min_size=1, max_size=6),
    st.sampled_from(["</tool_call>", "a b", '"', "<|im_end|>", "\n", "[ARGS]", "naïve"]),
)
TOOLS = st.dictionaries(
    NAMES,
    st.dictionaries(st.text(min_size=1, max_size=4), schemas(), max_size=2).map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    ),
    min_size=1,
    max_size=3,
)


def _open(path: Path) -> Driver:
    options = Settings(
        cache_dir=None, memory_budget=64 << 20, context_size=8192, threads=1, parallel=1
    )
    return Driver(lambda emit, clock: load_engine(path, options, emit, clock))


@pytest.fixture(scope="module", params=["text", "control"])
def driver(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Iterator[Driver]:
    """Markers are spelled, or each is a control token."""
    driver = _open(tiny_model("llama", control=MARKERS if request.param == "control" else ()))
    yield driver
    driver.close()


@given(
    syntax=st.sampled_from([one for one in SYNTAXES if not one.channels]),
    tools=TOOLS,
    several=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=1000 if SOAK else 40, deadline=None)
def test_forced_calls_are_calls_that_fit(
    driver: Driver, syntax: Syntax, tools: dict[str, Any], several: bool, seed: int
) -> None:
    vocabulary = driver.engine.vocabulary
    wanted = forced(Form(None, (syntax,)), "", tools, vocabulary, several=several)
    shown = wanted.form.shown(vocabulary.control, with_calls=True)
    result = driver.run(
        PROMPT, 7000, sampling=Sampling(seed=seed), grammar=wanted.grammar, shown=shown
    )
    assert result.done.reason == "end"
    hidden = frozenset(text.decode() for text in shown.values())
    reader = wanted.form.reader("", tools, hidden, first_call_only=not several)
    pieces = [*reader.feed(result.text), *reader.finish()]
    assert 1 <= len(pieces) <= (MOST_CALLS if several else 1)
    for piece in pieces:
        assert isinstance(piece, Call), (piece, result.text)
        assert Draft202012Validator(tools[piece.name]).is_valid(json.loads(piece.arguments))


def test_a_tool_that_nothing_can_be_held_to_is_named(driver: Driver) -> None:
    for schema in (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "wizard"}}},
        {"type": "object", "not": {}},
        {"type": "object", "properties": {"a": {"enum": [1, (1 << 53) + 1]}}},
    ):
        with pytest.raises(GrammarError, match="tool bad can't be forced"):
            forced(
                Form(), "", {"good": None, "bad": schema}, driver.engine.vocabulary, several=False
            )
