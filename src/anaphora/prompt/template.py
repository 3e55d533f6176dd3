"""Chat templates: from a conversation to the text a model was trained on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn

from anaphora.clock import Clock, SystemClock
from anaphora.errors import TemplateError
from anaphora.prompt.conversation import well_formed
from anaphora.prompt.sandbox import BASE_BUDGET, BUDGET_FACTOR, Budget, ChatEnvironment, limited

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Used for a model that brings no template, as llama.cpp does."""

Ids = Literal["any", "short", "named"]
"""Ids of calls: ``short`` ones are nine letters and digits; ``named`` ones, like
``functions.NAME:0``, are shown in the place of the name."""

_MAX_SOURCE = 1 << 20
_MAX_MESSAGE = 500


def read_template(path: Path) -> str:
    """The source of an override file.

    :raises TemplateError: the file cannot be read or is no UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise TemplateError(f"cannot read the chat template {path}: {error}") from error


class ChatTemplate:
    """A compiled template. Safe to use from several threads.

    Templates see what Hugging Face's ``apply_chat_template`` shows them: ``messages``, ``tools``,
    ``documents``, ``add_generation_prompt``, ``bos_token``, ``eos_token`` and any further option;
    ``raise_exception`` and ``strftime_now`` (local time).

    :param source: Jinja source, at most 1 MiB.
    :param bos: text of the BOS token, ``""`` if the model has none; ``eos`` likewise.
    :raises TemplateError: the source does not compile.
    """

    def __init__(
        self, source: str, *, bos: str = "", eos: str = "", clock: Clock | None = None
    ) -> None:
        if len(source) > _MAX_SOURCE:
            raise TemplateError("the chat template is larger than 1 MiB")
        self.source = source
        self.clock = clock or SystemClock()
        self._tokens = {"bos_token": bos, "eos_token": eos}
        environment = ChatEnvironment()
        environment.globals["raise_exception"] = _refuse
        try:
            with limited(BASE_BUDGET):
                self._template = environment.from_string(source)
        except Exception as error:  # hostile sources fail in every way a compiler can
            raise TemplateError(
                f"the chat template does not compile: {_one_line(error)}"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] = (),
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
        now: float | None = None,
    ) -> str:
        """The text of ``messages``.

        :param now: what the template takes for the time, in seconds since the Unix epoch;
            ``None``: the clock's.
        :raises TemplateError: the template refuses the conversation, breaks, breaks a rule of the
            sandbox, or does more work than :mod:`anaphora.prompt.sandbox` allows.
        """
        variables = {
            **self._tokens,
            "documents": None,
            **(options or {}),
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        weight = _Scale()
        weight.weigh(variables)
        moment = datetime.fromtimestamp(self.clock.now() if now is None else now)
        variables["strftime_now"] = lambda form: moment.strftime(str(form)[:200])
        try:
            with limited(BASE_BUDGET + BUDGET_FACTOR * weight.units):
                return well_formed(self._template.render(variables))
        except TemplateError:
            raise
        except Exception as error:  # a template can raise anything
            raise TemplateError(f"the chat template failed: {_one_line(error)}") from error

    @cached_property
    def wants_parts(self) -> bool:
        """Whether content has to be a list of typed parts: a string would not be shown."""
        probe = "anaphora-probe"
        parts = [{"type": "text", "text": probe}]
        return not self._shows(probe, probe) and self._shows(probe, parts)

    @property
    def example(self) -> str | None:
        """A conversation with a tool, a call of it and a result, as the template shows them.

        ``None``: it doesn't show all of that.
        """
        return self._probed[0]

    @property
    def ids(self) -> Ids:
        """Which ids calls have to have."""
        return self._probed[1]

    @cached_property
    def _probed(self) -> tuple[str | None, Ids]:
        probes = tuple(f"anaphora_{n}" for n in ("tool", "call", "x", "result"))
        forms: tuple[tuple[Ids, str], ...] = (
            ("any", "call_of_any_length"),
            ("short", "call00000"),
            ("named", f"functions.{probes[1]}:0"),
        )
        for ids, call_id in forms:
            try:
                text = self._example(probes, call_id)
            except TemplateError:
                continue
            if all(probe in text for probe in probes):
                return text, ids
        return None, "any"

    @cached_property
    def reasoning_field(self) -> str:
        """The member of a message in which the template looks for reasoning."""
        names = ("reasoning_content", "reasoning", "thinking")
        looks_for = (re.search(rf"""[.'"]{name}\b""", self.source) for name in names)
        return next((n for n, found in zip(names, looks_for, strict=True) if found), names[0])

    def _example(self, probes: tuple[str, ...], call_id: str) -> str:
        described, called, value, result = probes

        def content(text: str) -> Any:
            return [{"type": "text", "text": text}] if self.wants_parts else text

        call = {"name": called, "arguments": {"value": value}}
        messages = [
            {"role": "user", "content": content("probe")},
            {
                "role": "assistant",
                "content": content(""),
                "tool_calls": [{"id": call_id, "type": "function", "function": call}],
            },
            {
                "role": "tool",
                "tool_call_id": call_id,
                "name": "anaphora_name",
                "content": content(result),
            },
        ]
        parameters = {"type": "object", "properties": {"value": {"type": "string"}}}
        function = {"name": described, "description": "A probe.", "parameters": parameters}
        return self.render(messages, tools=[{"type": "function", "function": function}])

    def _shows(self, probe: str, content: Any) -> bool:
        try:
            return probe in self.render([{"role": "user", "content": content}])
        except TemplateError:
            return False


class _Scale(Budget):
    """Counts units instead of limiting them."""

    def __init__(self) -> None:
        self.units = 0

    def spend(self, units: int) -> None:
        self.units += units


def _refuse(message: Any = "") -> NoReturn:
    raise TemplateError(_one_line(message) or "the chat template refuses the conversation")


def _one_line(message: Any) -> str:
    text = " ".join(str(message)[: 2 * _MAX_MESSAGE].split())
    if isinstance(message, Exception):
        text = f"{type(message).__name__}: {text}" if text else type(message).__name__
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."
