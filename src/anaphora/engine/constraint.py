"""Which tokens a grammar allows next: llguidance over a model's vocabulary.

What a grammar may cost is bounded: by the size of its text, and by limits of llguidance on the
grammar it becomes, on the states of its lexer, and on the work for one token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from anaphora.engine.protocol import Grammar, GrammarKind
from anaphora.engine.schemas import endless, inexact
from anaphora.errors import GrammarError
from anaphora.vocabulary import Vocabulary

LONGEST = 64 << 10
"""Bytes of a grammar's text."""

_LIMITS = LLParserLimits(
    # Compiling takes some tenths of a second at most, and a token some milliseconds; in the most
    # ambiguous grammars some hundredths of a second before they run into a limit.
    max_grammar_size=20_000,
    step_lexer_fuel=100_000,
    max_lexer_states=50_000,  # of about 2 KB
    verbose_errors=False,
)
_JSON_RULES = {
    # A space, or a line break with its indentation: white space without end would let an answer
    # go on without end.
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n[ \t]{0,32}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": True,
    "lenient": False,
}
_LEAD = "\n"
_MOST_WORDS = 300


class Constraint:
    """Where an answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        """The grammar is satisfied, and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self) -> NDArray[np.int64]:
        """The ids of the tokens that may come next, ascending, shape (n,) with n > 0.

        Those that end an answer are among them where the grammar is satisfied.

        Raises :class:`~anaphora.errors.GrammarError` where the grammar runs into a limit, or no
        token of the model's can follow.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        tokens = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if not len(tokens):
            raise GrammarError("the grammar leaves nothing that this model could say next")
        return tokens

    def accept(self, token: int) -> None:
        """``token`` was chosen, one of those allowed."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            why = _one_line(self._matcher.get_error())
            raise GrammarError(f"the grammar can't be followed further: make it simpler ({why})")


class Constraints:
    """Makes constraints over one vocabulary. Not thread safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def begin(self, grammar: Grammar) -> Constraint:
        """At the beginning of an answer.

        Raises :class:`~anaphora.errors.GrammarError` where the grammar can't be used.
        """
        return Constraint(_matcher(grammar, self._tokenizer))

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Takes up to a second for 262,144 tokens, so it is made once and when it is needed."""
        vocabulary = self._vocabulary
        names = {token: text for text, token in vocabulary.control.items()}
        tokens = [vocabulary.piece(token) for token in range(vocabulary.size)]
        # What ends an answer, or is no text, can't be a part of any text.
        special = [t for t, piece in enumerate(tokens) if not piece]
        special = sorted(vocabulary.end_of_generation.union(special))
        spell = _Speller(vocabulary, tokens).spell
        texts = list(tokens)
        for token in special:
            texts[token] = names.get(token, f"<|{token}|>").encode()
        ends = sorted(vocabulary.end_of_generation)
        return LLTokenizer(
            TokenizerWrapper(_Tokens(texts, special, spell)), eos_token=ends or [vocabulary.size]
        )


def check(grammar: Grammar, vocabulary: Vocabulary) -> None:
    """Compile ``grammar`` without a model's large vocabulary, for its control tokens alone.

    Raises :class:`~anaphora.errors.GrammarError` that says what is wrong with it.
    """
    texts = [bytes([byte]) for byte in range(256)]
    texts += [text.encode() for text in ("<|end|>", *control_in_check(vocabulary))]
    tokens = _Tokens(texts, list(range(256, len(texts))), list)
    tokenizer = LLTokenizer(
        TokenizerWrapper(tokens), n_vocab=max(len(texts), vocabulary.size), eos_token=[256]
    )
    matcher = _matcher(grammar, tokenizer)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise _refusal(grammar, "no text fits it")


def control_in_check(vocabulary: Vocabulary) -> dict[str, int]:
    """The ids that control tokens have for :func:`check`, by their texts."""
    return {text: number for number, text in enumerate(vocabulary.control, start=257)}


def lark_json(schema: Mapping[str, Any]) -> str:
    """A term of a Lark grammar: JSON that fits ``schema``, in the white space of all others."""
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_RULES})}"


class _Tokens:
    """What llguidance wants to know of a vocabulary."""

    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special: Sequence[int], spell: Callable[[bytes], list[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = special[0]
        self._spell = spell

    def __call__(self, data: bytes | str) -> list[int]:
        return self._spell(data.encode() if isinstance(data, str) else data)


class _Speller:
    """Makes tokens of text that a grammar leaves no choice about.

    They have to be the bytes of that text and nothing else; llguidance fails where they are not.
    """

    def __init__(self, vocabulary: Vocabulary, pieces: Sequence[bytes]) -> None:
        self._vocabulary = vocabulary
        self._pieces = pieces

    def spell(self, data: bytes) -> list[int]:
        text = data.decode(errors="replace")
        # Some tokenizers put a space in front of every text, where it is cut off with the lead.
        for lead in ("", _LEAD):
            tokens = self._vocabulary.encode(lead + text)
            extra = sum(len(self._pieces[token]) for token in tokens) - len(data)
            while tokens and extra > 0:
                extra -= len(self._pieces[tokens.pop(0)])
            if b"".join(self._pieces[token] for token in tokens) == data:
                return tokens
        return list(self._longest_first(data))

    def _longest_first(self, data: bytes) -> Iterator[int]:
        """Tokens of ``data``, each the longest there is; up to a byte that has none."""
        while data:
            sizes = range(min(len(data), self._longest), 0, -1)
            size = next((size for size in sizes if data[:size] in self._tokens), None)
            if size is None:
                return
            yield self._tokens[data[:size]]
            data = data[size:]

    @cached_property
    def _tokens(self) -> Mapping[bytes, int]:
        return {piece: token for token, piece in enumerate(self._pieces) if piece}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._tokens))


def _matcher(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    if len(grammar.text.encode(errors="replace")) > LONGEST:
        raise _refusal(grammar, f"it is longer than {LONGEST} bytes")
    try:
        source = _source(grammar)
    except RecursionError as error:
        raise _refusal(grammar, "it is nested too deeply") from error
    matcher = LLMatcher(tokenizer, source, limits=_LIMITS, log_level=0)
    if matcher.is_error():
        raise _refusal(grammar, matcher.get_error())
    return matcher


def _source(grammar: Grammar) -> str:
    """A grammar in llguidance's own words."""
    match grammar.kind:
        case "json_object":
            return _grammars(json_schema={"type": "object", "x-guidance": _JSON_RULES})
        case "json_schema":
            return _grammars(json_schema={**_schema(grammar), "x-guidance": _JSON_RULES})
        case "regex":
            try:
                return LLMatcher.grammar_from_regex(grammar.text)
            except ValueError as error:
                raise _refusal(grammar, error) from error
        case "lark":
            return _grammars(lark_grammar=grammar.text)
        case "gbnf":
            try:
                return _grammars(lark_grammar=gbnf_to_lark(grammar.text))
            except RecursionError:
                raise
            except Exception as error:  # it raises that very class, too
                raise _refusal(grammar, error) from error


def _grammars(**grammar: Any) -> str:
    return json.dumps({"grammars": [grammar]})


def _schema(grammar: Grammar) -> Mapping[str, Any]:
    try:
        schema = json.loads(grammar.text)
    except ValueError as error:
        raise _refusal(grammar, f"it is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise _refusal(grammar, "it has to be an object")
    try:
        recursive = endless(schema)
    except ValueError as error:
        raise _refusal(grammar, error) from error
    if inexact(schema):
        raise _refusal(grammar, "it lists a whole number above 2^53: make it a string")
    if recursive:
        raise _refusal(grammar, "it is recursive, and nothing finite fits it")
    return schema


_NAMES: Mapping[GrammarKind, str] = {
    "json_object": "JSON grammar",
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "lark": "Lark grammar",
    "gbnf": "GBNF grammar",
}


def _refusal(grammar: Grammar, why: object) -> GrammarError:
    return GrammarError(f"the {_NAMES[grammar.kind]} can't be used: {_one_line(why)}")


def _one_line(why: object) -> str:
    return " ".join(str(why).removesuffix("<non-verbose/>").split())[:_MOST_WORDS]
