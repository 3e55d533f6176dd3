"""The llama.cpp engine: one owner of one context, serving many requests from it.

Every :meth:`LlamaEngine.step` does one piece of work: begin what can begin, one prefill chunk, one
decode step for everything that generates, or, with nothing of that to do, one piece of idle work
(export finished blocks, background requests, writes to disk).

A prompt's prefix is looked for in live cells first (sharing them is free), then in the memory and
disk tiers. A finished sequence stays live until its cells are wanted: by space, or because idle
cells slow down the running ones.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from anaphora.cache.index import common_prefix
from anaphora.cache.keys import BlockId, Tokens
from anaphora.cache.store import CacheStats, Piece, PrefixCache
from anaphora.clock import Clock
from anaphora.engine.constraint import Constraint, Constraints
from anaphora.engine.llamacpp.context import GRID, LlamaContext, NoCells
from anaphora.engine.llamacpp.sampler import Sampler
from anaphora.engine.llamacpp.sequences import (
    LiveSequence,
    LiveSequences,
    common_segments,
)
from anaphora.engine.logprobs import Logprobs
from anaphora.engine.protocol import (
    CacheHints,
    Done,
    Emit,
    EngineInfo,
    Failed,
    FinishReason,
    Found,
    Generated,
    Request,
    Started,
    Times,
)
from anaphora.engine.text import TextStream
from anaphora.errors import (
    AnaphoraError,
    EngineError,
    GrammarError,
    PromptError,
    PromptTooLongError,
)
from anaphora.profiles import Local
from anaphora.profiles.decision import Decision
from anaphora.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

_CHUNK_SECONDS_ALONE = 1.5
_CHUNK_SECONDS_SHARED = 0.15
_GROWTH = 256
_WRITE_AFTER_IDLE = 1.0
_WRITE_SLICE = 0.02
_RETRY_WRITES = 30.0
_BUSY_SHARE = 0.05
_BUSY_SLICE = 0.25
_MOST_BACKGROUND = 64
"""Background requests that may wait; older ones are the least likely to be of use still."""


@dataclass(slots=True, eq=False)
class _Job:
    """A request on its way."""

    request: Request
    stream: TextStream
    submitted: float
    order: int
    constraint: Constraint | None = None
    live: LiveSequence | None = None
    sampler: Sampler | None = None
    logprobs: Logprobs | None = None
    """``None``: nobody asks for them."""
    generated: list[int] = field(default_factory=list)
    reserved: int = 0
    """Length up to which cells are set aside."""
    target: Tokens = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """What has to be in cells before (more) tokens can be generated."""
    decoding: bool = False
    looked_up: bool = False
    started: bool = False
    decision: Decision = field(default_factory=lambda: Decision(0, 0.0))
    computed: int = 0
    began: float = 0.0
    restore_seconds: float = 0.0
    prefill_seconds: float = 0.0
    first_token: float = 0.0
    decode_seconds: float = 0.0
    logits: NDArray[np.float32] | None = None

    @property
    def owed(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_tokens - len(self.generated)


@dataclass(slots=True)
class _Plan:
    """Where the prefix of a job comes from: ``shared`` tokens of a live sequence, then blocks."""

    source: LiveSequence | None
    shared: int
    pieces: Sequence[Piece]
    found: int
    compact: bool = False
    """Start over in an empty context rather than go on above cells nobody uses."""


_NOTHING = _Plan(None, 0, (), 0)


class LlamaEngine:
    """Implements :class:`anaphora.engine.protocol.Engine` on a llama.cpp context."""

    def __init__(
        self,
        info: EngineInfo,
        vocabulary: Vocabulary,
        context: LlamaContext,
        cache: PrefixCache,
        emit: Emit,
        clock: Clock,
        *,
        parallel: int,
        sequences: int,
        reserve_tokens: int,
        block_size: int,
        exact: bool,
        flash_attn: bool,
        on_close: Callable[[], None],
    ) -> None:
        self._info = info
        self._vocabulary = vocabulary
        self._context = context
        self._cache = cache
        self._emit = emit
        self._clock = clock
        self._parallel = parallel if info.caching and not exact else 1
        self._reserve_tokens = reserve_tokens
        self._block_size = block_size
        self._exact = exact
        self._masked_cells_cost = not flash_attn
        self._on_close = on_close

        self._sequences = LiveSequences(context, cache, sequences, exact=exact)
        self._cells = self._sequences.cells
        self._constraints = Constraints(vocabulary)
        self._waiting: deque[_Job] = deque()
        self._background: deque[_Job] = deque()
        self._active: list[_Job] = []
        self._turn = 0
        self._order = 0
        self._prefill_rate = 0.0
        self._idle_since: float | None = None
        self._at_rest = False
        """Nothing has changed since everything was written."""
        self._finished = False
        """A request has ended since something was last written."""
        self._saved_at = time.perf_counter()
        self._unsaved: list[tuple[LiveSequence, BlockId]] | None = None
        """What idle time has yet to export; ``None``: to be looked up."""

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def cache(self) -> PrefixCache:
        return self._cache

    @property
    def context(self) -> LlamaContext:
        """For measuring beside the engine, while it is idle and has no sequences."""
        return self._context

    # Messages

    def submit(self, request: Request) -> None:
        try:
            self._check(request)
            grammar = request.grammar
            constraint = None if grammar is None else self._constraints.begin(grammar)
        except AnaphoraError as error:
            self._emit(Failed(request.id, error))
            return
        # A copy: if the caller changed the array later, keys and KV would not belong together.
        request = replace(request, tokens=np.array(request.tokens, dtype=np.int32))
        self._order += 1
        stream = TextStream(request.sampling.stop)
        job = _Job(request, stream, time.perf_counter(), self._order, constraint)
        job.target = request.tokens
        if request.logprobs is not None:
            job.logprobs = Logprobs(request.logprobs)
        if request.background:
            self._background.append(job)
            if len(self._background) > _MOST_BACKGROUND:
                self._finish(self._background.popleft(), "cancelled")
        else:
            self._waiting.append(job)

    def cancel(self, request_id: str) -> None:
        for queue in (self._waiting, self._background):
            for job in queue:
                if job.request.id == request_id:
                    queue.remove(job)
                    self._finish(job, "cancelled")
                    return
        for job in self._active:
            if job.request.id == request_id:
                self._finish(job, "cancelled")
                return

    def _check(self, request: Request) -> None:
        tokens = request.tokens
        if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
            raise PromptError("the prompt is no plain list of token ids")
        if len(tokens) == 0:
            raise PromptError("the prompt is empty: give at least one token")
        if request.max_tokens < 0:
            raise PromptError(f"max_tokens is {request.max_tokens}: use 0 or more")
        size = self._vocabulary.size
        if int(tokens.min()) < 0 or int(tokens.max()) >= size:
            raise PromptError(f"the prompt has token ids outside of 0 to {size - 1}")
        if len(tokens) > self._info.context_size:
            raise PromptTooLongError(len(tokens), self._info.context_size)
        for token in request.sampling.logit_bias:
            if not 0 <= token < size:
                raise PromptError(f"logit_bias names token {token}, outside of 0 to {size - 1}")

    # Work

    def step(self) -> float | None:
        self._admit()
        foreground = [job for job in self._active if not job.request.background]
        if not foreground:
            return self._idle()
        self._idle_since = self._unsaved = None
        self._advance(foreground)
        if self._finished and (self._active or self._waiting):
            self._save_while_busy()
        self._finished = False
        return 0.0

    def _save_while_busy(self) -> None:
        """After a request, give a twentieth of the time since the last one to saving.

        So not everything hangs on the next pause of an engine that is never idle. Tails wait for
        it: the next turn replaces most of them. One block is written in any case, what was used
        a second time first.
        """
        now = time.perf_counter()
        deadline = now + min((now - self._saved_at) * _BUSY_SHARE, _BUSY_SLICE)
        self._saved_at = now
        for live, block in self._sequences.unsaved():
            if time.perf_counter() >= deadline:
                break
            if block.end % self._block_size == 0:
                self._sequences.export(live, block)
        self._cache.maintain(max(0.0, deadline - time.perf_counter()))

    def _advance(self, jobs: list[_Job]) -> None:
        """One prefill chunk for one of ``jobs``, then one token for all that generate."""
        prefilling = [job for job in jobs if not job.decoding]
        if prefilling:
            self._turn += 1
            self._guard(self._prefill, [prefilling[self._turn % len(prefilling)]])
        decoding = [job for job in jobs if job.decoding and job in self._active]
        if decoding:
            self._guard(self._decode, decoding)

    def release_idle(self) -> None:
        """Save and drop every sequence that no request uses."""
        for live in self._sequences.idle():
            self._let_go(live)

    def stats(self) -> CacheStats:
        return self._cache.stats()

    def close(self) -> None:
        with ExitStack() as stack:  # whatever fails, the rest is freed
            stack.callback(self._on_close)
            stack.callback(self._context.close)
            stack.callback(self._cache.close)
            for job in [*self._waiting, *self._background, *self._active]:
                self.cancel(job.request.id)
            self.release_idle()

    def _guard(self, work: Callable[[list[_Job]], None], jobs: list[_Job]) -> None:
        """Do ``work``; where it fails, only its jobs do, and their cells are cleared."""
        try:
            work(jobs)
        except AnaphoraError as error:
            logger.error("%s", error)
            for job in jobs:
                if job in self._active:
                    self._fail(job, error)

    # Beginning

    def _admit(self) -> None:
        for job in list(self._waiting):
            if len(self._active) >= self._parallel and not self._yield_background():
                return
            if self._shares_a_running_prefill(job):
                continue
            while not self._begin(job):
                if not self._yield_background():
                    return
            self._waiting.remove(job)

    def _yield_background(self) -> bool:
        """Put one running background job back into its queue, to make a place."""
        for job in self._active:
            if job.request.background:
                self._suspend(job)
                self._background.appendleft(job)
                return True
        return False

    def _shares_a_running_prefill(self, job: _Job) -> bool:
        """Whether another request is about to compute more of this prompt than is there now."""
        if not job.request.cache.read:
            return False
        wanted = 0
        for other in self._active:
            live = other.live
            if live is None or not live.kept or other.decoding or other.request.background:
                continue
            limit = common_segments(job.request.cache.segments, live.segments)
            common = min(common_prefix(job.target, other.target), limit)
            if common > live.length:
                wanted = max(wanted, common)
        return wanted > GRID and wanted - self._plan(job).found >= GRID

    def _plan(self, job: _Job, *, record: bool = False) -> _Plan:
        hints, tokens = job.request.cache, job.target
        # The last prompt token's logits are needed, so it is always computed; a job that goes on
        # after it was parked already has its next token.
        limit = len(tokens) if job.generated else len(tokens) - 1
        limit = limit // self._sequences.grid * self._sequences.grid
        if not hints.read or not self._info.caching:
            return _NOTHING
        source, shared = self._sequences.best(tokens, hints.segments, limit)
        match = self._cache.match(tokens, hints.segments, record=record)
        stored = self._usable_length(match.pieces, limit)
        pieces = [piece for piece in match.pieces if piece.block.start < stored]
        if self._can_compact(source, shared, stored):
            return _Plan(None, 0, pieces, stored, compact=True)
        if shared >= stored:
            return _Plan(source, shared, (), shared)
        first = next(i for i, p in enumerate(pieces) if p.block.start + p.length > shared)
        if self._exact:
            # A block restored in part leaves a gap among the cells, which shows in the low bits.
            while pieces[first].block.start % GRID:
                first -= 1
            shared = min(shared, pieces[first].block.start)
        return _Plan(source if shared else None, shared, pieces[first:], stored)

    def _usable_length(self, pieces: Sequence[Piece], limit: int) -> int:
        """How much of a match can be restored: with plain attention, up to any token of it."""
        usable, grid = 0, self._sequences.grid
        for piece in pieces:
            usable = piece.block.start + piece.length
            if self._exact and not piece.block.exact:
                # Its last tokens, behind the grid's last line, were computed on their own.
                usable = min(usable, piece.block.end // grid * grid)
                break
        return min(usable, limit) // grid * grid

    def _can_compact(self, source: LiveSequence | None, shared: int, stored: int) -> bool:
        """Whether to leave ``source`` where it is and restore everything from blocks instead.

        Without flash attention a step looks at every cell up to the highest one in use, so a
        sequence that sits above cells nobody uses pays for them with every token.
        """
        if source is None or not self._masked_cells_cost or self._active or stored < shared:
            return False
        return self._cells.top - self._cells.length(source.number) > max(512, shared // 4)

    def _begin(self, job: _Job) -> bool:
        """Give ``job`` a sequence with everything that is cached in it; False: not now.

        A job for which this fails fails alone.
        """
        try:
            return self._start(job)
        except AnaphoraError as error:
            logger.error("%s", error)
            self._fail(job, error)
        except Exception:
            logger.exception("a request could not begin")
            self._fail(job, EngineError("the request could not begin: see the log"))
        return True

    def _start(self, job: _Job) -> bool:
        tokens = job.target
        plan = self._plan(job, record=not job.looked_up)
        job.looked_up = True
        end = min(len(tokens) + min(max(job.owed, 0), self._reserve_tokens), self._limit)
        end = max(end, len(tokens))
        self._make_way(plan)
        pieces = plan.pieces
        # llama.cpp takes in whole blocks; what of the last one isn't wanted is cut off again.
        whole = max([end, *(piece.block.end for piece in pieces)])
        if not self._make_place(whole - plan.shared, plan):
            if whole == end or not self._make_place(end - plan.shared, plan):
                return False
            pieces = [piece for piece in pieces if piece.block.end <= end]
        began = time.perf_counter()
        if not job.began:
            job.began = began
        live = job.live = self._take_sequence(job, plan)
        job.reserved = end
        self._sequences.reserve(live, tokens, end)
        memory, disk = self._sequences.restore(live, pieces, plan.found)
        job.restore_seconds += time.perf_counter() - began
        self._active.append(job)
        if not job.started:
            job.started = True
            found = Found(
                plan.shared,
                memory,
                disk,
                max(0, live.length - live.decoded_from) if live.decoded_from is not None else 0,
            )
            self._announce(job, found)
        if job.generated and live.length == len(tokens):
            job.decoding = True
        if job.sampler is None and job.request.max_tokens > 0:
            job.sampler = Sampler(
                job.request.sampling, self._vocabulary.size, tokens, job.constraint
            )
        return True

    def _announce(self, job: _Job, found: Found) -> None:
        request, hints = job.request, job.request.cache
        if self._info.caching:
            job.decision = self._cache.begin(
                request.tokens,
                hints.segments,
                hints.profile,
                request.outline,
                read=hints.read,
                write=hints.write,
            )
        decided = job.decision
        counts = (decided.read, decided.written, decided.unread)
        self._emit(Started(request.id, found, len(request.tokens), *counts))

    @property
    def _limit(self) -> int:
        return min(self._info.context_size, self._cells.size)

    def _make_way(self, plan: _Plan) -> None:
        """Let idle sequences go that would only slow this one down, or could change its logits."""
        others = [live for live in self._sequences.idle() if live is not plan.source]
        if self._exact:
            for live in others:
                self._let_go(live)
        elif self._masked_cells_cost and self._info.caching:
            allowed = 0 if plan.compact else max(512, plan.found // 8)
            spare = sum(self._cells.alone(live.number) for live in others)
            for live in others:
                if spare <= allowed:
                    break
                spare -= self._cells.alone(live.number)
                if self._sequences.save(live):
                    self._sequences.drop(live)

    def _make_place(self, cells: int, plan: _Plan) -> bool:
        """Make sure of ``cells`` cells and a sequence to begin ``plan`` in; False: can't."""
        for live in self._sequences.idle():
            if self._available >= cells and self._sequences.has_free:
                break
            if live is not plan.source:
                self._let_go(live)
        takes_over = plan.source is not None and not plan.source.busy
        if takes_over and plan.source is not None and self._available < cells:
            # Only the source is left: take it over, without its tail.
            self._sequences.save(plan.source)
            self._sequences.cut(plan.source, plan.shared)
        return self._available >= cells and (self._sequences.has_free or takes_over)

    @property
    def _available(self) -> int:
        promised = sum(max(0, job.reserved - job.live.length) for job in self._active if job.live)
        return self._cells.free - promised

    def _take_sequence(self, job: _Job, plan: _Plan) -> LiveSequence:
        """A sequence whose cells hold the first ``plan.shared`` tokens."""
        source, hints = plan.source, job.request.cache
        keeps = hints.write and self._info.caching
        if source is not None and not source.busy:
            whole = source.length == plan.shared and hints.write
            must = self._exact or not self._sequences.has_free
            # Where masked cells cost, and shift kernels, a saved tail is better out of the way.
            wants = self._masked_cells_cost and hints.write
            saved = not whole and (must or wants) and self._sequences.save(source)
            if whole or must or saved:
                if not whole:
                    self._sequences.cut(source, plan.shared)
                self._sequences.take_over(source, hints.segments, kept=keeps)
                return source
        live = self._sequences.open(hints.segments, kept=keeps)
        if source is not None:
            self._sequences.share(source, live, plan.shared)
        return live

    def _let_go(self, live: LiveSequence) -> None:
        self._sequences.save(live)
        self._sequences.drop(live)

    # Computing

    def _prefill(self, jobs: list[_Job]) -> None:
        job = jobs[0]
        live, tokens = job.live, job.target
        assert live is not None
        start, end = live.length, self._chunk_end(job)
        last = end == len(tokens)
        began = time.perf_counter()
        self._cells.append(live.number, end - start)
        self._context.prefill(live.number, tokens[start:end], start, want_logits=last)
        seconds = time.perf_counter() - began
        job.prefill_seconds += seconds
        job.computed += end - start
        live.length = end
        if end - start >= GRID:
            rate = (end - start) / seconds
            self._prefill_rate = rate if not self._prefill_rate else (self._prefill_rate + rate) / 2
        if last:
            self._prompt_done(job)

    def _chunk_end(self, job: _Job) -> int:
        assert job.live is not None
        start, count = job.live.length, len(job.target)
        alone = len(self._active) == 1 and not job.request.background and not self._waiting
        seconds = _CHUNK_SECONDS_ALONE if alone else _CHUNK_SECONDS_SHARED
        micro = self._context.microbatch_size
        size = (
            int(self._prefill_rate * seconds) if self._prefill_rate else (micro if alone else GRID)
        )
        size = min(size, self._context.batch_size)
        if size >= micro:
            size = size // micro * micro
        size = max(size // GRID * GRID, GRID)
        end = (start + size) // GRID * GRID
        if end - start < size // 2:  # up to the next line: a short call costs almost as much
            end += GRID
        if count - end < GRID // 2:
            end = count
            whole = count // GRID * GRID
            if self._exact and start < whole < count:
                end = whole  # the last, partial stretch always has a call of its own
        return min(end, start + self._context.batch_size)

    def _prompt_done(self, job: _Job) -> None:
        live = job.live
        assert live is not None
        if job.request.want_logits and not job.generated:
            job.logits = self._context.logits()
        self._keep_promise(job, live.held)
        if live.kept:
            live.lease.write(job.request.cache.profile.name, job.decision)
        if job.request.max_tokens == 0:
            self._finish(job, "length")
            return
        job.decoding = True
        if not job.generated:
            self._generate(job, -1)

    def _decode(self, jobs: list[_Job]) -> None:
        for job in sorted(jobs, key=lambda job: job.order):
            if job in self._active:  # not parked to make room for an older one
                self._grow(job)
        jobs = [job for job in jobs if job in self._active]
        if not jobs:
            return
        began = time.perf_counter()
        lives = [job.live for job in jobs if job.live is not None]
        tokens = [job.generated[-1] for job in jobs]
        try:
            self._context.decode([x.number for x in lives], tokens, [x.length for x in lives])
        except NoCells:
            self._park(self._last_in_line(jobs))
            return
        for live, token in zip(lives, tokens, strict=True):
            self._sequences.append_decoded(live, token)
        for row, job in enumerate(jobs):
            self._generate(job, row)
        seconds = time.perf_counter() - began
        for job in jobs:
            job.decode_seconds += seconds

    def _grow(self, job: _Job) -> None:
        """Make sure of a cell for the next token of ``job``, or park it."""
        live = job.live
        assert live is not None
        if live.length < job.reserved:
            return
        more = min(_GROWTH, self._limit - live.length, job.owed)
        for idle in self._sequences.idle():
            if self._available >= more:
                break
            self._let_go(idle)
        while self._available <= 0:
            last = self._last_in_line(self._active)
            self._park(last)
            if last is job:
                return
        job.reserved = live.length + min(more, self._available)

    def _last_in_line(self, jobs: list[_Job]) -> _Job:
        """Whose cells the others get when there are too few. Raises where there are no others."""
        if len(self._active) == 1:
            raise EngineError("the context has no cells left for the only running request")
        return max(jobs, key=lambda job: (job.request.background, job.order))

    def _generate(self, job: _Job, row: int) -> None:
        """Choose a token for ``job`` from row ``row`` of the latest logits."""
        assert job.sampler is not None
        try:
            token = job.sampler.sample(self._context.pointer, row)
        except GrammarError as error:  # the others, and what was computed, are none the worse
            self._end(job)
            self._emit(Failed(job.request.id, error))
        else:
            self._accept(job, token, row)

    def _accept(self, job: _Job, token: int, row: int) -> None:
        live = job.live
        assert live is not None
        if not job.first_token:
            job.first_token = time.perf_counter() - job.submitted
        if token in self._vocabulary.end_of_generation:
            self._report(job, (), job.stream.finish(), over=True)
            self._finish(job, "end")
            return
        job.generated.append(token)
        piece = job.request.shown.get(token, self._vocabulary.piece(token))
        if job.logprobs is not None:
            job.logprobs.add(token, piece, self._context.logits(row))
        text = job.stream.feed(piece)
        if job.stream.stopped is not None:
            self._report(job, (token,), text)
            self._finish(job, "stop")
        elif job.constraint is not None and job.constraint.complete:
            self._report(job, (token,), text + job.stream.finish())
            self._finish(job, "end")
        elif job.owed <= 0 or live.length >= self._limit:
            self._report(job, (token,), text + job.stream.finish(), over=True)
            self._finish(job, "length")
        else:
            self._report(job, (token,), text)

    def _report(self, job: _Job, tokens: tuple[int, ...], text: str, *, over: bool = False) -> None:
        """``over``: the answer ends here, and not with a stop text."""
        told = () if job.logprobs is None else job.logprobs.tell(len(text), over=over)
        if tokens or text or told:
            self._emit(Generated(job.request.id, tokens, text, told))

    # Ending

    def _end(self, job: _Job) -> None:
        """Give up a job's place, and keep what was computed for it."""
        live = job.live
        if live is not None:
            self._active.remove(job)
            if job.decoding or live.length >= len(job.request.tokens):
                self._keep_promise(job, live.held)
            else:
                self._keep_promise(job, self._whole_blocks(live))
            self._retire(job, live)
        if job.sampler is not None:
            job.sampler.close()
        self._finished = True

    def _finish(self, job: _Job, reason: FinishReason) -> None:
        self._end(job)
        now = time.perf_counter()
        self._emit(
            Done(
                job.request.id,
                reason,
                job.stream.stopped,
                len(job.request.tokens),
                job.computed,
                len(job.generated),
                Times(
                    queued=(job.began or now) - job.submitted,
                    restore=job.restore_seconds,
                    prefill=job.prefill_seconds,
                    first_token=job.first_token,
                    decode=job.decode_seconds,
                    total=now - job.submitted,
                ),
                job.logits,
            )
        )

    def _fail(self, job: _Job, error: AnaphoraError) -> None:
        if job in self._active:
            self._active.remove(job)
        if job.live is not None:
            self._sequences.drop(job.live)
        if job.sampler is not None:
            job.sampler.close()
        self._emit(Failed(job.request.id, error))

    def _whole_blocks(self, live: LiveSequence) -> Tokens:
        """What an aborted prefill leaves: everything up to its last finished block."""
        return live.tokens[: live.length // self._block_size * self._block_size]

    def _keep_promise(self, job: _Job, tokens: Tokens) -> None:
        live = job.live
        assert live is not None
        if live.kept and not (self._exact and live.decoded_from is not None):
            live.lease.advance(tokens, live.decoded_from)
            profile = job.request.cache.profile
            if isinstance(profile, Local):
                live.lease.promise(profile.lifetime)

    def _retire(self, job: _Job, live: LiveSequence) -> None:
        """A request is done: keep its sequence for the next one, if it may be kept."""
        if live.kept and self._exact and live.decoded_from is not None:
            # Decoded KV differs in low bits from prefilled KV: prefill the answer again.
            answered = live.held.copy()
            self._sequences.cut(live, live.decoded_from)
            self._refill(job.request, answered)
        self._sequences.retire(live)

    def _refill(self, request: Request, tokens: Tokens) -> None:
        self.submit(
            Request(
                f"{request.id}/refill",
                tokens,
                max_tokens=0,
                cache=CacheHints(request.cache.segments, profile=request.cache.profile),
                background=True,
            )
        )

    def _suspend(self, job: _Job) -> None:
        """Take an active job's sequence away, so that it can begin again later."""
        live = job.live
        assert live is not None
        self._active.remove(job)
        job.live, job.decoding = None, False
        job.target = np.append(job.request.tokens, np.array(job.generated[:-1], dtype=np.int32))
        if live.kept and self._exact and live.decoded_from is not None:
            self._sequences.cut(live, live.decoded_from)
        elif live.kept:
            live.declare()
        self._sequences.retire(live)

    def _park(self, job: _Job) -> None:
        """Give a job's cells up, with its blocks kept, and let it go on when there is room."""
        live = job.live
        assert live is not None
        logger.info("no cells left: a request is parked at %d tokens", live.length)
        self._suspend(job)
        if live.kept:
            self._let_go(live)
        (self._background if job.request.background else self._waiting).appendleft(job)

    # Idle work

    def _idle(self) -> float | None:
        """One piece of work that can wait; see :meth:`step` for what is returned."""
        now = self._clock.now()
        if self._idle_since is None or now < self._idle_since:  # the clock may be set back
            self._idle_since, self._at_rest = now, False
        if self._unsaved is None:
            self._unsaved = list(self._sequences.unsaved())
        if self._unsaved:
            live, block = self._unsaved.pop(0)
            self._sequences.export(live, block)
            return 0.0
        if self._active:
            self._advance(self._active[:1])
            self._idle_since = self._unsaved = None
            return 0.0
        if self._background:
            job = self._background.popleft()
            if not self._begin(job):
                self._fail(job, EngineError("no cells are free for a background request"))
            return 0.0
        if self._at_rest:
            return None
        wait = self._idle_since + _WRITE_AFTER_IDLE - now
        if wait > 0:
            return wait
        if self._cache.maintain(_WRITE_SLICE):
            return 0.0
        if self._cache.unwritten:
            return _RETRY_WRITES
        self._at_rest = True
        return None
