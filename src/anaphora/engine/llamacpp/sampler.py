"""Sampling by llama.cpp's sampler chain."""

from __future__ import annotations

import ctypes
import secrets
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from anaphora.cache.keys import Tokens
from anaphora.engine.constraint import Constraint
from anaphora.engine.protocol import Sampling

_GREEDY_BELOW = 1e-6  # a logit divided by less could overflow, and nothing else would be chosen
_NO_SEED = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED: "choose one", which is why it is never passed on
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_candidate_pointer = ctypes.POINTER(lib.llama_token_data)


class Sampler:
    """The chain for one request. Its state (penalty window, random generator) is its own."""

    def __init__(
        self,
        sampling: Sampling,
        vocabulary_size: int,
        prompt: Tokens,
        constraint: Constraint | None = None,
    ) -> None:
        """``constraint``: at its beginning; it goes on with every token that is chosen."""
        self._vocabulary_size = vocabulary_size
        self._constraint = constraint
        if constraint is not None:
            # Large, so it is made once: fresh memory would cost more than filling it.
            self._candidates = np.zeros(vocabulary_size, _CANDIDATE)
        self._chain: Any = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        add = self._add
        if sampling.logit_bias:
            biases = (lib.llama_logit_bias * len(sampling.logit_bias))(
                *(lib.llama_logit_bias(t, b) for t, b in sampling.logit_bias.items())
            )
            add(lib.llama_sampler_init_logit_bias(vocabulary_size, len(biases), biases))
        penalized = (
            sampling.repeat_penalty != 1.0
            or sampling.frequency_penalty != 0.0
            or sampling.presence_penalty != 0.0
        ) and sampling.penalty_window > 0
        if penalized:
            add(
                lib.llama_sampler_init_penalties(
                    vocabulary_size,
                    sampling.penalty_window,
                    sampling.repeat_penalty,
                    sampling.frequency_penalty,
                    sampling.presence_penalty,
                )
            )
        if sampling.temperature < _GREEDY_BELOW:
            add(lib.llama_sampler_init_greedy())
        else:
            if sampling.top_k > 0:
                add(lib.llama_sampler_init_top_k(sampling.top_k))
            if sampling.top_p < 1:
                add(lib.llama_sampler_init_top_p(sampling.top_p, 1))
            if sampling.min_p > 0:
                add(lib.llama_sampler_init_min_p(sampling.min_p, 1))
            if sampling.temperature != 1:
                add(lib.llama_sampler_init_temp(sampling.temperature))
            seed = sampling.seed
            if seed is None:
                seed = secrets.randbelow(_NO_SEED)
            add(lib.llama_sampler_init_dist(ctypes.c_uint32(seed % _NO_SEED).value))
        if penalized:
            for token in prompt[-sampling.penalty_window :].tolist():
                lib.llama_sampler_accept(self._chain, token)

    def sample(self, context: Any, row: int) -> int:
        """Choose a token from row ``row`` of the latest logits, and remember it.

        Raises :class:`~anaphora.errors.GrammarError` where the constraint can't go on.
        """
        if self._constraint is None:
            return int(lib.llama_sampler_sample(self._chain, context, row))
        token = self._choose(context, row, self._constraint.allowed())
        lib.llama_sampler_accept(self._chain, token)
        self._constraint.accept(token)
        return token

    def close(self) -> None:
        if self._chain:
            lib.llama_sampler_free(self._chain)
            self._chain = None

    def _choose(self, context: Any, row: int, allowed: NDArray[np.int64]) -> int:
        """One of the ``allowed``: the chain never hears of any other."""
        pointer = lib.llama_get_logits_ith(context, row)
        logits = np.ctypeslib.as_array(pointer, shape=(self._vocabulary_size,))
        candidates = self._candidates[: len(allowed)]
        candidates["id"] = allowed
        candidates["logit"] = logits.take(allowed)
        array = lib.llama_token_data_array(
            candidates.ctypes.data_as(_candidate_pointer), len(candidates), -1, False
        )
        lib.llama_sampler_apply(self._chain, ctypes.byref(array))
        return int(array.data[array.selected].id)

    def _add(self, sampler: Any) -> None:
        lib.llama_sampler_chain_add(self._chain, sampler)
