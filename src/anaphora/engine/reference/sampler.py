"""Choosing the next token from the logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from anaphora.engine.constraint import Constraint
from anaphora.engine.protocol import Sampling
from anaphora.engine.reference.model import Floats, softmax


class Sampler:
    """Samples one answer's tokens; the order of the steps is llama.cpp's."""

    def __init__(self, sampling: Sampling, constraint: Constraint | None = None) -> None:
        self._sampling = sampling
        self._constraint = constraint
        seed = sampling.seed
        self._random = np.random.default_rng(None if seed is None else seed % 2**64)

    def sample(self, logits: Floats, tokens: Sequence[int]) -> int:
        """The token to follow ``tokens``; ``logits`` has shape (vocabulary size,).

        Raises :class:`~anaphora.errors.GrammarError` where the constraint can't go on.
        """
        logits = self._penalized(logits, tokens)
        if self._constraint is None:
            return self._choose(logits)
        allowed = self._constraint.allowed()
        token = int(allowed[self._choose(logits[allowed])])
        self._constraint.accept(token)
        return token

    def _choose(self, logits: Floats) -> int:
        """A place in ``logits``."""
        sampling = self._sampling
        if sampling.temperature == 0:
            return int(logits.argmax())
        candidates = np.argsort(-logits, kind="stable")
        if sampling.top_k > 0:
            candidates = candidates[: sampling.top_k]
        probabilities = softmax(logits[candidates])
        if sampling.top_p < 1:
            kept = int(np.searchsorted(probabilities.cumsum(), sampling.top_p)) + 1
            candidates, probabilities = candidates[:kept], probabilities[:kept]
        if sampling.min_p > 0:
            candidates = candidates[probabilities >= sampling.min_p * probabilities[0]]
        probabilities = softmax(logits[candidates] / np.float32(sampling.temperature))
        cumulative = probabilities.cumsum(dtype=np.float64)
        drawn = np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")
        return int(candidates[min(int(drawn), len(candidates) - 1)])

    def _penalized(self, logits: Floats, tokens: Sequence[int]) -> Floats:
        """With the bias and the penalties for repeating the latest tokens applied."""
        sampling, logits = self._sampling, logits.copy()
        for token, bias in sampling.logit_bias.items():
            logits[token] += bias
        window = tokens[-sampling.penalty_window :] if sampling.penalty_window > 0 else ()
        for token, count in Counter(window).items():
            repeated = logits[token]
            if repeated > 0:
                repeated /= sampling.repeat_penalty
            else:
                repeated *= sampling.repeat_penalty
            repeated -= count * sampling.frequency_penalty + sampling.presence_penalty
            logits[token] = repeated
        return logits
