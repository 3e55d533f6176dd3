"""From token bytes to text: whole characters only, stop texts found and held back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_new_decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """Turns the bytes of one token after another into text that is final.

    What comes out joined is the same for every way to split the bytes, and equals what one call
    with all of them gives:

    - Bytes that are no valid UTF-8 become U+FFFD, one for each maximal invalid part. A character
      that is not complete yet is held back; one still cut off when the answer ends is dropped.
      (The first two bytes of an encoded surrogate pass for one, as in Python's own decoder.)
    - The stop text that is complete first ends the text; of several complete at the same
      character the longest does. The text before it is given out, the stop text is not. So nothing
      has to be generated beyond a stop text to know that it is one.
    - Text that could still become a stop text is held back until it is one or cannot be.

    Empty stop texts never match.
    """

    __slots__ = ("_decode", "_first", "_held", "_stops", "stopped")

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decode = _new_decoder("replace").decode
        self._stops = tuple(text for text in stop if text)
        self._first = frozenset(text[0] for text in self._stops)
        self._held = ""
        self.stopped: str | None = None
        """The stop text that ended the answer."""

    def feed(self, piece: bytes) -> str:
        """Add the bytes of one token; returns the text that became final, often ``""``.

        Once a stop text is found (:attr:`stopped`), everything after it is ignored.
        """
        new = self._decode(piece)
        if not self._stops:
            return new
        if not new or self.stopped is not None:
            return ""
        text = self._held + new
        self.stopped, end = self._find_stop(text)
        if self.stopped is None:
            end = self._start_of_possible_stop(text)
        self._held = "" if self.stopped is not None else text[end:]
        return text[:end]

    def finish(self) -> str:
        """The answer is over: the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _find_stop(self, text: str) -> tuple[str | None, int]:
        """The stop text that is complete first, and where it starts."""
        found, start, end = None, len(text), len(text) + 1
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and (at + len(stop), at) < (end, start):
                found, start, end = stop, at, at + len(stop)
        return found, start

    def _start_of_possible_stop(self, text: str) -> int:
        """Where the longest end of ``text`` that begins a stop text starts; ``len(text)``: none."""
        for at, character in enumerate(text):
            if character in self._first:
                tail = text[at:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return at
        return len(text)
