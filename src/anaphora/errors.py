"""Errors a user can cause. ``str(error)`` is one line: what is wrong, and what to do about it."""

from __future__ import annotations


class AnaphoraError(Exception):
    """Base of every error raised on purpose."""


class SettingsError(AnaphoraError):
    """A setting, or a combination of settings, that cannot work.

    ``setting`` is its name where it is a field of :class:`~anaphora.settings.Settings`, and
    ``problem`` is what follows the name in the text: who read the setting under another name can
    use that one instead.
    """

    def __init__(self, problem: str, *, setting: str | None = None) -> None:
        super().__init__(problem if setting is None else f"{setting} {problem}")
        self.setting = setting
        self.problem = problem


class ModelNotFoundError(AnaphoraError):
    """The model file is not there or cannot be opened."""


class ModelFileError(AnaphoraError):
    """The model file is there but is no usable GGUF: foreign, truncated, or of an unknown kind."""


class ContextMemoryError(AnaphoraError):
    """There is not enough memory for the context asked for."""


class CacheDirectoryError(AnaphoraError):
    """The cache folder cannot be used."""


class CacheBusyError(CacheDirectoryError):
    """Another process holds the cache namespace."""


class TemplateError(AnaphoraError):
    """The chat template is broken, forbidden by the sandbox, or refused the conversation."""


class PromptError(AnaphoraError):
    """The prompt or conversation is not something a model can be given."""


class PromptTooLongError(PromptError):
    """The prompt does not fit the context."""

    def __init__(self, prompt_tokens: int, context_size: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and the context holds {context_size}: "
            "shorten the prompt or load the model with a larger context"
        )
        self.prompt_tokens = prompt_tokens
        self.context_size = context_size

    def __reduce__(self) -> tuple[type[PromptTooLongError], tuple[int, int]]:
        return type(self), (self.prompt_tokens, self.context_size)


class GrammarError(AnaphoraError):
    """The grammar of an answer is wrong, costs too much, or can't be met by the model."""


class EngineError(AnaphoraError):
    """The engine failed while it worked on a request."""


class UnavailableError(EngineError):
    """There is no engine at the moment: it died, or its model can't be loaded."""


class ConfigError(AnaphoraError):
    """A server option that is unknown, has a bad value, or cannot work with the others."""


class KeysError(AnaphoraError):
    """The file of API keys cannot be used, or a key or tenant cannot be named so."""


class AddressError(AnaphoraError):
    """The server cannot listen where it was told to."""


class UsageError(AnaphoraError):
    """The file with the usage of requests is not there, or cannot be read."""


class ExplainError(AnaphoraError):
    """A server cannot be asked about a request, or does not remember it."""


class OverloadedError(AnaphoraError):
    """So many requests wait that another one is refused."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests are waiting: try again in {retry_after} seconds")
        self.retry_after = retry_after
        """Seconds until it is worth trying again."""


class ShuttingDownError(AnaphoraError):
    """The server takes no more requests because it is about to stop."""
