"""The library: a model with a prompt cache.

>>> with Model.load() as model:                            # doctest: +SKIP
...     reply = model.generate("Once upon a time", max_tokens=20)
...     print(reply.text, reply.usage.read_tokens, reply.usage.computed_tokens)
"""

from __future__ import annotations

import queue
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from anaphora.bundled import Progress, bundled_model
from anaphora.cache.keys import Tokens
from anaphora.cache.store import CacheStats
from anaphora.clock import Clock, SystemClock
from anaphora.engine.host import EngineHost, Host
from anaphora.engine.llamacpp.load import load_engine
from anaphora.engine.process import ProcessHost
from anaphora.engine.protocol import (
    CacheHints,
    Done,
    EngineInfo,
    Event,
    Failed,
    FinishReason,
    Found,
    Generated,
    Grammar,
    Request,
    Sampling,
    Started,
    Times,
    TokenLogprob,
)
from anaphora.errors import AnaphoraError, EngineError, PromptError
from anaphora.prompt import adapt
from anaphora.prompt.conversation import Conversation, Message, Plain, well_formed
from anaphora.prompt.template import read_template
from anaphora.prompt.tokens import Prompt, Renderer, encode_text
from anaphora.settings import DEFAULT_CACHE_DIR, Settings
from anaphora.vocabulary import Vocabulary

MessageLike = Message | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    read_tokens: int
    """Prompt tokens that count as read from the cache."""
    written_tokens: int
    """Prompt tokens that count as newly written to it."""
    computed_tokens: int
    """Prompt tokens that were really computed; at least one, for the first token's sake."""
    generated_tokens: int
    found: Found
    """Where the reused tokens lay."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished answer."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop_text: str | None
    usage: Usage
    times: Times
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of ``tokens`` up to where a stop text begins, where they were asked for."""


class Stream:
    """An answer on its way: iterate over its text; ``reply`` is complete afterwards.

    Leaving the loop early, or :meth:`close`, cancels the request. What was computed stays cached.
    """

    def __init__(
        self,
        host: Host,
        request: Request,
        on_reply: Callable[[Reply], None] | None = None,
    ) -> None:
        self._host = host
        self._id = request.id
        self._on_reply = on_reply
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._started: Started | None = None
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._reply: Reply | None = None
        self._ended = False
        self._error: AnaphoraError = EngineError("the request was cancelled")
        """Why there is no reply, once the stream has ended without one."""
        host.submit(request, self._events.put)

    def __iter__(self) -> Iterator[str]:
        try:
            while not self._ended:
                text = self._next()
                if text:
                    yield text
        finally:
            self.close()

    @property
    def started(self) -> Started:
        """What was found in the cache; waits until the prompt's prefix is restored.

        Raises what made the request fail before that.
        """
        while self._started is None:
            if self._ended:
                raise self._error
            self._next()
        return self._started

    @property
    def reply(self) -> Reply:
        """The whole answer; reads what is left of the stream first."""
        for _ in self:
            pass
        if self._reply is None:
            raise self._error
        return self._reply

    def close(self) -> None:
        """Cancel the request if it is still running."""
        if not self._ended:
            self._ended = True
            self._host.cancel(self._id)

    def _next(self) -> str:
        """Wait for the next event; returns its text."""
        try:
            event = self._events.get()
        except BaseException:  # KeyboardInterrupt: nobody waits for the answer any more
            self.close()
            raise
        match event:
            case Started():
                self._started = event
            case Generated():
                self._tokens.extend(event.tokens)
                self._text.append(event.text)
                self._logprobs.extend(event.logprobs)
                return event.text
            case Done():
                self._ended = True
                if event.reason == "cancelled":  # by somebody else: this stream was not closed
                    raise self._error
                self._reply = self._finished(event)
                if self._on_reply is not None:
                    self._on_reply(self._reply)
            case Failed():
                self._ended, self._error = True, event.error
                raise event.error
        return ""

    def _finished(self, done: Done) -> Reply:
        started = self._started
        usage = Usage(
            done.prompt_tokens,
            started.read_tokens if started else 0,
            started.written_tokens if started else 0,
            done.computed_tokens,
            done.generated_tokens,
            started.found if started else Found(),
        )
        text = "".join(self._text)
        return Reply(
            text,
            tuple(self._tokens),
            done.reason,
            done.stop_text,
            usage,
            done.times,
            tuple(self._logprobs),
        )


class Model:
    """A GGUF model with a prompt cache. Methods may be called from several threads at once."""

    def __init__(
        self,
        path: Path,
        settings: Settings | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Load the model at ``path``; see :func:`~anaphora.engine.llamacpp.load.load_engine` for
        the errors this raises, and :class:`~anaphora.errors.TemplateError` for a template that
        does not compile.
        """
        self.path = path
        self.settings = settings or Settings()
        self._clock = clock or SystemClock()
        self._host = _start_engine(path, self.settings, self._clock)
        try:
            source = self._host.info.chat_template
            if self.settings.chat_template is not None:
                source = read_template(self.settings.chat_template)
            self._renderer = Renderer(self._host.vocabulary, source, clock=self._clock)
        except BaseException:
            self._host.close()
            raise

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        *,
        cache_dir: str | Path | None = DEFAULT_CACHE_DIR,
        progress: Progress | None = None,
        **settings: Any,
    ) -> Model:
        """Load a GGUF file, or the bundled model where none is named.

        ``cache_dir`` keeps blocks across restarts; ``None`` caches in memory only. Further
        keywords are the fields of :class:`~anaphora.settings.Settings`. ``progress`` follows the
        one-time preparation of the bundled model.
        """
        folder = None if cache_dir is None else Path(cache_dir).expanduser()
        if path is None:
            path = bundled_model(folder or DEFAULT_CACHE_DIR.expanduser(), progress)
        return cls(Path(path).expanduser(), Settings(cache_dir=folder, **settings))

    @property
    def info(self) -> EngineInfo:
        return self._host.info

    @property
    def vocabulary(self) -> Vocabulary:
        return self._host.vocabulary

    @property
    def host(self) -> Host:
        """Where requests go that are followed event by event."""
        return self._host

    @property
    def renderer(self) -> Renderer:
        return self._renderer

    def stats(self) -> CacheStats | None:
        """Counts and sizes of the cache: what it holds, missed, wrote, evicted and lost."""
        return self._host.stats()

    def tokenize(self, prompt: str | Sequence[int] | Tokens) -> Tokens:
        """Tokens of a raw prompt, shape (n,). Text never becomes a control token."""
        if isinstance(prompt, str):
            return encode_text(self.vocabulary, prompt)
        try:
            tokens = np.asarray(prompt).astype(np.int32)
            if np.array_equal(tokens, prompt):
                return tokens
        except (OverflowError, TypeError, ValueError):
            pass
        raise PromptError("the prompt is neither a text nor a plain list of token ids")

    def render(
        self, messages: Iterable[MessageLike], *, add_generation_prompt: bool = True
    ) -> Prompt:
        """The prompt of a conversation: its tokens, and where messages and their parts end.

        Raises :class:`~anaphora.errors.TemplateError` and :class:`~anaphora.errors.PromptError`.
        """
        return self._renderer.render(
            Conversation.parse(messages), add_generation_prompt=add_generation_prompt
        )

    def stream(
        self,
        prompt: str | Sequence[int] | Tokens,
        *,
        max_tokens: int = 256,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        cache: CacheHints = CacheHints(),  # noqa: B008 - frozen
        grammar: Grammar | None = None,
        logprobs: int | None = None,
    ) -> Stream:
        """Continue a raw prompt. Errors are raised when the stream is read.

        ``logprobs``: tell how likely each token was, and so many of the likeliest ones (0 to 20).
        """
        tokens = self.tokenize(prompt)
        request = _request(tokens, max_tokens, sampling, cache, grammar, logprobs=logprobs)
        return Stream(self._host, request)

    def generate(
        self,
        prompt: str | Sequence[int] | Tokens,
        *,
        max_tokens: int = 256,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        cache: CacheHints = CacheHints(),  # noqa: B008 - frozen
        grammar: Grammar | None = None,
        logprobs: int | None = None,
    ) -> Reply:
        """Continue a raw prompt and return the whole answer; ``logprobs`` as for :meth:`stream`.

        Raises :class:`~anaphora.errors.PromptTooLongError` where it doesn't fit the context, and
        :class:`~anaphora.errors.GrammarError` where ``grammar`` can't be used or met.
        """
        return self.stream(
            prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            cache=cache,
            grammar=grammar,
            logprobs=logprobs,
        ).reply

    def chat(
        self,
        system: str | None = None,
        *,
        max_tokens: int = 256,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        cache: CacheHints = CacheHints(),  # noqa: B008 - frozen
        grammar: Grammar | None = None,
        logprobs: int | None = None,
    ) -> Chat:
        """A conversation with history, rendered by the model's chat template.

        ``grammar`` is that of every answer, ``logprobs`` as for :meth:`stream`.
        """
        return Chat(self, system, max_tokens, sampling, cache, grammar, logprobs)

    def settle(
        self,
        messages: Iterable[MessageLike],
        *,
        cache: CacheHints = CacheHints(),  # noqa: B008 - frozen
    ) -> None:
        """Prepare the next turn of a conversation whose answer was just given.

        What the cache doesn't have of its :meth:`opening` is computed while the engine has nothing
        else to do.
        """
        try:
            tokens = self.opening(Conversation.parse(messages))
        except AnaphoraError:
            return  # no conversation: the answer stands anyway
        if tokens is not None:
            request = _request(tokens, 0, Sampling(), cache, background=True)
            self._host.submit(request, lambda event: None)

    def opening(
        self, conversation: Conversation, options: Mapping[str, Plain] | None = None
    ) -> Tokens | None:
        """What prompts begin with that go on from ``conversation``, shape (n,).

        It is rendered as the next turn will show it, up to where the text of the next user message
        begins: the template may drop or rewrite parts of an answer. ``None``: preparing it is of no
        use, since nothing is cached, it doesn't fit, or the template refuses it.

        :param options: further variables for the template.
        """
        if not self.info.caching:
            return None
        try:
            tokens = adapt.following(self._renderer, conversation, options)
        except AnaphoraError:  # or the model is closed
            return None
        return tokens if len(tokens) <= self.info.context_size else None

    def close(self) -> None:
        """End what runs, store what is not stored yet, and free the model."""
        self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Chat:
    """A conversation with history. A turn enters the history when its answer is complete."""

    def __init__(
        self,
        model: Model,
        system: str | None,
        max_tokens: int,
        sampling: Sampling,
        cache: CacheHints,
        grammar: Grammar | None,
        logprobs: int | None,
    ) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._cache = cache
        self._grammar = grammar
        self._logprobs = logprobs
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append(Message.parse({"role": "system", "content": system}))

    def stream(self, text: str) -> Stream:
        """Say ``text``; iterate over the answer."""
        turn = [*self.messages, Message.parse({"role": "user", "content": text})]
        tokens = self._model.render(turn).tokens

        def remember(reply: Reply) -> None:
            answer = Message.parse({"role": "assistant", "content": reply.text})
            self.messages = [*turn, answer]
            self._model.settle(self.messages, cache=self._cache)

        request = _request(
            tokens,
            self._max_tokens,
            self._sampling,
            self._cache,
            self._grammar,
            logprobs=self._logprobs,
        )
        return Stream(self._model._host, request, remember)

    def send(self, text: str) -> Reply:
        """Say ``text``; returns the whole answer."""
        return self.stream(text).reply


def _start_engine(path: Path, settings: Settings, clock: Clock) -> Host:
    if settings.engine == "process":  # on a clock of its own
        return ProcessHost(path, settings)
    return EngineHost(lambda emit: load_engine(path, settings, emit, clock))


def _request(
    tokens: Tokens,
    max_tokens: int,
    sampling: Sampling,
    cache: CacheHints,
    grammar: Grammar | None = None,
    *,
    logprobs: int | None = None,
    background: bool = False,
) -> Request:
    if isinstance(sampling, Sampling):  # stop texts follow the rule for all text
        sampling = replace(sampling, stop=tuple(well_formed(text) for text in sampling.stop))
    if isinstance(grammar, Grammar):
        grammar = replace(grammar, text=well_formed(grammar.text))
    return Request(
        uuid.uuid4().hex,
        tokens,
        max_tokens,
        sampling,
        cache,
        background,
        grammar=grammar,
        logprobs=logprobs,
    )
