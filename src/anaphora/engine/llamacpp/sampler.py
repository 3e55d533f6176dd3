"""Sampling by llama.cpp's sampler chain."""

from __future__ import annotations

import ctypes
import secrets
from typing import Any

from llama_cpp import llama_cpp as lib

from anaphora.cache.keys import Tokens
from anaphora.engine.protocol import Sampling

_GREEDY_BELOW = 1e-6  # a logit divided by less could overflow, and nothing else would be chosen
_NO_SEED = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED: "choose one", which is why it is never passed on


class Sampler:
    """The chain for one request. Its state (penalty window, random generator) is its own."""

    def __init__(self, sampling: Sampling, vocabulary_size: int, prompt: Tokens) -> None:
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
        """Choose a token from row ``row`` of the latest logits, and remember it."""
        return int(lib.llama_sampler_sample(self._chain, context, row))

    def close(self) -> None:
        if self._chain:
            lib.llama_sampler_free(self._chain)
            self._chain = None

    def _add(self, sampler: Any) -> None:
        lib.llama_sampler_chain_add(self._chain, sampler)
