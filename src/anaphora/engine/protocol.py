"""Messages between an engine and whoever uses it.

An engine is reached by messages only: :class:`Request` and a cancel go in, :data:`Event` objects
come out. All of them can be pickled, so an engine may live in a thread or in a child process.
Nothing here knows how an engine stores its KV.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from anaphora.cache.keys import DEFAULT_SEGMENTS, Segment, Tokens
from anaphora.cache.store import CacheStats
from anaphora.errors import AnaphoraError, GrammarError, SettingsError
from anaphora.profiles import DEFAULT_PROFILE, Profile
from anaphora.profiles.decision import Lifetime, Unread
from anaphora.profiles.outline import NO_OUTLINE, Outline
from anaphora.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class CacheHints:
    """How the cache may be used for one request."""

    segments: tuple[Segment, ...] = DEFAULT_SEGMENTS
    """In order of position; the last one has ``end=None``."""
    read: bool = True
    write: bool = True
    profile: Profile = DEFAULT_PROFILE
    """Whose rules say what counts as read and written. They change nothing about what is reused."""
    outline: Outline = NO_OUTLINE
    """Where prefixes of this prompt may end."""

    def __post_init__(self) -> None:
        if not isinstance(self.profile, Profile):
            raise SettingsError(f"profile is {self.profile!r}: use Local, Anthropic or OpenAI")
        if not isinstance(self.outline, Outline):
            raise SettingsError(f"outline is {self.outline!r}: use an Outline")
        if not all(isinstance(segment, Segment) for segment in self.segments):
            raise SettingsError("segments have to be a tuple of Segment")
        *ends, last = [segment.end for segment in self.segments] or [0]
        position = 0
        for end in ends:
            position = end if end is not None and end > position else 2**63
        if last is not None or position == 2**63:
            raise SettingsError(
                "segments have to be in order of where they end, the last one with no end"
            )


_MOST_BIAS = 1e30
"""Far above any logit, and no overflow in single precision."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The defaults sample from the model's own distribution."""

    temperature: float = 1.0
    """0 takes the most probable token every time."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    seed: int | None = None
    """``None``: a fresh random seed for every request."""
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_window: int = 64
    """How many of the latest tokens the penalties look at."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they may span tokens and are not part of it."""

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (0.0, 100.0),
            "top_p": (0.0, 1.0),
            "top_k": (0, 2**31 - 1),
            "min_p": (0.0, 1.0),
            "repeat_penalty": (1e-3, 100.0),
            "frequency_penalty": (-100.0, 100.0),
            "presence_penalty": (-100.0, 100.0),
            "penalty_window": (0, 2**20),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not isinstance(value, int | float):
                raise SettingsError(f"{name} is {value!r}: use a number")
            if not low <= value <= high:  # also false for NaN
                raise SettingsError(f"{name} is {value}: use {low:g} to {high:g}")
        for name in ("top_k", "penalty_window", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) and not (name == "seed" and value is None):
                raise SettingsError(f"{name} is {value!r}: use an integer")
        if not isinstance(self.logit_bias, Mapping):
            raise SettingsError(f"logit_bias is {self.logit_bias!r}: use a dict of token ids")
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int):
                raise SettingsError(f"logit_bias names token {token!r}: use token ids")
            if not isinstance(bias, int | float) or not abs(bias) <= _MOST_BIAS:
                raise SettingsError(
                    f"logit_bias of token {token} is {bias}: use {-_MOST_BIAS:g} to {_MOST_BIAS:g}"
                )
        texts = self.stop if isinstance(self.stop, tuple | list) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise SettingsError(f"stop is {self.stop!r}: use a tuple of texts")


GREEDY = Sampling(temperature=0.0)

MOST_CANDIDATES = 20
"""How many of the likeliest tokens can be told beside each: as many as OpenAI's API tells."""


GrammarKind = Literal["json_object", "json_schema", "regex", "lark", "gbnf"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to be: text that is in this grammar from its first byte to its last.

    An answer that is cut off, by ``max_tokens`` or a stop text, is the beginning of such a text.
    """

    kind: GrammarKind
    """``json_object``: any JSON object; ``json_schema``: JSON that fits ``text``, a JSON schema;
    ``regex``: what matches as a whole, in the syntax of Rust's crate ``regex``; ``lark``: Lark as
    llguidance has it; ``gbnf``: the grammars of llama.cpp."""
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            kinds = ", ".join(get_args(GrammarKind))
            raise GrammarError(f"a grammar of the kind {self.kind!r} is unknown: use {kinds}")
        if not isinstance(self.text, str):
            raise GrammarError(f"the text of a grammar is {self.text!r}: use a str")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any]) -> Grammar:
        """JSON that fits ``schema``. Members of objects come in its order.

        Raises :class:`~anaphora.errors.GrammarError` where ``schema`` is no JSON.
        """
        try:
            return cls("json_schema", json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"the JSON schema is no JSON: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Compute ``tokens`` as far as the cache doesn't have them, then generate.

    ``max_tokens`` 0 fills the cache and generates nothing. A ``background`` request runs only
    while nothing else does, and steps aside as soon as something else arrives.
    """

    id: str
    tokens: Tokens
    max_tokens: int
    sampling: Sampling = GREEDY
    cache: CacheHints = CacheHints()
    background: bool = False
    want_logits: bool = False
    """Return the logits after the prompt in :class:`Done` (for self-tests and tests)."""
    grammar: Grammar | None = None
    """What the answer has to be."""
    shown: Mapping[int, bytes] = field(default_factory=dict)
    """Control tokens that are part of the answer's text, and what they are in it. All others are
    no text."""
    logprobs: int | None = None
    """Tell how likely each token was, and so many of the likeliest ones; ``None``: don't."""

    def __post_init__(self) -> None:
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int):
            raise SettingsError(f"max_tokens is {self.max_tokens!r}: use an integer")
        if not isinstance(self.sampling, Sampling):
            raise SettingsError(f"sampling is {self.sampling!r}: use a Sampling")
        if not isinstance(self.cache, CacheHints):
            raise SettingsError(f"cache is {self.cache!r}: use a CacheHints")
        if not isinstance(self.grammar, Grammar | None):
            raise SettingsError(f"grammar is {self.grammar!r}: use a Grammar")
        if self.logprobs is not None and (
            type(self.logprobs) is not int or not 0 <= self.logprobs <= MOST_CANDIDATES
        ):
            raise SettingsError(f"logprobs is {self.logprobs!r}: use 0 to {MOST_CANDIDATES}")

    @property
    def outline(self) -> Outline:
        """Where the prompt's prefixes may end. Nobody asks for a background request: it has no
        breakpoints, reads nothing for anybody, and its tokens need not be those outlined."""
        return NO_OUTLINE if self.background else self.cache.outline


@dataclass(frozen=True, slots=True)
class Found:
    """Where the reused prefix of the prompt lay, in tokens. The parts add up to what was reused."""

    live: int = 0
    memory: int = 0
    disk: int = 0
    decoded: int = 0
    """How many of the reused tokens' KV came from decode steps rather than from a prefill."""

    @property
    def total(self) -> int:
        return self.live + self.memory + self.disk


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    """The prompt's cached prefix is restored and verified; the rest is about to be computed."""

    id: str
    found: Found
    prompt_tokens: int
    read_tokens: int
    """What counts as read from the cache, decided by entries."""
    written_by_lifetime: Mapping[Lifetime, int]
    """What counts as newly written to it; without zeros."""
    unread: Mapping[Unread, int] = field(default_factory=dict)
    """How far (tokens) entries would have reached beyond what is read, by why they don't."""

    @property
    def written_tokens(self) -> int:
        return sum(self.written_by_lifetime.values())

    @property
    def uncached_tokens(self) -> int:
        """What counts as neither read nor written."""
        return self.prompt_tokens - self.read_tokens - self.written_tokens


class Candidate(NamedTuple):
    """A token that could have come."""

    token: int
    logprob: float


class TokenLogprob(NamedTuple):
    """How likely a token of the answer was.

    Log probabilities are natural logarithms, -9999 at least, and those of the model's own
    distribution: before temperature, penalties, biases, and whatever leaves tokens out.
    """

    token: int
    logprob: float
    top: tuple[Candidate, ...]
    """The likeliest tokens at its place, the likeliest first."""
    offset: int
    """Which character of the answer its text begins in."""


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """New tokens and the text they complete (never half a character; stop texts held back)."""

    id: str
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens whose text begins in ``text``, where the request asks for it. At the end of an
    answer also of those behind its text, but for a stop text's."""


FinishReason = Literal["end", "length", "stop", "cancelled"]
"""``end``: the model ended its answer, or its grammar allows no more; ``length``: max_tokens or the
context's end was reached; ``stop``: a stop text came up."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds. ``first_token`` counts from submission and is 0 where nothing was generated."""

    queued: float = 0.0
    restore: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """The last event of a request that did not fail."""

    id: str
    reason: FinishReason
    stop_text: str | None
    prompt_tokens: int
    computed_tokens: int
    """Prompt tokens that were really computed, counting again any that were parked and lost."""
    generated_tokens: int
    """Without the token that ended the answer, if one did."""
    times: Times
    prompt_logits: NDArray[np.float32] | None = None
    """Shape (vocabulary size,); only where the request asked for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Failed:
    """The last event of a request that could not be served."""

    id: str
    error: AnaphoraError


Event = Started | Generated | Done | Failed
Emit = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is and can hold."""

    name: str
    model: str
    kind: str
    """Memory kind of the model: ``attention``, ``sliding-window``, ``recurrent``, ..."""
    caching: bool
    context_size: int
    """Tokens one sequence can hold."""
    cells: int
    """Tokens all sequences together can hold."""
    bytes_per_token: int
    """Size of one token's KV in a block."""
    memory_budget: int = 0
    """Bytes of the cache's memory tier."""
    disk_budget: int = 0
    """Bytes of its disk tier; 0: it has none."""
    chat_template: str | None = None
    """The model's own Jinja chat template."""
    warnings: tuple[str, ...] = ()


class Engine(Protocol):
    """One owner of a model's context. Not thread safe: one thread calls it.

    ``emit`` is called with every event, from inside :meth:`step`, :meth:`submit` and
    :meth:`cancel`. Each request ends with exactly one :class:`Done` or :class:`Failed`.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, request_id: str) -> None:
        """End a request; unknown ids are ignored. Finished blocks stay cached."""
        ...

    def step(self) -> float | None:
        """Do one piece of work.

        Returns seconds until the next call is worth it: 0 at once, ``None`` only after a message.
        """
        ...

    def stats(self) -> CacheStats | None:
        """Counts and sizes of the engine's cache; ``None`` without one."""
        ...

    def close(self) -> None:
        """Store what is not stored yet and free everything. Requests in flight are cancelled."""
        ...
