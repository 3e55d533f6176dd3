"""What is kept of requests: rows of the ledger, and prompts to explain misses with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Semaphore

from anaphora.api.generation import Prepared
from anaphora.diagnose.explain import Explanation
from anaphora.diagnose.memory import PromptMemory
from anaphora.diagnose.prompts import Decision, Remembered
from anaphora.engine.protocol import Done, Request, Started, Times
from anaphora.errors import EngineError
from anaphora.keys import Tenant
from anaphora.profiles import Local, OpenAI, Profile
from anaphora.profiles.outline import Boundary, Outline
from anaphora.usage.ledger import Ledger
from anaphora.usage.prices import PriceTable
from anaphora.usage.record import Api, Record, TokenCounts
from anaphora.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

ID_PREFIXES: Mapping[Api, str] = {
    "chat": "chatcmpl-",
    "completions": "cmpl-",
    "messages": "msg_",
    "responses": "resp_",
}
"""How the id of an answer begins. What follows is the request's own, the same as in the header
``request-id``."""
_SHORTER = {"prompt_cache_key": "cache_key"}
_WORTH_EXPLAINING = 128
"""Tokens not read from which on the ledger asks why."""
_MOST_UNEXPLAINED = 1000
"""Rows that may wait for that; further ones are written without."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose request it is, and how it came."""

    id: str
    """The id of its answer."""
    tenant: Tenant
    api: Api
    streamed: bool
    time: float
    """When it arrived, in seconds since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request that reached the engine."""

    request: Request
    model: str
    """What the API calls it."""
    started: Started | None
    """``None``: it ended before its prompt was begun with."""
    done: Done | None
    """``None``: it failed."""
    generated: int
    """Tokens of the answer as far as it came."""
    seconds: float
    """From its submission to its end."""


class Books:
    """Keeps what the operator wants to be kept. Nothing here is waited for.

    :param ledger: ``None``: no rows are written.
    :param prices: what the tokens cost.
    :param memory: the latest prompts of each tenant.
    """

    def __init__(
        self,
        ledger: Ledger | None = None,
        prices: PriceTable | None = None,
        memory: PromptMemory | None = None,
    ) -> None:
        self._ledger = ledger
        self._prices = prices or PriceTable()
        self._memory = memory or PromptMemory()
        self._explaining = ThreadPoolExecutor(1, thread_name_prefix="miss causes")
        self._unexplained = Semaphore(_MOST_UNEXPLAINED)

    def begin(self, origin: Origin, prepared: Prepared, model: str, started: Started) -> None:
        """Remember the prompt of a request whose prefix is restored.

        :param model: what the API calls it.
        """
        request, hints = prepared.request, prepared.request.cache
        match = {"model": model, "profile": hints.profile.name}
        decision = Decision(started.read_tokens, reused=started.found.total, unread=started.unread)
        if not isinstance(hints.profile, Local):
            ends = _breakpoints(hints.profile, hints.outline)
            positions = tuple(sorted({end.position for end in ends}))
            decision = replace(decision, breakpoints=positions, minimum=hints.profile.minimum)
            # Breakpoints of one protocol are never found by another.
            match["protocol"] = "messages" if origin.api == "messages" else "openai"
            given = prepared.generation.conditions.items()
            match |= {_SHORTER.get(name, name): str(value) for name, value in given}
        prompt = Remembered(
            origin.id,
            origin.time,
            request.tokens,
            prepared.spans,
            match,
            decision,
            prepared.generation.rules,
        )
        self._memory.remember(origin.tenant, model, prompt)

    def end(self, origin: Origin, outcome: Outcome, vocabulary: Vocabulary) -> None:
        """Write the row of a request that is over."""
        if self._ledger is None:
            return
        record = self._record(origin, outcome)
        worth = record.tokens.prompt - record.tokens.read >= _WORTH_EXPLAINING
        if worth and self._unexplained.acquire(blocking=False):
            self._explaining.submit(
                self._add_explained, self._ledger, record, origin.tenant, vocabulary
            )
        else:
            self._ledger.add(record)

    def lost_rows(self) -> Mapping[str, int]:
        """How many rows could not be written so far, by tenant."""
        return self._ledger.stats().lost if self._ledger is not None else {}

    def explain(
        self, tenant: Tenant, model: str, request_id: str, vocabulary: Vocabulary
    ) -> Explanation | None:
        """Why a request of ``tenant`` to ``model`` read no more than it did.

        ``None`` where it isn't remembered, or is somebody else's.

        :param request_id: the id of the answer, or that of the header ``request-id``.
        """
        kind, _, own = request_id.partition("_")
        ids = [request_id]
        if kind == "req":
            ids = [prefix + own for prefix in ID_PREFIXES.values()]
        found = (self._memory.explain(tenant, model, one, vocabulary) for one in ids)
        return next((one for one in found if one is not None), None)

    def close(self) -> None:
        """Return when everything is written."""
        self._explaining.shutdown()
        if self._ledger is not None:
            self._ledger.close()

    def _record(self, origin: Origin, outcome: Outcome) -> Record:
        started, done = outcome.started, outcome.done
        profile = outcome.request.cache.profile.name
        tokens = TokenCounts()
        if started is not None:
            tokens = TokenCounts(
                started.prompt_tokens,
                started.read_tokens,
                started.written_by_lifetime,
                done.computed_tokens if done else 0,
                done.generated_tokens if done else outcome.generated,
            )
        times = done.times if done else Times(total=outcome.seconds)
        return Record(
            id=origin.id,
            time=origin.time,
            tenant=origin.tenant.name,
            model=outcome.model,
            api=origin.api,
            profile=profile,
            streamed=origin.streamed,
            tokens=tokens,
            queued=times.queued,
            first_token=times.first_token,
            total=times.total,
            finish=done.reason if done else "failed",
            cost=self._prices.cost(origin.tenant.name, outcome.model, tokens),
        )

    def _add_explained(
        self, ledger: Ledger, record: Record, tenant: Tenant, vocabulary: Vocabulary
    ) -> None:
        self._unexplained.release()
        found = None
        try:
            found = self._memory.explain(tenant, record.model, record.id, vocabulary)
        except EngineError:  # the model is closed: nobody can read its tokens any more
            pass
        except Exception:  # the row matters more
            logger.exception("why %s was a miss can't be told", record.id)
        miss = found.cause if found is not None and found.cause != "nothing_missed" else None
        ledger.add(replace(record, miss=miss))


def _breakpoints(profile: Profile, outline: Outline) -> list[Boundary]:
    """The boundaries that are written, the one of OpenAI's own last."""
    marked = [boundary for boundary in outline.boundaries if boundary.mark]
    if not isinstance(profile, OpenAI) or outline.implicit is None:
        return marked
    ends = [boundary for boundary in outline.boundaries if boundary.kind != "block"]
    return marked + ends[-1:]
