"""How a model writes its answers, told from its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from anaphora.answer.reader import Reader
from anaphora.answer.syntaxes import BARE_JSON, GENERIC, HARMONY, SYNTAXES, Syntax, Tools


@dataclass(frozen=True, slots=True)
class Think:
    """The markers that reasoning stands between."""

    open: str
    close: str


THINK = (
    Think("<think>", "</think>"),
    Think("[THINK]", "[/THINK]"),
    Think("<seed:think>", "</seed:think>"),
    Think("<|channel>thought", "<channel|>"),
)

_SIGNS: Mapping[str, tuple[str, ...]] = {
    "harmony": ("<|channel|>", "<|message|>"),
    "kimi": ("<|tool_call_begin|>",),
    "dsml": ("<｜DSML｜invoke",),
    "deepseek": ("<｜tool▁call▁begin｜>",),
    "gemma": ("<|tool_call>call:",),
    "function-gemma": ("<start_function_call>call:",),
    "mistral": ("[TOOL_CALLS]",),
    "glm": ("<tool_call>", "<arg_key>"),
    "qwen-coder": ("<function=",),
    "nemotron": ("<TOOLCALL>",),
    "hermes": ("<tool_call>",),
}
"""What shows a syntax, all of it, in a rendered call; the first syntax that shows counts."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a model writes answers."""

    think: Think | None = None
    """``None``: reasoning is not set apart from text."""
    syntaxes: tuple[Syntax, ...] = (GENERIC,)
    """In which it may write calls."""

    @classmethod
    def of(cls, source: str, called: str | None) -> Form:
        """That of models with this chat template.

        :param source: the template.
        :param called: a conversation with a call of a tool, as the template shows it; ``None``: it
            has no form for that, and the generic one is used.
        """
        if all(sign in source for sign in _SIGNS[HARMONY.name]):
            return cls(None, (HARMONY,))
        think = next((one for one in THINK if one.close in source), None)
        shown = source if called is None else called
        found = [syntax for syntax in SYNTAXES if _shows(shown, syntax)]
        if called is None:  # the model may still write calls as it was trained to
            return cls(think, tuple(found[:1])).with_generic()
        return cls(think, (found[0] if found else BARE_JSON,))

    @property
    def channels(self) -> bool:
        """Whether all of an answer is written in its syntax."""
        return any(syntax.channels for syntax in self.syntaxes)

    def with_generic(self) -> Form:
        """That of the same model where tools are shown in the generic form."""
        others = [one for one in self.syntaxes if GENERIC.openings[0] not in one.openings]
        return self if self.channels else replace(self, syntaxes=(GENERIC, *others))

    def shown(self, control: Mapping[str, int], *, with_calls: bool) -> dict[int, bytes]:
        """The control tokens that are parts of its markers, with their texts."""
        markers: list[str] = []
        if with_calls or self.channels:
            markers += (marker for syntax in self.syntaxes for marker in syntax.markers)
        if self.think:
            markers += [self.think.open, self.think.close]
        return {
            token: text.encode()
            for text, token in control.items()
            if any(text in marker for marker in markers)
        }

    def reader(
        self, prompt: str, tools: Tools, hidden: frozenset[str], *, first_call_only: bool = False
    ) -> Reader:
        """For an answer to ``prompt``, which is a text as the template wrote it.

        :param hidden: texts of control tokens, which are never given out. Nor are the markers that
            all of an answer is written in.
        :param first_call_only: a call is the end of the answer.
        """
        opened = self.think is not None and prompt.rstrip().endswith(self.think.open)
        if self.channels:
            hidden = hidden.union(*(syntax.markers for syntax in self.syntaxes))
        return Reader(self, tools, hidden, opened=opened, first_call_only=first_call_only)


def _shows(text: str, syntax: Syntax) -> bool:
    signs = _SIGNS.get(syntax.name)
    return signs is not None and all(sign in text for sign in signs)
