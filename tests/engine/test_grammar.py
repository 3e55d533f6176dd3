"""Answers in a grammar: always in it, on real engines, whatever the model would rather say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from anaphora import GREEDY, Grammar, Model, Sampling
from anaphora.engine.constraint import LONGEST, Constraints, check, lark_json
from anaphora.engine.llamacpp.load import load_engine
from anaphora.engine.protocol import Failed, Started
from anaphora.engine.reference import ReferenceEngine, load
from anaphora.errors import GrammarError, SettingsError
from anaphora.settings import Settings
from anaphora.vocabulary import Vocabulary
from tests.conftest import SOAK, TinyModel
from tests.driver import Driver

PROMPT = np.random.default_rng(7).integers(0, 256, 300).astype(np.int32)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["é", "b\n", "漢字"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "left"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
NO_BASE: dict[str, Any] = {**PERSON, "required": ["name", "friend"]}
NO_BASE["properties"] = {"name": {"type": "string"}, "friend": {"$ref": "#"}}


COSTLY = "(.*a.{0,200}b){0,50}"
"""Text of many a's and b's needs more and more states."""


def open_(path: Path, **options: Any) -> Driver:
    values = {
        "cache_dir": None,
        "memory_budget": 64 << 20,
        "context_size": 2048,
        "kv_type": "f32",
        "threads": 1,
        **options,
    }
    return Driver(lambda emit, clock: load_engine(path, Settings(**values), emit, clock))


@pytest.fixture(scope="module")
def driver(tiny_llama: Path) -> Iterator[Driver]:
    driver = open_(tiny_llama, parallel=8)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Driver:
    model = load(tiny_llama)
    return Driver(lambda emit, clock: ReferenceEngine(model, emit, context_size=2048))


def seeded(seed: int, **values: Any) -> Sampling:
    return Sampling(seed=seed, **values)


def valid(schema: Mapping[str, Any], text: str) -> bool:
    return bool(Draft202012Validator(schema).is_valid(json.loads(text)))


ENGINES = pytest.mark.parametrize("engine", ["driver", "reference"])


@ENGINES
@pytest.mark.parametrize("sampling", [GREEDY, seeded(1), seeded(2, top_k=3, repeat_penalty=1.2)])
@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", r"[a-z]{3,8}-(é|ü|😀){2}"), r"[a-z]{3,8}-(é|ü|😀){2}"),
        (Grammar("regex", r"漢字{20}"), r"漢字{20}"),
        (Grammar("lark", 'start: "I" word+ "."\nword: /[ ][a-z]{1,4}/'), r"I( [a-z]{1,4})+\."),
        (Grammar("gbnf", 'root ::= "a" item "é"\nitem ::= [0-9] | "x"{2,4}'), "a([0-9]|x{2,4})é"),
        (Grammar("lark", f"start: {lark_json({'enum': [1, 'ü']})}"), '1|"ü"'),
    ],
)
def test_answers_are_in_their_grammar(
    request: pytest.FixtureRequest,
    engine: str,
    sampling: Sampling,
    grammar: Grammar,
    pattern: str,
) -> None:
    result = request.getfixturevalue(engine).run(PROMPT, 400, sampling=sampling, grammar=grammar)
    if result.done.reason == "end":
        assert re.fullmatch(pattern, result.text)
    else:  # the words of the Lark grammar may go on
        assert "word" in grammar.text
        assert result.done.generated_tokens == 400


@pytest.mark.parametrize("schema", [PERSON, TREE, {"type": "object"}, {"const": {"ü": [1, None]}}])
def test_both_engines_give_valid_json(
    driver: Driver, reference: Driver, schema: Mapping[str, Any]
) -> None:
    for seed in range(5):
        for engine in (driver, reference):
            grammar = Grammar.json_schema(schema)
            result = engine.run(PROMPT, 1000, sampling=seeded(seed), grammar=grammar)
            assert result.done.reason == "length" or valid(schema, result.text)


def test_the_engines_agree_about_the_greedy_answer(driver: Driver, reference: Driver) -> None:
    answers = [
        engine.run(PROMPT, 100, grammar=Grammar("regex", "[a-z ]{30}")).text
        for engine in (driver, reference)
    ]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 30


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Everything in them is bounded, so that no answer has to be cut off."""
    names = st.text(min_size=1, max_size=4)
    scalars = st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
        st.tuples(st.integers(-99, 99), st.integers(0, 99)).map(
            lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[0] + ends[1]}
        ),
        st.tuples(st.integers(0, 3), st.integers(0, 5)).map(
            lambda sizes: {"type": "string", "minLength": sizes[0], "maxLength": sum(sizes)}
        ),
        st.lists(
            st.one_of(
                st.text(max_size=5),
                st.integers(-(1 << 53), 1 << 53),
                st.none(),
                st.booleans(),
            ),
            min_size=1,
            max_size=3,
        ).map(lambda values: {"enum": values}),
        st.just({"type": "string", "pattern": "^[a-c]{2}x?$"}),
        st.just({"type": "string", "format": "date"}),
    )

    def containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda p: {"type": "array", "items": p[0], "minItems": p[1], "maxItems": p[1] + p[2]}
        )
        objects = st.dictionaries(names, inner, max_size=3).flatmap(
            lambda properties: st.sets(st.sampled_from(sorted(properties) or ["-"])).map(
                lambda required: {
                    "type": "object",
                    "properties": properties,
                    "required": sorted(required & set(properties)),
                    "additionalProperties": False,
                }
            )
        )
        either = st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts})
        return st.one_of(arrays, objects, either)

    return st.recursive(scalars, containers, max_leaves=6)


@given(schema=schemas(), seed=st.integers(0, 2**31))
@settings(max_examples=1000 if SOAK else 60, deadline=None)
def test_answers_fit_every_bounded_schema(
    driver: Driver, schema: dict[str, Any], seed: int
) -> None:
    grammar = Grammar.json_schema(schema)
    check(grammar, driver.engine.vocabulary)
    result = driver.run(PROMPT, 1500, sampling=seeded(seed), grammar=grammar)
    assert result.done.reason == "end"
    assert valid(schema, result.text)


@pytest.mark.model
def test_the_bundled_model_gives_json_that_fits(bundled: Path) -> None:
    schemas: list[dict[str, Any]] = [
        PERSON,
        TREE,
        {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2},
    ]
    with Model.load(bundled, cache_dir=None, context_size=1024) as model:
        prompt = model.render([{"role": "user", "content": "Describe somebody as JSON."}]).tokens
        ended = 0
        for number in range(1000 if SOAK else 6):
            schema = schemas[number % len(schemas)]
            reply = model.generate(
                prompt,
                max_tokens=600,
                sampling=seeded(number, temperature=1.5),
                grammar=Grammar.json_schema(schema),
            )
            if reply.finish_reason == "end":
                ended += 1
                assert valid(schema, reply.text)
        assert ended > number * 0.9


class TestEnds:
    def test_an_answer_ends_where_its_grammar_does_and_nowhere_else(self, driver: Driver) -> None:
        ends = driver.engine.vocabulary.end_of_generation
        for bias in (1000.0, -1000.0):
            sampling = Sampling(temperature=0, logit_bias=dict.fromkeys(ends, bias))
            result = driver.run(PROMPT, 50, sampling=sampling, grammar=Grammar("regex", "a{5}"))
            assert (result.text, result.done.reason) == ("aaaaa", "end")

    def test_it_may_end_where_the_grammar_accepts(self, driver: Driver) -> None:
        ends = driver.engine.vocabulary.end_of_generation
        grammar = Grammar("regex", "a{2,100}")
        sampling = Sampling(temperature=0, logit_bias=dict.fromkeys(ends, 1000.0))
        assert driver.run(PROMPT, 50, sampling=sampling, grammar=grammar).text == "aa"

    def test_the_empty_answer(self, driver: Driver) -> None:
        result = driver.run(PROMPT, 50, grammar=Grammar("regex", ""))
        assert (result.text, result.done.reason) == ("", "end")

    def test_stop_texts_and_limits_count_as_ever(self, driver: Driver) -> None:
        grammar = Grammar("regex", "ab{20}")
        stopped = driver.run(PROMPT, 50, sampling=Sampling(stop=("bbb",)), grammar=grammar)
        assert (stopped.text, stopped.done.reason) == ("a", "stop")
        cut = driver.run(PROMPT, 3, grammar=grammar)
        assert (cut.text, cut.done.reason) == ("abb", "length")
        whole = driver.run(PROMPT, 21, grammar=grammar)
        assert (whole.text, whole.done.reason) == ("a" + "b" * 20, "end")

    def test_filling_the_cache_needs_no_answer(self, driver: Driver) -> None:
        result = driver.run(PROMPT, 0, grammar=Grammar("json_object"))
        assert result.done.generated_tokens == 0


def test_control_tokens_are_no_text(driver: Driver) -> None:
    vocabulary = driver.engine.vocabulary
    control = dict.fromkeys(vocabulary.control.values(), 1e6)
    grammar = Grammar.json_schema({"type": "string", "minLength": 20, "maxLength": 60})
    result = driver.run(PROMPT, 300, sampling=seeded(1, logit_bias=control), grammar=grammar)
    assert control.keys().isdisjoint(result.tokens)
    # Only a Lark grammar can ask for one, by its name.
    named = Grammar("lark", 'start: "a" <|im_start|> "b"')
    result = driver.run(PROMPT, 50, grammar=named)
    assert result.tokens[1] == vocabulary.control["<|im_start|>"]
    assert (result.text, result.done.reason) == ("ab", "end")


def test_seeds_are_honoured(driver: Driver) -> None:
    grammar = Grammar("regex", "[a-z]{30}")
    texts = [driver.run(PROMPT, 50, sampling=seeded(s), grammar=grammar).text for s in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


def test_parked_answers_go_on_in_their_grammar(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [PROMPT[i * 100 : i * 100 + 100] for i in range(3)]
    grammar = Grammar("regex", "([a-z]{7} ){60}")
    ample = open_(tiny_llama)
    expected = [ample.run(prompt, 900, grammar=grammar).text for prompt in prompts]
    ample.close()
    monkeypatch.setattr("anaphora.engine.llamacpp.load._fit", lambda *_: (1024, 1024))
    tight = open_(tiny_llama, parallel=3, reserve_tokens=16)
    results = [tight.submit(prompt, 900, grammar=grammar) for prompt in prompts]
    parked: list[Any] = []
    monkeypatch.setattr(tight.engine, "_park", _noted(tight.engine._park, parked))  # type: ignore[attr-defined]
    tight.wait(*results)
    tight.close()
    assert parked
    assert [result.text for result in results] == expected
    assert all(re.fullmatch(grammar.text, result.text) for result in results)


def _noted(work: Any, calls: list[Any]) -> Any:
    def noted(job: Any) -> None:
        calls.append(job)
        work(job)

    return noted


def test_many_at_once_each_in_its_own(driver: Driver) -> None:
    grammars = [Grammar("regex", f"{letter}{{{9 + n}}}") for n, letter in enumerate("abcdefgh")]
    results = [
        driver.submit(PROMPT, 50, sampling=seeded(n), grammar=grammar)
        for n, grammar in enumerate(grammars)
    ]
    plain = driver.submit(PROMPT, 5)
    driver.wait(*results, plain)
    for grammar, result in zip(grammars, results, strict=True):
        assert re.fullmatch(grammar.text, result.text)
    assert plain.tokens == driver.run(PROMPT, 5).tokens


def test_a_grammar_that_runs_into_a_limit_fails_alone(driver: Driver) -> None:
    ends = dict.fromkeys(driver.engine.vocabulary.end_of_generation, -1e9)
    other = driver.submit(PROMPT, 600, sampling=Sampling(temperature=0, logit_bias=ends))
    letters = dict.fromkeys(driver.engine.vocabulary.encode("a!b"), 1000.0) | ends
    costly = driver.submit(
        PROMPT, 600, sampling=seeded(1, logit_bias=letters), grammar=Grammar("regex", COSTLY)
    )
    driver.wait(other, costly)
    failed = costly.events[-1]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, GrammarError)
    assert other.done.generated_tokens == 600
    again = driver.run(PROMPT, 5)  # what was computed is still of use
    assert again.done.computed_tokens == 1


BAD: list[tuple[Grammar, str]] = [
    (Grammar("regex", "("), "unclosed group"),
    (Grammar("regex", r"[^\s\S]"), "no text fits"),
    (Grammar("regex", "a" * (LONGEST + 1)), "longer than"),
    (Grammar("json_schema", "{"), "not valid JSON"),
    (Grammar("json_schema", "[]"), "object"),
    (Grammar("json_schema", "true"), "object"),
    (Grammar("json_schema", '{"a":' * 9000 + "1" + "}" * 9000), "nested"),
    (Grammar.json_schema({"type": "objekt"}), "objekt"),
    (Grammar.json_schema({"type": "object", "properties": 5}), ""),
    (Grammar.json_schema({"not": {"type": "string"}}), "not"),
    (Grammar.json_schema({"not": {}, "x-guidance": {"lenient": True}}), "not"),
    (Grammar.json_schema({"$ref": "#/$defs/nowhere"}), "nowhere"),
    (Grammar.json_schema({"$ref": "https://example.com/schema"}), "example.com"),
    (Grammar.json_schema({"$ref": "#"}), "recursive"),
    (Grammar.json_schema(NO_BASE), "recursive"),
    (Grammar.json_schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "recursive"),
    (Grammar.json_schema({"anyOf": [{"$ref": f"#/{n}"} for n in range(501)]}), "500"),
    (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    (Grammar.json_schema({"properties": {f"p{n}": {} for n in range(4000)}}), "too big"),
    (Grammar("lark", "start: foo"), "foo"),
    (Grammar("lark", "start: <|nobody|>"), "<|nobody|>"),
    (Grammar("lark", '{"grammars": [{"json_schema": {}}]}'), ""),
    (Grammar("lark", ""), "start"),
    (Grammar("gbnf", "root ::= foo"), "foo"),
    (Grammar("gbnf", "nothing"), "::="),
    (Grammar("gbnf", "root ::= " + "(" * 9000), "nested"),
]


@ENGINES
@pytest.mark.parametrize(("grammar", "word"), BAD)
def test_bad_grammars_are_refused_before_anything_runs(
    request: pytest.FixtureRequest, engine: str, grammar: Grammar, word: str
) -> None:
    driver = request.getfixturevalue(engine)
    with pytest.raises(GrammarError) as caught:
        check(grammar, driver.engine.vocabulary)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    result = driver.run(PROMPT, 5, grammar=grammar)
    assert isinstance(result.events[-1], Failed)
    assert isinstance(result.events[-1].error, GrammarError)
    if "no text fits" not in str(caught.value):
        assert not result.of(Started)


@pytest.mark.parametrize(
    "schema",
    [
        TREE,
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"$defs": {"a/b": {"type": "null"}}, "$ref": "#/$defs/a~1b"},
        {"$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(300)} | {"d300": {}}}
        | {"$ref": "#/$defs/d0"},
    ],
)
def test_schemas_that_something_finite_fits_are_taken(
    driver: Driver, schema: dict[str, Any]
) -> None:
    check(Grammar.json_schema(schema), driver.engine.vocabulary)


def test_what_is_no_grammar_at_all() -> None:
    with pytest.raises(GrammarError, match="kind"):
        Grammar("yaml")  # type: ignore[arg-type]
    with pytest.raises(GrammarError, match="use a str"):
        Grammar("regex", 5)  # type: ignore[arg-type]
    with pytest.raises(GrammarError, match="no JSON"):
        Grammar.json_schema({"const": object()})


class Spaced:
    """A vocabulary whose tokenizer puts a space in front of every text, and says nothing of it."""

    pieces = (*(bytes([byte]) for byte in range(256)), b" a", b"ab", b"")
    size, bos, eos, add_bos = len(pieces), None, 258, False
    end_of_generation, control = frozenset({258}), {"</s>": 258}
    strips_left = strips_right = frozenset[int]()

    def encode(self, text: str) -> list[int]:
        data, tokens = b" " + text.encode(), list[int]()
        while data:
            two = self.pieces.index(data[:2]) if data[:2] in self.pieces[256:258] else data[0]
            tokens.append(two)
            data = data[len(self.pieces[two]) :]
        return tokens

    def piece(self, token: int) -> bytes:
        return self.pieces[token]


@pytest.mark.parametrize("text", ["a", "abab", "é ab", "b a"])
def test_texts_without_a_choice_are_met_whatever_the_tokenizer_adds(text: str) -> None:
    vocabulary: Vocabulary = Spaced()
    constraint = Constraints(vocabulary).begin(Grammar("regex", re.escape(text)))
    said = b""
    while not constraint.complete:
        token = int(constraint.allowed()[0])
        said += vocabulary.piece(token)
        constraint.accept(token)
    assert said.decode() == text


def test_user_defined_tokens_are_text(tiny_model: TinyModel) -> None:
    driver = open_(tiny_model("llama", f32=True, user_defined=True))
    result = driver.run(PROMPT, 30, grammar=Grammar("regex", "<think>a{3}"))
    driver.close()
    assert result.text == "<think>aaa"


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_the_library_takes_grammars(tiny_llama: Path, engine: str) -> None:
    grammar = Grammar("regex", "[ab]{12}")
    with Model.load(tiny_llama, cache_dir=None, threads=1, engine=engine) as model:
        greedy = model.generate("x", max_tokens=50, sampling=GREEDY, grammar=grammar).text
        assert re.fullmatch("[ab]{12}", greedy)
        stream = model.stream("x", max_tokens=50, sampling=GREEDY, grammar=grammar)
        assert "".join(stream) == greedy
        chat = model.chat(max_tokens=50, grammar=Grammar("regex", "\ud800|yes"))
        assert chat.send("Well?").text in ("yes", "\ufffd")
        with pytest.raises(GrammarError):
            model.generate("x", grammar=Grammar("regex", "("))
        with pytest.raises(SettingsError):
            model.generate("x", grammar="[ab]")  # type: ignore[arg-type]
        assert model.generate("x", max_tokens=1).usage.generated_tokens <= 1
