"""Why a request read no more than it did: a pure function over remembered prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from anaphora.diagnose.difference import Change, Difference, Reader, difference, shared
from anaphora.diagnose.patterns import Kind, kind_of, same_words
from anaphora.diagnose.prompts import Remembered
from anaphora.vocabulary import Vocabulary

Cause = (
    Literal[
        "nothing_missed",
        "first_request",
        "other_cache_key",
        "other_setting",
        "expired",
        "evicted",
        "lost",
        "out_of_reach",
        "below_minimum",
        "no_breakpoint",
        "not_held",
        "appended",
        "tools_reordered",
        "tools_changed",
        "tool_changed",
        "keys_reordered",
        "system_changed",
        "new_message",
        "message_changed",
        "template_changed",
        "other_tokens",
    ]
    | Kind
)

CAUSES: tuple[str, ...] = tuple(name for part in get_args(Cause) for name in get_args(part))

_ABOUT_PROMPTS: frozenset[Cause] = frozenset(
    {"system_changed", "new_message", "message_changed", "other_cache_key", "other_setting"}
)
"""Causes that mean nothing where two prompts share no more than the template's opening."""

_LARGEST_REGION = 20_000
"""Tokens of a tool or message that are searched for a change of order."""
_STEP = 128
"""Profiles and modes may count what they read in steps of up to this (tokens)."""

_MOVE = (
    "Move it behind everything that stays the same, best to the end of the last message, or have "
    "a rule for volatile text take it out."
)

_TEXTS: Mapping[Cause, tuple[str, str]] = {
    "nothing_missed": (
        "Nothing was missed: all that earlier prompts share, or all up to the last breakpoint, was "
        "read.",
        "",
    ),
    "first_request": ("No earlier request is remembered whose prompt begins like this one.", ""),
    "other_cache_key": (
        "The request that begins like this one had another cache key.",
        "Send the same cache key with requests that are to share a prefix.",
    ),
    "other_setting": (
        "The request that begins like this one had another value of: {settings}.",
        "Keep that the same for requests that are to share a prefix.",
    ),
    "expired": (
        "An entry for {unread:,} tokens was there, but its lifetime was over.",
        "Ask for a longer lifetime, or send requests more often.",
    ),
    "evicted": (
        "An entry for {unread:,} tokens was there, but its space had been needed.",
        "Give the cache more memory or disk.",
    ),
    "lost": (
        "An entry for {unread:,} tokens was there, but a file of it was damaged or deleted.",
        "Look after the disk, and at who else writes to the cache folder.",
    ),
    "out_of_reach": (
        "An entry for {unread:,} tokens is there, but too far before every breakpoint.",
        "Put one more breakpoint between that place and the end.",
    ),
    "below_minimum": (
        "The shared prompt is shorter than {minimum:,} tokens, the least that is cached.",
        "Nothing to do, unless more of the text can stand in the shared part.",
    ),
    "no_breakpoint": (
        "No breakpoint lies in what the two prompts share.",
        "Put a breakpoint at the end of what stays the same.",
    ),
    "not_held": (
        "The cache did not hold all that the two prompts share: it was not written yet, or no "
        "longer there.",
        "Send the second request when the first has begun to answer, or give the cache more room.",
    ),
    "appended": (
        "The prompt goes on where the earlier one ends: what is new is computed once.",
        "",
    ),
    "timestamp": ("A time stamp in {place} changed.", _MOVE),
    "date": ("A date in {place} changed.", _MOVE),
    "uuid": ("A UUID in {place} changed.", _MOVE),
    "hash": ("A hash or checksum in {place} changed.", _MOVE),
    "id": ("An id in {place} changed.", _MOVE),
    "counter": ("A number in {place} changed.", _MOVE),
    "tools_reordered": (
        "The same tools came in another order.",
        "Send tools in the same order each time, sorted by name for example.",
    ),
    "tools_changed": (
        "The list of tools changed: {tools}.",
        "Send the same tools with every request of a conversation; tools stand before all else.",
    ),
    "tool_changed": (
        "The description of {place} changed.",
        "Describe tools the same way in every request; they stand before all else.",
    ),
    "keys_reordered": (
        "The same data in {place} came in another order.",
        "Write JSON with the same order of keys each time, sorted for example.",
    ),
    "system_changed": (
        "The text of {place} changed.",
        "Keep the system prompt the same, and put what differs into a message behind it.",
    ),
    "new_message": ("The last message is another one: what is before it is shared.", ""),
    "message_changed": (
        "The text of {place} changed, with messages behind it.",
        "Add messages at the end, and leave those before as they were sent.",
    ),
    "template_changed": (
        "The chat template wrote something else there: it may show a date, or depend on the tools, "
        "on options or on the messages behind.",
        "Compare the options of the two requests, and what their last messages are.",
    ),
    "other_tokens": (
        "The text in {place} is the same, but it is made of other tokens.",
        "Send back the answer as text rather than as tokens, or leave it as it is.",
    ),
}


@dataclass(frozen=True, slots=True)
class Nearest:
    """The earlier request whose prompt shares the longest beginning."""

    request_id: str
    seconds_before: float
    shared_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request read no more than it did."""

    request_id: str
    prompt_tokens: int
    read_tokens: int
    computed_tokens: int
    """What was really computed of the prompt, whatever counts as read."""
    cause: Cause
    sentence: str
    advice: str
    """What to change; empty where nothing should be."""
    nearest: Nearest | None = None
    difference: Difference | None = None
    """``None``: the prompt doesn't part from the nearest one."""
    rules: tuple[str, ...] = ()
    """Rules for volatile text that were applied to the request."""

    def as_json(self) -> dict[str, Any]:
        """As plain data; :meth:`from_json` is the way back."""
        data: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return data

    @staticmethod
    def from_json(text: bytes | str) -> Explanation:
        """An explanation from its JSON. Raises ``ValueError`` for anything that is none."""
        return _ADAPTER.validate_json(text)


_ADAPTER = TypeAdapter(Explanation)


def explain(
    prompt: Remembered, earlier: Sequence[Remembered], vocabulary: Vocabulary
) -> Explanation:
    """Why ``prompt`` read no more than it did.

    :param earlier: what the same tenant asked before, oldest first.
    """
    found = _nearest(prompt, earlier)
    if found is None:
        return _explanation(prompt, _without_nearest(prompt))
    nearest, common = found
    reader = Reader(vocabulary)
    change = None
    if common < len(prompt.tokens):
        change = reader.change(nearest.tokens, prompt.tokens, common)
    cause = _of_the_cache(prompt, nearest, common)
    if cause is None:
        cause = _of_the_text(prompt, nearest, common, change, reader)
    if cause in _ABOUT_PROMPTS and common <= _first(prompt):
        return _explanation(prompt, "first_request")
    return _explanation(prompt, cause, nearest, common, change)


def _nearest(prompt: Remembered, earlier: Sequence[Remembered]) -> tuple[Remembered, int] | None:
    """The latest of those that share most; one that could have been read goes first."""
    best: tuple[tuple[int, bool], Remembered] | None = None
    for one in earlier:
        rank = shared(one.tokens, prompt.tokens), dict(one.match) == dict(prompt.match)
        if rank[0] and (best is None or rank >= best[0]):
            best = rank, one
    return None if best is None else (best[1], best[0][0])


def _without_nearest(prompt: Remembered) -> Cause:
    if prompt.decision.read >= len(prompt.tokens):
        return "nothing_missed"
    return _unread(prompt) or "first_request"


def _unread(prompt: Remembered) -> Cause | None:
    """Why the entry that would have reached furthest was not read; ``None``: there is none."""
    unread = prompt.decision.unread
    return max(unread, key=unread.__getitem__, default=None)


def _first(prompt: Remembered) -> int:
    """Where the first text that is not the template's begins."""
    return prompt.spans[0].start if prompt.spans else 0


def _of_the_cache(prompt: Remembered, nearest: Remembered, common: int) -> Cause | None:
    """The cause that lies in the rules of the cache rather than in the text."""
    decision, read = prompt.decision, prompt.decision.read
    if read >= len(prompt.tokens):
        return "nothing_missed"
    differing = _differing(prompt, nearest)
    if differing:
        return "other_cache_key" if differing == ["cache_key"] else "other_setting"
    if cause := _unread(prompt):
        return cause
    whole = common == len(nearest.tokens)  # the earlier prompt is a prefix of this one
    if read == 0 and (
        len(prompt.tokens) < decision.minimum
        or (whole and common < decision.minimum and nearest.decision.read == 0)
    ):
        return "below_minimum"
    if decision.breakpoints is None and nearest.decision.breakpoints is None:
        return "not_held" if common - read > _STEP else None
    looked, written = decision.breakpoints or (), nearest.decision.breakpoints or ()
    if not looked or (read == 0 and not written):
        return "no_breakpoint"
    if any(max(read, decision.minimum - 1) < end <= common for end in {*looked} & {*written}):
        return "not_held"
    if common - read <= _STEP and read >= max(looked):
        return "nothing_missed"
    if common == len(prompt.tokens):
        return "no_breakpoint"
    return None


def _differing(prompt: Remembered, nearest: Remembered) -> list[str]:
    """Names of the settings that have to be equal and are not."""
    names = sorted({*prompt.match, *nearest.match})
    return [name for name in names if prompt.match.get(name) != nearest.match.get(name)]


def _of_the_text(
    prompt: Remembered, nearest: Remembered, common: int, change: Change | None, reader: Reader
) -> Cause:
    """The cause that lies in what the two prompts say."""
    if change is None:
        return "nothing_missed"
    if common == len(nearest.tokens):
        return "appended"
    if not change.in_text:
        return "other_tokens"
    region, before = prompt.region(common), nearest.region(common)
    place = region.place
    if _tools(prompt) != _tools(nearest) and {place.kind, before.place.kind} & {"tool", "template"}:
        reordered = sorted(_tools(prompt)) == sorted(_tools(nearest))
        return "tools_reordered" if reordered else "tools_changed"
    if max(region.end - region.start, before.end - before.start) <= _LARGEST_REGION:
        texts = (
            reader.text(one.tokens, span.start, span.end)
            for one, span in ((nearest, before), (prompt, region))
        )
        if same_words(*texts):
            return "keys_reordered"
    if (kind := kind_of(change)) is not None:
        return kind
    match place.kind:
        case "tool":
            return "tool_changed"
        case "system":
            return "system_changed"
        case "message":
            last = all(span.place.number <= place.number for span in prompt.spans)
            return "new_message" if last else "message_changed"
    return "template_changed"


def _tools(prompt: Remembered) -> list[str]:
    return [span.place.name for span in prompt.spans if span.place.kind == "tool"]


def _explanation(
    prompt: Remembered,
    cause: Cause,
    nearest: Remembered | None = None,
    common: int = 0,
    change: Change | None = None,
) -> Explanation:
    decision = prompt.decision
    sentence, advice = _TEXTS[cause]
    closest = parts = None
    if nearest is not None:
        before = prompt.time - nearest.time
        closest = Nearest(nearest.request_id, before, common, len(nearest.tokens))
        if change is not None:
            parts = difference(nearest, prompt, common, change)
    values = {
        "place": parts.place if parts else "",
        "settings": ", ".join(_differing(prompt, nearest)) if nearest else "",
        "tools": _changed_tools(prompt, nearest) if nearest else "",
        "unread": max(decision.unread.values(), default=0),
        "minimum": decision.minimum,
    }
    return Explanation(
        prompt.request_id,
        len(prompt.tokens),
        decision.read,
        len(prompt.tokens) - decision.reused,
        cause,
        sentence.format(**values),
        advice,
        closest,
        parts,
        prompt.rules,
    )


def _changed_tools(prompt: Remembered, nearest: Remembered) -> str:
    now, before = _tools(prompt), _tools(nearest)
    changes = [f"{name} is new" for name in now if name not in before]
    changes += [f"{name} is gone" for name in before if name not in now]
    return ", ".join(changes[:3]) + (", and more" if len(changes) > 3 else "")
