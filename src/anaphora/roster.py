"""The models a server may run, of which one is loaded at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from anaphora.engine.protocol import EngineInfo
from anaphora.errors import AnaphoraError, UnavailableError
from anaphora.model import Model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """A model that can be asked for."""

    name: str
    """What the API calls it."""
    path: Path


class Roster:
    """Loads one model in another's place. What the other has cached stays in its cache folder.

    Use it as a context: it begins with the first model loaded, and ends with none.
    """

    def __init__(self, choices: Sequence[Choice], load: Callable[[Path], Model]) -> None:
        """``choices`` have different names; ``load`` is what :class:`Model` raises and returns."""
        self.choices = tuple(choices)
        self.loaded: Choice | None = None
        self._load = load
        self._model: Model | None = None
        self._infos: dict[Choice, EngineInfo] = {}

    @property
    def model(self) -> Model:
        """The loaded model. Raises :class:`~anaphora.errors.UnavailableError` without one."""
        if self._model is None:
            raise UnavailableError("no model is loaded: try again, or see the server's log")
        return self._model

    def find(self, name: str | None) -> Choice:
        """The model called ``name``; for any other name the loaded one."""
        known = {choice.name: choice for choice in self.choices}
        return known.get(name or "", self.loaded or self.choices[0])

    def info(self, choice: Choice) -> EngineInfo | None:
        """What is known of a model since it was last loaded."""
        return self._infos.get(choice)

    def load(self, choice: Choice) -> None:
        """Load ``choice`` in the place of what is loaded now.

        Raises what loading raises; then the one before is loaded again, if it can be.
        """
        before = self.loaded
        self.close()
        try:
            self._open(choice)
        except AnaphoraError:
            if before is not None and before != choice:
                try:
                    self._open(before)
                except AnaphoraError as error:
                    logger.error("%s can't be loaded again: %s", before.name, error)
            raise

    def close(self) -> None:
        """Unload: everything cached is stored first."""
        model, self._model, self.loaded = self._model, None, None
        if model is not None:
            model.close()

    def _open(self, choice: Choice) -> None:
        self._model = self._load(choice.path)
        self.loaded = choice
        self._infos[choice] = self._model.info

    def __enter__(self) -> Self:
        self._open(self.choices[0])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
