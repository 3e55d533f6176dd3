"""Text that arrives piece by piece, read as if it were there as a whole.

Readers are generators: wherever one needs text that has not come yet, it yields ``None`` and is
resumed when there is more. Every character is looked at a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]

_SPACE = re.compile(r"\s*")
_STRUCTURE = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


class NoCall(Exception):
    """What was read is no call after all."""


class Source:
    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._before = 0
        """How much was read before what is kept."""
        self._marked = 0
        self._since_mark: list[str] = []
        self._ended = False

    def feed(self, text: str) -> None:
        self._since_mark.append(self._text[self._marked : self._at])
        self._before += self._at
        self._text = self._text[self._at :] + text
        self._at = self._marked = 0

    @property
    def position(self) -> int:
        """How many characters were read."""
        return self._before + self._at

    @property
    def fed(self) -> int:
        """How many have come."""
        return self._before + len(self._text)

    def end(self) -> None:
        """There will be no more."""
        self._ended = True

    def mark(self) -> None:
        """Start counting what is read anew."""
        self._since_mark.clear()
        self._marked = self._at

    def since_mark(self) -> str:
        """What was read since :meth:`mark`."""
        return "".join([*self._since_mark, self._text[self._marked : self._at]])

    def more(self) -> Wait[bool]:
        """Whether there is anything left to read."""
        while self._at == len(self._text):
            if self._ended:
                return False
            yield
        return True

    def rest(self) -> str:
        """Read what is there."""
        return self._take(len(self._text))

    def peek(self, *options: str) -> Wait[str | None]:
        """Which of ``options`` comes next, the longest first; nothing is read."""
        longest = max(map(len, options))
        while True:
            ahead = self._text[self._at : self._at + longest]
            if not self._ended and any(
                len(o) > len(ahead) and o.startswith(ahead) for o in options
            ):
                yield
                continue
            return max((o for o in options if ahead.startswith(o)), key=len, default=None)

    def skip(self, *options: str) -> Wait[str | None]:
        """Read one of ``options`` if it comes next."""
        found = yield from self.peek(*options)
        self._at += len(found or "")
        return found

    def expect(self, *options: str) -> Wait[str]:
        """Read one of ``options``. Raises :class:`NoCall` where none comes."""
        found = yield from self.skip(*options)
        if found is None:
            raise NoCall
        return found

    def space(self) -> Wait[str]:
        """Read white space, as much as there is."""
        found: list[str] = []
        while (yield from self.more()):
            match = _SPACE.match(self._text, self._at)
            found.append(self._take(match.end() if match else self._at))
            if self._at < len(self._text):
                break
        return "".join(found)

    def stretch(self, pattern: Markers) -> Wait[tuple[str, str | None]]:
        """Read what is sure to stand before the next of ``pattern``'s markers, and say which it is.

        The marker is not read. ``None``: none has come yet.
        """
        while (yield from self.more()):
            if found := pattern.search(self._text, self._at):
                return self._take(found.start()), found.group()
            held = 0 if self._ended else pattern.begun(self._text, self._at)
            if text := self._take(len(self._text) - held):
                return text, None
            yield
        return "", None

    def until(self, pattern: Markers) -> Wait[str]:
        """Read what stands before the next of ``pattern``'s markers, which is not read.

        Raises :class:`NoCall` where none comes.
        """
        parts: list[str] = []
        while True:
            text, marker = yield from self.stretch(pattern)
            parts.append(text)
            if marker is not None:
                return "".join(parts)
            if self.exhausted:
                raise NoCall

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        return text

    @property
    def exhausted(self) -> bool:
        return self._ended and self._at == len(self._text)

    def json(self) -> Wait[str]:
        """Read an object or array of JSON up to its last bracket; what is inside is not checked.

        Raises :class:`NoCall` where there is none, or it doesn't end.
        """
        if (yield from self.peek("{", "[")) is None:
            raise NoCall
        parts: list[str] = []
        depth, quoted = 0, False
        while (yield from self.more()):
            seen = self._at
            for match in _STRUCTURE.finditer(self._text, seen):
                token, seen = match.group(), match.end()
                if token == '"':
                    quoted = not quoted
                elif not quoted and token in ("{", "["):
                    depth += 1
                elif not quoted and token in ("}", "]"):
                    depth -= 1
                    if depth == 0:
                        parts.append(self._take(seen))
                        return "".join(parts)
            # A backslash belongs to the character behind it, which may not have come yet.
            cut = self._text.endswith("\\") and seen < len(self._text)
            parts.append(self._take(len(self._text) - cut))
            if cut:
                if self._ended:
                    break
                yield
        raise NoCall


class Markers:
    """Texts to look for. Where several begin at the same place the longest is found."""

    def __init__(self, *texts: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
        self._beginnings = {text[:end] for text in texts for end in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)

    def search(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(text, start)

    def begun(self, text: str, start: int) -> int:
        """How many characters at the end of ``text`` may be the beginning of a marker."""
        for length in range(min(self._longest, len(text) - start), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0
