"""Random histories of a small cache, with restarts, crashes and damage, against a plain model."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from anaphora.cache.disk import RETRY_SECONDS
from anaphora.cache.format import PAGE
from anaphora.cache.keys import DEFAULT_SEGMENTS, Segment, Tokens
from anaphora.cache.lease import Lease
from anaphora.cache.store import Loaded
from anaphora.clock import ManualClock
from anaphora.profiles import Anthropic, OpenAI
from anaphora.profiles.outline import Boundary, Outline, Ttl
from tests.cache.naive import Step, agreeing, steps
from tests.cache.support import (
    PAYLOAD,
    block_files,
    check_consistent,
    crash,
    open_cache,
    payload,
    prompt,
    read,
    store,
)
from tests.profiles.naive import Account

MEMORY = 6
DISK = 9 * (PAGE + PAYLOAD)

pieces = st.lists(st.integers(0, 2), min_size=1, max_size=5)
lengths = st.integers(1, 80)
segment_lists = st.sampled_from(
    [
        DEFAULT_SEGMENTS,
        (Segment("house", b"", 24), Segment("one")),
        (Segment("house", b"", 24), Segment("two")),
        (Segment("house"),),
    ]
)
profiles = st.sampled_from([Anthropic(minimum=8, look_back=2), OpenAI(minimum=8, most_explicit=2)])
ttls: st.SearchStrategy[Ttl] = st.sampled_from(["5m", "1h"])


class CacheHistory(RuleBasedStateMachine):
    with_disk = True

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="anaphora-test-"))
        self.clock = ManualClock()
        self.leases: list[Lease] = []
        self.promised: list[tuple[str, list[Step]]] = []
        self.stored: list[list[Step]] = []
        self.accounts = {"anthropic": Account(), "openai": Account()}
        """What the providers' rules would have left of a cache that loses nothing."""
        self.open()

    def open(self) -> None:
        folder = self.folder if self.with_disk else None
        self.cache = open_cache(folder, memory=MEMORY, disk=DISK, clock=self.clock)

    def teardown(self) -> None:
        for lease in self.leases:
            lease.close()
        if self.with_disk:
            self.cache.flush()
        self.cache.close()
        shutil.rmtree(self.folder)

    def tokens(self, pieces: list[int], length: int) -> Tokens:
        return prompt(*pieces)[:length]

    @rule(
        pieces=pieces,
        length=lengths,
        segments=segment_lists,
        decoded=st.none() | st.integers(0, 80),
        keep_live=st.booleans(),
        saved=st.integers(0, 6),
    )
    def run_a_prompt(
        self,
        pieces: list[int],
        length: int,
        segments: tuple[Segment, ...],
        decoded: int | None,
        keep_live: bool,
        saved: int,
    ) -> None:
        tokens = self.tokens(pieces, length)
        lease = self.cache.lease(segments)
        lease.advance(tokens, decoded)
        lease.promise()
        walked = steps(tokens, segments)
        self.promised += [(s.owner, walked[: s.end]) for s in segments]
        assert self.cache.read_tokens(tokens, segments) == len(tokens), "a promise just made"
        self.stored.append(walked)
        self.save(lease, saved)
        if keep_live:
            self.leases.append(lease)
        else:
            lease.close()

    @rule(
        pieces=pieces,
        length=lengths,
        segments=segment_lists,
        profile=profiles,
        marks=st.lists(st.tuples(st.integers(0, 80), ttls), max_size=4),
        keep_live=st.booleans(),
        saved=st.integers(0, 6),
    )
    def run_a_prompt_under_a_providers_rules(
        self,
        pieces: list[int],
        length: int,
        segments: tuple[Segment, ...],
        profile: Anthropic | OpenAI,
        marks: list[tuple[int, Ttl]],
        keep_live: bool,
        saved: int,
    ) -> None:
        tokens = self.tokens(pieces, length)
        walked = steps(tokens, segments)
        outline = Outline(tuple(Boundary(p, mark=ttl) for p, ttl in sorted(marks)))
        account, now = self.accounts[profile.name], self.clock.now()
        decision = self.cache.begin(tokens, segments, profile, outline)
        unbroken = profile.decide(outline, len(tokens), account.view(walked, outline, now), now)
        assert decision.read <= unbroken.read
        assert decision.uncached == unbroken.uncached or decision.read < unbroken.read
        account.apply(walked, decision)
        lease = self.cache.lease(segments)
        lease.advance(tokens)
        lease.write(profile.name, decision)
        again = self.cache.begin(tokens, segments, profile, outline)
        assert again.read == max([decision.read, *(write.position for write in decision.writes)])
        account.apply(walked, again)
        # After a crash automatic promises are made from the blocks there are, whoever's they were.
        self.promised += [(s.owner, walked[: s.end]) for s in segments]
        self.stored.append(walked)
        self.save(lease, saved)
        if keep_live:
            self.leases.append(lease)
        else:
            lease.close()

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 10), pieces=pieces, length=lengths, saved=st.integers(0, 3))
    def go_on_with_a_live_one(self, which: int, pieces: list[int], length: int, saved: int) -> None:
        lease = self.leases[which % len(self.leases)]
        tokens = self.tokens(pieces, length)
        lease.advance(tokens)
        walked = steps(tokens, lease._segments)
        self.promised += [(s.owner, walked[: s.end]) for s in lease._segments]
        self.stored.append(walked)
        lease.promise()
        self.save(lease, saved)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 10))
    def end_a_live_one(self, which: int) -> None:
        self.leases.pop(which % len(self.leases)).close()

    def save(self, lease: Lease, count: int) -> None:
        for block in lease.unsaved()[:count]:
            store(self.cache, block, decoded_from=lease._decoded_from)

    @rule(pieces=pieces, length=lengths, segments=segment_lists)
    def read_a_prompt(self, pieces: list[int], length: int, segments: tuple[Segment, ...]) -> None:
        tokens = self.tokens(pieces, length)
        walked = steps(tokens, segments)
        possible = max((agreeing(walked, other) for other in self.stored), default=0)
        assert self.cache.match(tokens, segments).length <= possible
        assert read(self.cache, tokens, segments) <= possible
        owners = {segment.owner for segment in segments}
        promised = max(
            (agreeing(walked, other) for owner, other in self.promised if owner in owners),
            default=0,
        )
        assert self.cache.read_tokens(tokens, segments) <= promised

    @rule(
        pieces=pieces, length=lengths, segments=segment_lists, other=pieces, stop=st.integers(0, 3)
    )
    def store_in_the_middle_of_a_restore(
        self,
        pieces: list[int],
        length: int,
        segments: tuple[Segment, ...],
        other: list[int],
        stop: int,
    ) -> None:
        tokens = self.tokens(pieces, length)
        restoring = self.cache.restore(self.cache.match(tokens, segments).pieces)
        for count, loaded in enumerate(restoring):
            lease = self.cache.lease()
            lease.advance(prompt(*other))
            lease.promise()
            self.promised.append(("local", steps(prompt(*other), DEFAULT_SEGMENTS)))
            self.stored.append(steps(prompt(*other), DEFAULT_SEGMENTS))
            self.save(lease, 2)
            lease.close()
            self.check_bytes(loaded)
            if count == stop:
                restoring.close()
                break

    def check_bytes(self, loaded: Loaded) -> None:
        for part, view in loaded.parts.items():
            assert bytes(view) == payload(loaded.piece.block.key, part)

    @rule(everything=st.booleans())
    def maintain(self, everything: bool) -> None:
        if everything:
            self.cache.flush()
            assert self.cache.unwritten == 0 or not self.with_disk
        else:
            self.cache.maintain(0)

    @invariant()
    def counts_agree_and_budgets_hold(self) -> None:
        check_consistent(self.cache)


class DiskCacheHistory(CacheHistory):
    @rule(cleanly=st.booleans())
    def restart(self, cleanly: bool) -> None:
        for lease in self.leases:
            lease.close()
        self.leases.clear()
        if cleanly:
            self.cache.close()
        else:
            crash(self.cache)
        self.open()

    @rule(which=st.integers(0, 20), place=st.integers(0, 2**31), how=st.integers(0, 4))
    def damage_a_file(self, which: int, place: int, how: int) -> None:
        files = block_files(self.folder)
        if not files:
            return
        path = files[which % len(files)]
        size = path.stat().st_size
        if how == 0 and size:
            data = bytearray(path.read_bytes())
            data[place % size] ^= 1 + place % 255
            path.write_bytes(data)
        elif how == 1:
            os.truncate(path, place % (size + 1))
        elif how == 2:
            os.truncate(path, size + 1 + place % 10)
        elif how == 3:
            path.unlink()
        else:
            other = files[place % len(files)]
            if other != path:
                path.write_bytes(other.read_bytes())

    @rule(place=st.integers(0, 2**31), delete=st.booleans())
    def crash_and_lose_the_index(self, place: int, delete: bool) -> None:
        for lease in self.leases:
            lease.close()
        self.leases.clear()
        crash(self.cache)
        (index,) = self.folder.glob("*/index.sqlite")
        if delete:
            index.unlink()
        else:
            data = np.fromfile(index, dtype=np.uint8)
            data[place % len(data)] ^= 0x55
            data.tofile(index)
        self.open()

    @rule()
    def time_passes(self) -> None:
        self.clock.advance(RETRY_SECONDS)


class MemoryCacheHistory(CacheHistory):
    with_disk = False


histories = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestDiskCacheHistory = DiskCacheHistory.TestCase
TestDiskCacheHistory.settings = histories
TestMemoryCacheHistory = MemoryCacheHistory.TestCase
TestMemoryCacheHistory.settings = histories
