"""What ``prompt_cache_diagnostics`` tells: where a request parts from an earlier response."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from blake3 import blake3

from anaphora.cache.keys import Tokens
from anaphora.profiles.openai import Conditions
from anaphora.prompt.conversation import Plain

_STEP = 64
"""Tokens between the places where prompts are compared."""

NOT_FOUND = {"type": "comparison_response_not_found"}
UNAVAILABLE = {"type": "unavailable"}
"""Nothing that can be told here differs, and yet nothing was read: what the other one had cached
was too short or has expired, its space was needed, or other rules count now."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """What is remembered of a request, without its text, to compare later ones with."""

    profile: str
    model: str
    settings: Mapping[str, str | bool]
    """What prefixes had to match on besides their tokens."""
    tools: str
    """A digest of them."""
    reusable: int
    """Tokens of the prefix it left in the cache."""
    end: str
    """A digest of that prefix."""
    steps: str
    """Digests of its prefixes at each step, all of the same length."""


def likeness(
    profile: str,
    model: str,
    conditions: Conditions,
    tools: Iterable[Plain],
    tokens: Tokens,
    reusable: int,
) -> Likeness:
    """``tokens`` are the prompt, shape (n,), of which ``reusable`` stay in the cache."""
    *steps, end = _digests(tokens, [*range(_STEP, reusable, _STEP), reusable])
    # Nothing but tokens has to match under the other profiles.
    settings = asdict(conditions) if profile == "openai" else {}
    shown = blake3(repr(list(tools)).encode()).hexdigest(length=8)
    return Likeness(profile, model, settings, shown, reusable, end, "".join(steps))


def diagnose(before: Likeness, now: Likeness, tokens: Tokens, read: int) -> dict[str, Plain]:
    """How ``now``, whose prompt is ``tokens`` and read so many of them, relates to ``before``."""
    if before.profile != now.profile or not before.reusable:
        return UNAVAILABLE
    reason, common = _difference(before, now, tokens)
    if reason is not None:
        return {
            "type": "cache_miss",
            "reason": reason,
            "cache_missed_tokens": len(tokens) - common,
            "comparison_reusable_tokens": before.reusable,
        }
    return {"type": "cache_hit"} if read else UNAVAILABLE


def _difference(before: Likeness, now: Likeness, tokens: Tokens) -> tuple[str | None, int]:
    """The first reason for a miss, and how many tokens the two prompts have in common at least."""

    def differs(*names: str) -> bool:
        return any(before.settings.get(name) != now.settings.get(name) for name in names)

    same = len(tokens) >= before.reusable
    same = same and next(_digests(tokens, [before.reusable])) == before.end
    common = before.reusable if same else _common_steps(before, tokens)
    if before.model != now.model:
        return "model_changed", 0
    if differs("prompt_cache_key"):
        return "prompt_cache_key_changed", 0
    if not same and before.tools != now.tools:
        return "tools_changed", common
    if differs("parallel_tool_calls"):
        return "tools_changed", 0
    for name in ("text_format", "reasoning_effort", "verbosity"):
        if differs(name):
            return f"{name}_changed", 0
    return (None, common) if same else ("input_changed", common)


def _common_steps(before: Likeness, tokens: Tokens) -> int:
    size = len(_digest(blake3()))
    known = [before.steps[i : i + size] for i in range(0, len(before.steps), size)]
    ends = range(_STEP, min(len(tokens), _STEP * len(known)) + 1, _STEP)
    common = 0
    for end, there, here in zip(ends, known, _digests(tokens, ends), strict=False):
        if there != here:
            break
        common = end
    return common


def _digests(tokens: Tokens, ends: Iterable[int]) -> Iterator[str]:
    """A digest of the first so many tokens, for each of ``ends`` in ascending order."""
    hasher, start = blake3(), 0
    for end in ends:
        hasher.update(np.ascontiguousarray(tokens[start:end]).tobytes())
        yield _digest(hasher)
        start = end


def _digest(hasher: blake3) -> str:
    return str(hasher.hexdigest(length=8))
