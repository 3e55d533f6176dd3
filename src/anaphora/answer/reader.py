"""An answer, read as it comes: which of it is reasoning, text, or a call."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from anaphora.answer.pieces import Call, Piece, Reasoning, Text, merged
from anaphora.answer.source import Markers, NoCall, Source
from anaphora.answer.syntaxes import Syntax, Thought, Tools
from anaphora.engine.protocol import TokenLogprob

if TYPE_CHECKING:
    from anaphora.answer.forms import Form


class Reader:
    """Takes the text of one answer piece by piece and gives out what it is made of.

    However the text is cut, the pieces joined are the same:

    - A call is given out when it is complete. What turns out to be none, because it is no valid
      call, of no tool there is, or cut off, is text.
    - Text is given out as it is, but for white space that belongs to markers: before calls and
      reasoning, between calls and behind the last one; line ends behind reasoning.
    - Reasoning is given out without white space around it.
    - Markers that are spelled in plain text open reasoning only where the answer begins.
    - Texts of control tokens are never given out.
    - Tokens of text are given out with its first character that is theirs. All others are left out,
      but those behind the text when the answer is over.
    """

    def __init__(
        self,
        form: Form,
        tools: Tools,
        hidden: frozenset[str] = frozenset(),
        *,
        opened: bool = False,
        first_call_only: bool = False,
    ) -> None:
        """
        :param tools: what can be called; without any, calls are text.
        :param opened: the prompt ends with the marker that opens reasoning.
        """
        self.thinking = opened
        """Whether what comes next is reasoning, as far as is known."""
        self.complete = False
        """Nothing that comes will be given out any more."""
        self._form = form
        self._tools = tools
        self._hidden = sorted(hidden, key=len, reverse=True)
        self._first_call_only = first_call_only
        self._source = Source()
        self._tokens: deque[TokenLogprob] = deque()
        self._space: list[str] = []
        """White space that may belong to a marker."""
        self._thought: list[str] = []
        """White space that stands inside reasoning if more comes; empty: there was none yet."""
        self._trims_lines = False
        """Line ends at the start of the next text belong to a marker."""
        self._behind_call = False
        self._syntaxes = [one for one in form.syntaxes if tools or one.channels]
        self._openings = {text: one for one in self._syntaxes for text in one.openings}
        markers = [*self._openings, *self._hidden]
        if form.think and form.think.open in hidden:
            markers.append(form.think.open)
        self._markers = Markers(*markers) if markers else None
        self._steps = self._read(opened)

    def feed(self, text: str, logprobs: Iterable[TokenLogprob] = ()) -> list[Piece]:
        """Add text, and the tokens that begin in it; returns what became final."""
        self._source.feed(text)
        self._tokens.extend(logprobs)
        return self._run()

    def finish(self) -> list[Piece]:
        """The answer is over: what was held back."""
        self._source.end()
        return self._run()

    def _run(self) -> list[Piece]:
        pieces: list[Piece] = []
        while not self.complete:
            try:
                piece = next(self._steps)
            except StopIteration:
                self.complete = True
                break
            if piece is None:
                break
            pieces.append(piece)
            self.complete = self._first_call_only and isinstance(piece, Call)
        return merged(pieces)

    def _read(self, opened: bool) -> Generator[Piece | None, None, None]:
        think, source = self._form.think, self._source
        if think is not None:
            space = yield from source.space()
            if (yield from source.skip(think.open)) or opened:
                yield from self._reason(think.close)
                yield from source.skip(think.close)
                self._leave_out(0)
            else:
                self._space.append(space)
        for syntax in self._syntaxes:
            if syntax.leads and not (yield from source.peek(*syntax.leads)):
                self._space.append((yield from source.space()))
            if syntax.leads and (yield from source.peek(*syntax.leads)):
                yield from self._call(syntax)
        while True:
            marker = yield from self._text()
            if marker is None:
                break
            if marker in self._openings:
                yield from self._call(self._openings[marker])
            elif think is not None and marker == think.open:
                yield from source.skip(marker)
                yield from self._reason(think.close)
                yield from source.skip(think.close)
                self._leave_out(0)
            else:  # a control token astray
                before = source.position
                yield from source.skip(marker)
                self._leave_out(before)
        space, told = "".join(self._space), tuple(self._tokens)
        if (space or told) and not self._behind_call:
            yield Text(space, told)

    def _text(self) -> Generator[Piece | None, None, str | None]:
        """Give out text up to a marker, which is returned; ``None``: up to the end."""
        source = self._source
        while (yield from source.more()):
            source.mark()
            marker = None
            if self._markers is None:
                text = source.rest()
            else:
                text, marker = yield from source.stretch(self._markers)
            yield from self._say(text)
            if marker is not None:
                return marker
        return None

    def _say(self, text: str) -> Generator[Piece, None, None]:
        """Give out text; white space at its end only once it is known to be text."""
        for marker in self._hidden:
            text = text.replace(marker, "")
        end = self._source.position
        if self._trims_lines:
            text = text.lstrip("\n")
            self._leave_out(0, end - len(text))
        if not text:
            return
        self._trims_lines = False
        kept = text.rstrip() if self._openings else text
        if kept:
            yield Text("".join(self._space) + kept, self._told(end - len(text) + len(kept)))
            self._space.clear()
            self._behind_call = False
        self._space.append(text[len(kept) :])

    def _call(self, syntax: Syntax) -> Generator[Piece | None, None, None]:
        """Read a section of calls, or find that it is none."""
        source, called = self._source, syntax.channels
        source.mark()
        try:
            for piece in syntax.read(source, self._tools):
                match piece:
                    case None:
                        yield None
                    case Call() if piece.name in self._tools:
                        called = self._behind_call = True
                        self._space.clear()
                        self._leave_out(0)
                        source.mark()
                        yield piece
                    case Call():
                        yield from self._say(source.since_mark())
                        source.mark()
                    case Thought():
                        yield from self._reason(*piece.ends)
                        self._leave_out(0)
                        source.mark()
        except NoCall:
            called = False
        if called:
            self._leave_out(0)
        else:
            yield from self._say(source.since_mark())

    def _told(self, end: int) -> tuple[TokenLogprob, ...]:
        """The tokens that begin before position ``end`` and were not given out."""
        told = []
        while self._tokens and self._tokens[0].offset < end:
            told.append(self._tokens.popleft())
        return tuple(told)

    def _leave_out(self, start: int, end: int | None = None) -> None:
        """Don't give out tokens that lie between ``start`` and ``end``, or what is read.

        At the end of the answer those behind it are left out, too.
        """
        if not self._tokens:
            return
        if end is None:
            end = sys.maxsize if self._source.exhausted else self._source.position
        edges = [*(one.offset for one in self._tokens), self._source.fed]
        self._tokens = deque(
            token
            for token, (begin, behind) in zip(self._tokens, pairwise(edges), strict=True)
            if not (start <= begin < end and behind <= end)
        )

    def _reason(self, *ends: str) -> Generator[Piece | None, None, None]:
        """Read reasoning up to one of ``ends``, which is not read."""
        self.thinking = True
        self._space.clear()
        source, markers = self._source, Markers(*ends, *self._hidden)
        while (yield from source.more()):
            source.mark()
            text, marker = yield from source.stretch(markers)
            yield from self._think(text)
            if marker in ends:
                break
            if marker is not None:  # a control token astray
                yield from source.skip(marker)
        self.thinking = False
        self._thought = []
        self._trims_lines = True

    def _think(self, text: str) -> Generator[Piece, None, None]:
        """Give out reasoning, without white space around it."""
        kept = text.rstrip()
        if kept and not self._thought:
            yield Reasoning(kept.lstrip())
        elif kept:
            yield Reasoning("".join(self._thought) + kept)
        if kept or self._thought:
            self._thought = [*([] if kept else self._thought), text[len(kept) :]]
