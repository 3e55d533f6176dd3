"""What requests of OpenAI's protocols say about caching: a key, options, breakpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from anaphora.api.edge import Body
from anaphora.api.errors import ApiError
from anaphora.api.outlines import Ending, with_message_ends
from anaphora.api.tool_choice import Choice, Named
from anaphora.engine.protocol import Started
from anaphora.profiles.openai import Conditions
from anaphora.profiles.outline import Ttl
from anaphora.prompt.conversation import Message

_LONGEST_KEY = 64
_DEFAULTS = Conditions()


def _short(key: str | None) -> str | None:
    if key is not None and len(key) > _LONGEST_KEY:
        raise ApiError(
            "Invalid 'prompt_cache_key': string too long. Expected a string with maximum length "
            f"{_LONGEST_KEY}, but got a string with length {len(key)} instead.",
            param="prompt_cache_key",
            code="string_above_max_length",
        )
    return key


CacheKey = Annotated[
    Annotated[str, Field(json_schema_extra={"maxLength": _LONGEST_KEY})] | None,
    AfterValidator(_short),
]
"""An empty key is the same as none."""


class Breakpoint(Body):
    """Marks the exact end of a prefix that later requests will begin with."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None
    """The least lifetime; ``None``: that of the request's options."""


class CachingBody(Body):
    """What Chat Completions and Responses both take, besides options of their own."""

    parallel_tool_calls: bool | None = None
    prompt_cache_key: CacheKey = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    """A maximum: no lifetime is longer than a day."""

    def calls(self, tool_choice: Choice | None) -> Literal["none", "one", "any"]:
        """How many calls of tools the answer may have."""
        if tool_choice == "none":
            return "none"
        if isinstance(tool_choice, Named):
            return "one"
        return "one" if self.parallel_tool_calls is False else "any"

    def conditions(self, effort: str | None, verbosity: str | None, text_format: str) -> Conditions:
        """What a prefix has to match on besides its tokens."""
        return Conditions(
            prompt_cache_key=self.prompt_cache_key or "",
            parallel_tool_calls=self.parallel_tool_calls is not False,
            text_format=text_format,
            reasoning_effort=effort or _DEFAULTS.reasoning_effort,
            verbosity=verbosity or _DEFAULTS.verbosity,
        )


@dataclass(frozen=True, slots=True)
class Caching:
    """What a request asks of the cache."""

    conditions: Conditions
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Ttl | None = None

    @property
    def match(self) -> str:
        """The match key of all boundaries."""
        return self.conditions.match

    @property
    def implicit(self) -> Ttl | None:
        """Lifetime of the implicit breakpoint; ``None``: there is none."""
        return None if self.mode == "explicit" else self._ttl

    def marked(
        self, message: int, parts: Iterable[tuple[str, Breakpoint | None]]
    ) -> Iterator[Ending]:
        """The breakpoints on the texts that are the content of ``message``.

        Empty texts are left out of it: a breakpoint on one is where the text before it ends.
        """
        number = -1
        for text, mark in parts:
            number += bool(text)
            if mark is not None:
                yield Ending(
                    number=max(0, number),
                    message=message,
                    hidden=number < 0,
                    match=self.match,
                    mark=mark.ttl or self._ttl,
                )

    def endings(self, marked: Iterable[Ending], messages: list[Message]) -> tuple[Ending, ...]:
        """All that prefixes of ``messages`` may end with."""
        return with_message_ends(marked, messages, self.match)

    @property
    def _ttl(self) -> Ttl:
        return self.ttl or "30m"


def written_by_ttl(started: Started) -> dict[str, int]:
    """Written tokens under the two lifetimes the protocol has: twelve hours, and whatever else."""
    for_hours = started.written_by_lifetime.get("12h", 0)
    return {"ttl_30m_tokens": started.written_tokens - for_hours, "ttl_12h_tokens": for_hours}
