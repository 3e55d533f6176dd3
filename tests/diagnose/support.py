"""Remembered prompts for tests, made of real tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from anaphora.diagnose.prompts import Decision, Place, Remembered, Span
from anaphora.engine.reference.vocabulary import BytePairVocabulary, TokenTable
from tests.tiny_models import CONTROL, MERGES, VOCABULARY

_EXTRA = ("Ġa n", "a b", "Ã ¤")
"""Merges more than the tiny models have; the last one makes a token of a whole character."""
_TEXTS = (*VOCABULARY, *(merge.replace(" ", "") for merge in _EXTRA))

VOCAB = BytePairVocabulary(
    TokenTable(
        model="gpt2",
        pre="qwen2",
        texts=_TEXTS,
        types=[3 if text in CONTROL else 1 for text in _TEXTS],
        merges=[*MERGES, *_EXTRA],
        bos=_TEXTS.index("<|endoftext|>"),
        eos=_TEXTS.index("<|im_end|>"),
    )
)
"""Byte-level: most characters beyond ASCII are several tokens."""

SYSTEM = Place("system", 1)
FILLER = "The handbook says that desks are on the second floor, by the window. " * 4


def message(number: int, role: str = "user", part: int = 0) -> Place:
    return Place("message", number, part, role)


def tool(number: int, name: str) -> Place:
    return Place("tool", number, name=name)


def remembered(
    parts: Sequence[tuple[Place | None, str]],
    request_id: str = "now",
    *,
    time: float = 100.0,
    decision: Decision | None = None,
    **match: str,
) -> Remembered:
    """A prompt of these texts, each wrapped in control tokens that are the template's."""
    opening, closing = VOCAB.control["<|im_start|>"], VOCAB.control["<|im_end|>"]
    tokens: list[int] = []
    spans: list[Span] = []
    for place, text in parts:
        if place is None:
            tokens += VOCAB.encode(text)
            continue
        tokens.append(opening)
        start = len(tokens)
        tokens += VOCAB.encode(text)
        spans.append(Span(start, len(tokens), place))
        tokens.append(closing)
    return Remembered(
        request_id,
        time,
        np.array(tokens, dtype=np.int32),
        tuple(spans),
        {"model": "small", "profile": "local", **match},
        decision or Decision(read=0),
    )


def text_of(prompt: Remembered) -> str:
    """The whole text of a prompt, control tokens included."""
    control = {token: text.encode() for text, token in VOCAB.control.items()}
    pieces = (VOCAB.piece(int(token)) or control[int(token)] for token in prompt.tokens)
    return b"".join(pieces).decode("utf-8", "replace")
