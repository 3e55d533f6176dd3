"""Answers that have to be calls of tools: a grammar of them, in the form of the model.

Where a form writes arguments in another way than as JSON, the generic form is taken: only JSON can
be held to a schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from anaphora.answer.forms import Form
from anaphora.answer.syntaxes import GENERIC, Syntax, Tools
from anaphora.engine.constraint import check, control_in_check, lark_json
from anaphora.engine.protocol import Grammar
from anaphora.errors import GrammarError
from anaphora.prompt.conversation import Plain
from anaphora.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class _Written:
    """What stands around the name and the JSON arguments of a call, and around all calls."""

    before: str
    middle: str
    after: str
    first: str = ""
    between: str = ""
    last: str = ""
    quoted: bool = True
    """The name is a JSON string."""


_GENERIC = _Written('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", between="\n")
_WRITTEN: Mapping[str, _Written] = {
    "harmony": _Written(
        "<|channel|>commentary to=functions.",
        " <|constrain|>json<|message|>",
        "",
        quoted=False,
    ),
    "deepseek": _Written(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
        quoted=False,
    ),
    "mistral": _Written(
        '{"name": ', ', "arguments": ', "}", "[TOOL_CALLS][", between=", ", last="]"
    ),
    "nemotron": _Written(
        '{"name": ', ', "arguments": ', "}", "<TOOLCALL>[", between=", ", last="]</TOOLCALL>"
    ),
    "hermes": _GENERIC,
    "json": _Written('{"name": ', ', "parameters": ', "}", between="; "),
}
MOST_CALLS = 8
"""In one answer: a small model may find no end to them."""
_PLAIN_NAME = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Forced:
    """An answer that has to call tools."""

    grammar: Grammar
    form: Form
    """That it is read in."""


def forced(
    form: Form, prompt: str, tools: Tools, vocabulary: Vocabulary, *, several: bool
) -> Forced:
    """That calls one of ``tools``, or, with ``several``, up to :data:`MOST_CALLS` times one.

    It may begin with reasoning where the form has any.

    :param form: that of the model.
    :param prompt: the text that it answers, as the template wrote it.
    :param tools: at least one.

    Raises :class:`~anaphora.errors.GrammarError` that names the tool whose parameters can't be
    held to, or says that all of them together are too much.
    """
    for name, parameters in tools.items():
        try:
            check(Grammar.json_schema(_schema(parameters)), vocabulary)
        except GrammarError as error:
            raise GrammarError(f"a call of the tool {name} can't be forced: {error}") from error
    syntax, written = _way(form, tools)

    def grammar(control: Mapping[str, int]) -> Grammar:
        rules = _Rules(control)
        calls = "call"
        if several and not syntax.channels:
            calls = f"call ({rules.text(written.between)} call){{0,{MOST_CALLS - 1}}}"
        start = (
            rules.thought(form, prompt),
            rules.text(written.first),
            calls,
            rules.text(written.last),
        )
        lines = [
            f"start: {' '.join(start)}",
            f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}",
        ]
        for number, (name, parameters) in enumerate(tools.items()):
            # What a name looks like is no control token.
            named = json.dumps(name, ensure_ascii=False)
            call = (
                rules.text(written.before),
                *_literal(named if written.quoted else name),
                rules.text(written.middle),
                lark_json(_schema(parameters)),
                rules.text(written.after),
            )
            lines.append(f"call_{number}: {' '.join(call)}")
        return Grammar("lark", "\n".join([*lines, *rules.terminals]))

    check(grammar(control_in_check(vocabulary)), vocabulary)
    return Forced(grammar(vocabulary.control), replace(form, syntaxes=(syntax,)))


def _way(form: Form, tools: Tools) -> tuple[Syntax, _Written]:
    """The first syntax of the model's that can be used for all ``tools``, else the generic one."""
    for syntax in form.syntaxes:
        written = _WRITTEN.get(syntax.name)
        if written and (written.quoted or all(map(_PLAIN_NAME.fullmatch, tools))):
            return syntax, written
    return GENERIC, _GENERIC


def _schema(parameters: Plain) -> dict[str, Plain]:
    """Parameters are an object, whether their schema says so or not."""
    given = parameters if isinstance(parameters, dict) else {}
    return {**given, "type": "object"}


class _Rules:
    """Writes texts as terms of Lark, in which control tokens are themselves."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        texts = sorted(control, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self.terminals: list[str] = []

    def text(self, text: str) -> str:
        return " ".join(self._terms(text))

    def _terms(self, text: str) -> Iterator[str]:
        position = 0
        for match in self._pattern.finditer(text):
            yield from _literal(text[position : match.start()])
            yield f"<[{self._control[match[0]]}]>"
            position = match.end()
        yield from _literal(text[position:])

    def thought(self, form: Form, prompt: str) -> str:
        """Reasoning in front of the calls; it has to end where the prompt has opened it."""
        if form.channels:
            opening, closing = "<|channel|>analysis<|message|>", "<|end|>"
            behind = self.text("<|start|>assistant")
            return f"({self.text(opening)} {self._until(closing)} {behind})?"
        if form.think is None:
            return ""
        rest = f"{self._until(form.think.close)} SPACE"
        self.terminals.append(r"SPACE: /[ \n]{0,4}/")
        if prompt.rstrip().endswith(form.think.open):
            return rest
        return f"({self.text(form.think.open)} {rest})?"

    def _until(self, closing: str) -> str:
        """Any text, and the first ``closing`` behind it."""
        if closing in self._control:
            self.terminals.append("THOUGHT: /(?s:.*)/")
            return f"THOUGHT {self.text(closing)}"
        pattern = re.escape(closing).replace("/", r"\/")
        self.terminals.append(f"thought[lazy]: /(?s:.*){pattern}/")
        return "thought"


def _literal(text: str) -> list[str]:
    return [json.dumps(text, ensure_ascii=False)] if text else []
