"""The reference engine: one request at a time, and everything it has computed is cached."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from anaphora.cache.keys import BlockId, Tokens
from anaphora.cache.store import CacheStats, Lease, Piece, PrefixCache
from anaphora.engine.constraint import Constraint, Constraints
from anaphora.engine.logprobs import Logprobs
from anaphora.engine.protocol import (
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
from anaphora.engine.reference.loader import ReferenceModel
from anaphora.engine.reference.model import Floats
from anaphora.engine.reference.sampler import Sampler
from anaphora.engine.text import TextStream
from anaphora.errors import AnaphoraError, GrammarError, PromptError, PromptTooLongError
from anaphora.profiles import Local
from anaphora.profiles.decision import Decision
from anaphora.vocabulary import Vocabulary

CHUNK = 256
"""Tokens computed at once. Chunks end at multiples of it, whatever the cache already has: a matrix
product's low bits depend on its shape, so a hit at such a multiple equals a cold run bit for bit.
"""

_MAINTENANCE = 0.05
"""Seconds of cache maintenance in one idle step."""


_PHASES = ("queued", "restore", "prefill", "first_token", "decode")


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request on its way: its tokens, and how many of them the cells hold."""

    request: Request
    tokens: list[int]
    """The prompt and what has been generated."""
    sampler: Sampler
    text: TextStream
    submitted: float
    logprobs: Logprobs | None = None
    """``None``: nobody asks for them."""
    constraint: Constraint | None = None
    computed: int = 0
    """Tokens whose keys and values are in the cells: the first so many."""
    decoded_from: int | None = None
    """The first of them that came from a decode step; the later ones build on it."""
    lease: Lease | None = None
    started: bool = False
    decision: Decision = field(default_factory=lambda: Decision(0, 0.0))
    prompt_computed: int = 0
    prompt_logits: Floats | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PHASES, 0.0))

    @property
    def prompt_length(self) -> int:
        return len(self.request.tokens)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def held(self) -> Tokens:
        """The tokens in the cells."""
        return np.array(self.tokens[: self.computed], np.int32)


class ReferenceEngine:
    """Implements :class:`anaphora.engine.protocol.Engine`.

    There are cells for one sequence. After its answer they stay as they are until the next
    request starts; what is not in the cache yet is stored before that, at leisure when idle.
    """

    def __init__(
        self,
        model: ReferenceModel,
        emit: Emit,
        cache: PrefixCache | None = None,
        *,
        block_size: int = 256,
        context_size: int | None = None,
    ) -> None:
        """``cache`` must be made for ``root_key(model.identity)``; the engine closes it.

        ``block_size`` is the cache's, in tokens, and ``context_size`` what the model was trained
        for by default.
        """
        self._model = model
        self._transformer = model.transformer
        self._emit = emit
        self._cache = cache
        self._block_size = block_size
        self._context_size = context_size or self._transformer.shape.context_size
        self._cells = self._transformer.new_cache(self._context_size)
        self._constraints = Constraints(model.vocabulary)
        self._waiting: deque[_Sequence] = deque()
        self._background: deque[_Sequence] = deque()
        self._running: _Sequence | None = None
        self._resident: _Sequence | None = None
        self._unsaved: deque[BlockId] = deque()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            name="reference",
            model=self._model.name,
            kind="attention",
            caching=self._cache is not None,
            context_size=self._context_size,
            cells=self._context_size,
            bytes_per_token=self._transformer.shape.kv_bytes_per_token,
        )

    @property
    def vocabulary(self) -> Vocabulary:
        return self._model.vocabulary

    def submit(self, request: Request) -> None:
        constraint = None
        error = self._refusal(request)
        if error is None and request.grammar is not None:
            try:
                constraint = self._constraints.begin(request.grammar)
            except GrammarError as wrong:
                error = wrong
        if error is not None:
            self._emit(Failed(request.id, error))
            return
        sequence = _Sequence(
            request=request,
            tokens=request.tokens.tolist(),
            sampler=Sampler(request.sampling, constraint),
            text=TextStream(request.sampling.stop),
            submitted=time.perf_counter(),
            logprobs=None if request.logprobs is None else Logprobs(request.logprobs),
            constraint=constraint,
        )
        (self._background if request.background else self._waiting).append(sequence)

    def cancel(self, request_id: str) -> None:
        for queue in (self._waiting, self._background):
            for sequence in [s for s in queue if s.request.id == request_id]:
                queue.remove(sequence)
                self._finish(sequence, "cancelled")
        if self._running is not None and self._running.request.id == request_id:
            self._finish(self._running, "cancelled")

    def step(self) -> float | None:
        running = self._running
        if running is None:
            return self._start_next()
        if running.request.background and self._waiting:
            self._park(running)
        else:
            self._advance(running)
        return 0.0

    def stats(self) -> CacheStats | None:
        return None if self._cache is None else self._cache.stats()

    def close(self) -> None:
        for sequence in [self._running, *self._waiting, *self._background]:
            if sequence is not None:
                self.cancel(sequence.request.id)
        self._vacate()
        if self._cache is not None:
            self._cache.close()

    def _refusal(self, request: Request) -> AnaphoraError | None:
        size = self._model.vocabulary.size
        if len(request.tokens) == 0:
            return PromptError("the prompt is empty: give at least one token")
        if request.max_tokens < 0:
            return PromptError(f"max_tokens is {request.max_tokens}: use 0 or more")
        if request.tokens.min() < 0 or request.tokens.max() >= size:
            return PromptError(f"the prompt has tokens outside the vocabulary of {size}")
        if any(not 0 <= token < size for token in request.sampling.logit_bias):
            return PromptError(f"logit_bias has tokens outside the vocabulary of {size}")
        if len(request.tokens) > self._context_size:
            return PromptTooLongError(len(request.tokens), self._context_size)
        return None

    # A request's way: start, advance until it is done, finish.

    def _start_next(self) -> float | None:
        queue = self._waiting or self._background
        if not queue:
            return self._idle()
        self._vacate()
        self._running = sequence = queue.popleft()
        waited = time.perf_counter() - sequence.submitted
        with sequence.timed("restore"):
            found = self._restore(sequence)
        if not sequence.started:  # and not only coming back from being parked
            sequence.started = True
            sequence.seconds["queued"] = waited
            self._emit_started(sequence, found)
        return 0.0

    def _restore(self, sequence: _Sequence) -> Found:
        """Fill the cells with what the cache has of the sequence, except for its last token."""
        hints, cache = sequence.request.cache, self._cache
        sequence.computed, sequence.decoded_from = 0, None
        found = {"memory": 0, "disk": 0, "decoded": 0}
        if cache is not None and hints.read:
            wanted = np.array(sequence.tokens[:-1], np.int32)
            for loaded in cache.restore(cache.match(wanted, hints.segments).pieces):
                piece = loaded.piece
                self._import(piece, loaded.parts)
                sequence.computed += piece.length
                found[loaded.tier] += piece.length
                decoded_from = piece.block.decoded_from
                if decoded_from is not None and decoded_from < sequence.computed:
                    if sequence.decoded_from is None:
                        sequence.decoded_from = decoded_from
                    found["decoded"] += sequence.computed - max(decoded_from, piece.block.start)
        if cache is not None and hints.write:
            sequence.lease = cache.lease(hints.segments)
            sequence.lease.advance(sequence.held(), sequence.decoded_from)
        return Found(**found)

    def _advance(self, sequence: _Sequence) -> None:
        """Compute the next chunk of what is not in the cells; once all is, choose a token.

        A decode step is nothing but a chunk of the one token chosen last.
        """
        start, all_tokens = sequence.computed, len(sequence.tokens)
        end = min(all_tokens, start - start % CHUNK + CHUNK)
        in_prompt = max(0, min(end, sequence.prompt_length) - start)
        phase = "prefill" if in_prompt else "decode"
        with sequence.timed(phase):
            chunk = np.array(sequence.tokens[start:end], np.int32)
            vectors = self._transformer.forward(chunk, start, self._cells)
        sequence.computed = end
        sequence.prompt_computed += in_prompt
        if in_prompt == 0 and end == start + 1 and sequence.decoded_from is None:
            sequence.decoded_from = start
        if end < all_tokens:
            if sequence.lease is not None:
                sequence.lease.advance(sequence.held(), sequence.decoded_from)
            return
        with sequence.timed(phase):
            logits = self._transformer.logits(vectors[-1])
            if sequence.generated == 0:
                if sequence.request.want_logits:
                    sequence.prompt_logits = logits
                self._promise(sequence, sequence.computed)
                if sequence.lease is not None:
                    profile = sequence.request.cache.profile
                    sequence.lease.write(profile.name, sequence.decision)
        if sequence.request.max_tokens == 0:
            self._finish(sequence, "length")
            return
        try:
            with sequence.timed(phase):
                token = sequence.sampler.sample(logits, sequence.tokens)
        except GrammarError as error:
            self._release(sequence)
            self._emit(Failed(sequence.request.id, error))
        else:
            self._answer(sequence, token, logits)

    def _answer(self, sequence: _Sequence, token: int, logits: Floats) -> None:
        """``token`` was chosen by ``logits``: make it part of the answer, or end the answer."""
        request = sequence.request
        if token in self._model.vocabulary.end_of_generation:
            self._finish(sequence, "end")
            return
        sequence.tokens.append(token)
        if sequence.generated == 1:
            sequence.seconds["first_token"] = time.perf_counter() - sequence.submitted
        piece = request.shown.get(token, self._model.vocabulary.piece(token))
        if sequence.logprobs is not None:
            sequence.logprobs.add(token, piece, logits)
        self._report(sequence, (token,), sequence.text.feed(piece))
        if sequence.text.stopped is not None:
            self._finish(sequence, "stop")
        elif sequence.constraint is not None and sequence.constraint.complete:
            self._finish(sequence, "end")
        elif sequence.generated == request.max_tokens or len(sequence.tokens) > self._context_size:
            self._finish(sequence, "length")

    def _finish(self, sequence: _Sequence, reason: FinishReason) -> None:
        if sequence is self._running:
            self._release(sequence)
        self._report(sequence, (), sequence.text.finish(), over=reason != "stop")
        self._emit_done(sequence, reason)

    def _park(self, sequence: _Sequence) -> None:
        """Give the cells to a request that matters more, and be the first to come back."""
        self._release(sequence)
        self._background.appendleft(sequence)

    def _release(self, sequence: _Sequence) -> None:
        """Stop running; the cells still hold what was computed, until they are wanted."""
        done = sequence.computed
        if done < sequence.prompt_length:
            done -= done % self._block_size  # only finished blocks of an unfinished prompt
        self._promise(sequence, done)
        self._running, self._resident = None, sequence
        if sequence.lease is not None:
            self._unsaved.extend(sequence.lease.unsaved())

    # Between the cells and the cache.

    def _promise(self, sequence: _Sequence, length: int) -> None:
        if sequence.lease is not None:
            sequence.lease.advance(sequence.held()[:length], sequence.decoded_from)
            profile = sequence.request.cache.profile
            if isinstance(profile, Local):
                sequence.lease.promise(profile.lifetime)

    def _idle(self) -> float | None:
        """Store a block, or let the cache do its own work."""
        if self._unsaved:
            self._save(self._unsaved.popleft())
            return 0.0
        if self._cache is not None and self._cache.maintain(_MAINTENANCE):
            return 0.0
        return None

    def _vacate(self) -> None:
        """The cells are wanted: store what is not stored yet."""
        while self._unsaved:
            self._save(self._unsaved.popleft())
        if self._resident is not None and self._resident.lease is not None:
            self._resident.lease.close()
        self._resident = None

    def _save(self, block: BlockId) -> None:
        assert self._cache is not None
        assert self._resident is not None

        def export(parts: Mapping[str, memoryview]) -> bool:
            cells = self._part(parts["base"], len(block))
            cells[:] = self._cells[:, :, block.start : block.end]
            return True

        size = len(block) * self._transformer.shape.kv_bytes_per_token
        decoded_from = self._resident.decoded_from
        if decoded_from is not None and decoded_from >= block.end:
            decoded_from = None
        self._cache.store(block, {"base": size}, export, decoded_from=decoded_from)

    def _import(self, piece: Piece, parts: Mapping[str, memoryview]) -> None:
        """Copy the first ``piece.length`` tokens of a block into its cells."""
        block = piece.block
        cells = self._part(parts["base"], len(block))[:, :, : piece.length]
        self._cells[:, :, block.start : block.start + piece.length] = cells

    def _part(self, data: memoryview, tokens: int) -> NDArray[np.float32]:
        """A block's one part: keys and values of all layers, laid out as the cells are."""
        layout = (*self._cells.shape[:2], tokens, *self._cells.shape[3:])
        return np.frombuffer(data, np.float32).reshape(layout)

    # Events.

    def _report(
        self, sequence: _Sequence, tokens: tuple[int, ...], text: str, *, over: bool = False
    ) -> None:
        """``over``: the answer ends here, and not with a stop text."""
        told = () if sequence.logprobs is None else sequence.logprobs.tell(len(text), over=over)
        if tokens or text or told:
            self._emit(Generated(sequence.request.id, tokens, text, told))

    def _emit_started(self, sequence: _Sequence, found: Found) -> None:
        request, hints = sequence.request, sequence.request.cache
        if self._cache is not None:
            sequence.decision = self._cache.begin(
                request.tokens,
                hints.segments,
                hints.profile,
                request.outline,
                read=hints.read,
                write=hints.write,
            )
        decided = sequence.decision
        counts = (decided.read, decided.written, decided.unread)
        self._emit(Started(request.id, found, len(request.tokens), *counts))

    def _emit_done(self, sequence: _Sequence, reason: FinishReason) -> None:
        total = time.perf_counter() - sequence.submitted
        self._emit(
            Done(
                id=sequence.request.id,
                reason=reason,
                stop_text=sequence.text.stopped,
                prompt_tokens=sequence.prompt_length,
                computed_tokens=sequence.prompt_computed,
                generated_tokens=sequence.generated,
                times=Times(**sequence.seconds, total=total),
                prompt_logits=sequence.prompt_logits,
            )
        )
