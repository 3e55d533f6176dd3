"""llama.cpp's log as Python logging, under the logger ``anaphora.llamacpp``.

llama.cpp is talkative: what it calls information is debug here, its warnings are information.
Nothing is printed unless the application sets logging up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llama_cpp import llama_cpp

logger = logging.getLogger("anaphora.llamacpp")
logger.addHandler(logging.NullHandler())

Listener = Callable[[int, str], None]
"""Called with a logging level and a line, from whichever thread llama.cpp logs in."""

_CONTINUED = 5
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}

_listeners: list[Listener] = []


class _Lines:
    """Puts lines together from the pieces llama.cpp writes."""

    def __init__(self) -> None:
        self._level = logging.DEBUG
        self._text = ""

    def write(self, level: int, text: str) -> None:
        if level != _CONTINUED:
            self._flush()
            self._level = _LEVELS.get(level, logging.DEBUG)
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            _deliver(self._level, line)

    def _flush(self) -> None:
        if self._text:
            _deliver(self._level, self._text)
            self._text = ""


def _deliver(level: int, line: str) -> None:
    line = line.rstrip()
    if not line:
        return
    for listener in tuple(_listeners):
        listener(level, line)
    logger.log(level, "%s", line)


_lines = _Lines()


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _callback(level: int, text: bytes, _user_data: Any) -> None:
    _lines.write(level, text.decode(errors="replace"))


def route() -> None:
    """Send llama.cpp's log to the logger. The binding prints it to stderr until this is called."""
    llama_cpp.llama_log_set(_callback, None)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Also hand every line to ``listener`` while the context lasts."""
    route()
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def errors() -> Iterator[list[str]]:
    """The error lines llama.cpp logs while the context lasts; the last one tends to say why."""
    found: list[str] = []

    def keep(level: int, line: str) -> None:
        if level >= logging.ERROR:
            found.append(line)

    with listen(keep):
        yield found
