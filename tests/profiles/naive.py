"""The providers' rules said as plainly as they can be: over every token, every entry, every rank.

``Account`` is what one sender has been promised; it also shows each profile what it may see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from anaphora.profiles import Anthropic, Local, OpenAI
from anaphora.profiles.decision import Decision, Lifetime, Place, View
from anaphora.profiles.outline import Boundary, Outline, Ttl

Counters = tuple[int, dict[Lifetime, int]]
"""Tokens read, and written by lifetime."""


@dataclass
class Promise:
    prefix: tuple[Hashable, ...]
    """Tokens, or what else a prompt is made of."""
    match: str
    lifetime: float | None
    expires: float | None

    def lives(self, now: float) -> bool:
        return self.expires is None or now < self.expires


@dataclass
class Account:
    promises: list[Promise] = field(default_factory=list)

    def view(self, tokens: Sequence[Hashable], outline: Outline, now: float) -> View:
        """With expired entries at boundaries: to see that they have expired is up to a profile."""
        prompt = tuple(tokens)
        expiries: dict[Place, float | None] = {}
        for boundary in outline.boundaries:
            found = self.find(prompt[: boundary.position], boundary.match)
            if found is not None and boundary.position <= len(prompt):
                expiries[boundary.position, boundary.match] = found.expires
        living = [promise.prefix for promise in self.promises if promise.lives(now)]
        reach = max((agreeing(prompt, prefix) for prefix in living), default=0)
        return View(reach, expiries)

    def find(self, prefix: tuple[Hashable, ...], match: str) -> Promise | None:
        same = [p for p in self.promises if p.prefix == prefix and p.match == match]
        return same[0] if same else None

    def lives(self, prefix: tuple[Hashable, ...], match: str, now: float) -> bool:
        found = self.find(prefix, match)
        return found is not None and found.lives(now)

    def apply(self, tokens: Sequence[Hashable], decision: Decision) -> None:
        """The request reads, and then begins to answer."""
        prompt = tuple(tokens)
        for position, match in decision.refreshed:
            found = self.find(prompt[:position], match)
            assert found is not None
            if found.lifetime is not None:
                found.expires = decision.started + found.lifetime
        for write in decision.writes:
            found = self.find(prompt[: write.position], write.match)
            if found is not None:
                self.promises.remove(found)
            expires = decision.started + write.lifetime
            self.promises.append(
                Promise(prompt[: write.position], write.match, write.lifetime, expires)
            )


def agreeing(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def local(
    rules: Local, account: Account, tokens: Sequence[int], outline: Outline, now: float
) -> Counters:
    living = [promise for promise in account.promises if promise.lives(now)]
    read = 0
    while any(promise.prefix[: read + 1] == tuple(tokens[: read + 1]) for promise in living) and (
        read < len(tokens)
    ):
        read += 1
    marks = [(b.position, b.mark) for b in outline.boundaries if b.mark]
    return read, label(rules.lifetimes, read, marks, len(tokens), rest="unlimited")


def anthropic(
    rules: Anthropic, account: Account, tokens: Sequence[int], outline: Outline, now: float
) -> Counters:
    blocks = [boundary for boundary in outline.boundaries if boundary.kind == "block"]
    read = 0
    for mark, marked in enumerate(blocks):
        if not marked.mark:
            continue
        for back in range(rules.look_back):
            if back > mark:
                break
            block = blocks[mark - back]
            if block.position >= rules.minimum and account.lives(
                tuple(tokens[: block.position]), block.match, now
            ):
                read = max(read, block.position)
    marks = [(b.position, b.mark) for b in blocks if b.mark and b.position >= rules.minimum]
    return read, label(rules.lifetimes, read, marks, len(tokens))


def openai(
    rules: OpenAI, account: Account, tokens: Sequence[int], outline: Outline, now: float
) -> Counters:
    def rank(boundary: Boundary, of: Callable[[Boundary], bool]) -> int:
        """How many like it come later in the prompt."""
        place = outline.boundaries.index(boundary)
        return sum(of(later) for later in outline.boundaries[place + 1 :])

    def explicit(boundary: Boundary) -> bool:
        return boundary.mark is not None

    def end(boundary: Boundary) -> bool:
        return boundary.kind in ("message", "developer")

    implicit = outline.implicit is not None
    read = 0
    marks: list[tuple[int, Ttl]] = []
    for boundary in outline.boundaries:
        if boundary.position < rules.minimum:
            continue
        readable = explicit(boundary) and rank(boundary, explicit) < rules.most_explicit
        if implicit and end(boundary):
            readable |= rank(boundary, end) <= rules.most_messages
            readable |= boundary.kind == "developer"
            if rank(boundary, end) == 0 and outline.implicit:
                marks.append((boundary.position, outline.implicit))
        if boundary.mark and rank(boundary, explicit) < rules.most_writes - implicit:
            marks.append((boundary.position, boundary.mark))
        prefix = tuple(tokens[: boundary.position])
        if readable and account.lives(prefix, boundary.match, now):
            read = max(read, boundary.position)
    written = label(rules.lifetimes, read, marks, len(tokens))
    return read - read % rules.rounding, written


def label(
    lifetimes: Mapping[Ttl, float],
    read: int,
    marks: Sequence[tuple[int, Ttl]],
    length: int,
    rest: Lifetime | None = None,
) -> dict[Lifetime, int]:
    """Every token behind what was read, under the longest lifetime promised over it."""
    counts: Counter[Lifetime] = Counter()
    for token in range(read, length):
        over = [(lifetimes[ttl], ttl) for position, ttl in marks if position > token]
        if over:
            counts[max(over)[1]] += 1
        elif rest is not None:
            counts[rest] += 1
    return dict(counts)
