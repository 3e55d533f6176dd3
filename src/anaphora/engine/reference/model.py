"""A Llama-family transformer in NumPy, float32 throughout.

Tokens become vectors; in every layer each token asks the ones before it (attention over keys and
values) and then thinks for itself (feed-forward); the last vector gives the logits of the next
token. Keys and values of a token depend only on it and on the tokens before it: that is what makes
them worth keeping.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. Matrices have shape (outputs, inputs)."""

    attn_norm: Floats
    attn_q: Floats
    attn_k: Floats
    attn_v: Floats
    attn_output: Floats
    ffn_norm: Floats
    ffn_gate: Floats
    ffn_up: Floats
    ffn_down: Floats


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    heads: int
    kv_heads: int
    """Grouped-query attention: ``heads / kv_heads`` query heads share keys and values."""
    head_size: int
    norm_epsilon: float
    context_size: int
    """Tokens the model was trained for."""

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * 4


@dataclass(frozen=True, slots=True, eq=False)
class Transformer:
    shape: Shape
    embedding: Floats
    """Shape (vocabulary size, width)."""
    layers: tuple[Layer, ...]
    output_norm: Floats
    output: Floats
    """Shape (vocabulary size, width); the embedding itself where the two are tied."""
    frequencies: NDArray[np.float64]
    """Radians per position that each pair of a head is turned by, shape (rotated pairs,)."""

    def new_cache(self, cells: int) -> Floats:
        """Room for the keys [0] and values [1] of ``cells`` tokens.

        Shape (2, layers, cells, kv heads, head size). Memory is taken as cells are filled.
        """
        shape = self.shape
        return np.zeros((2, shape.layers, cells, shape.kv_heads, shape.head_size), np.float32)

    def forward(self, tokens: NDArray[np.int32], start: int, cache: Floats) -> Floats:
        """Compute ``tokens``, which follow the ``start`` tokens whose keys and values ``cache``
        holds, and add theirs. Returns the last layer's vectors, shape (tokens, width).
        """
        epsilon = self.shape.norm_epsilon
        end = start + len(tokens)
        rotation = self._rotation(start, end)
        x = self.embedding[tokens]
        for layer, keys, values in zip(self.layers, cache[0], cache[1], strict=True):
            h = rms_norm(x, layer.attn_norm, epsilon)
            keys[start:end] = rotate(self._heads(h @ layer.attn_k.T), rotation)
            values[start:end] = self._heads(h @ layer.attn_v.T)
            queries = rotate(self._heads(h @ layer.attn_q.T), rotation)
            x = x + attend(queries, keys[:end], values[:end]) @ layer.attn_output.T
            h = rms_norm(x, layer.ffn_norm, epsilon)
            gated: Floats = silu(h @ layer.ffn_gate.T) * (h @ layer.ffn_up.T)
            x = x + gated @ layer.ffn_down.T
        return x

    def logits(self, vectors: Floats) -> Floats:
        """Of the token after each of ``vectors``, shape (..., vocabulary size)."""
        normed = rms_norm(vectors, self.output_norm, self.shape.norm_epsilon)
        logits: Floats = normed @ self.output.T
        return logits

    def _heads(self, x: Floats) -> Floats:
        """(tokens, heads times head size) to (tokens, heads, head size)."""
        return x.reshape(len(x), -1, self.shape.head_size)

    def _rotation(self, start: int, end: int) -> NDArray[np.complex64]:
        """For each position from ``start`` on and each pair, shape (positions, 1, pairs)."""
        angles = np.arange(start, end)[:, None, None] * self.frequencies
        rotation: NDArray[np.complex64] = np.exp(1j * angles).astype(np.complex64)
        return rotation


def rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon))
    normed: Floats = x / scale * weight
    return normed


def softmax(x: Floats) -> Floats:
    """Along the last axis."""
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    result: Floats = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return result


def silu(x: Floats) -> Floats:
    """``x * sigmoid(x)``, written so that nothing overflows."""
    result: Floats = x * (np.float32(0.5) * (np.tanh(x * np.float32(0.5)) + 1))
    return result


def rotate(x: Floats, rotation: NDArray[np.complex64]) -> Floats:
    """RoPE: turn neighbouring pairs of ``x`` (tokens, heads, head size) by their position's angle.

    A query and a key turned so have a product that depends on their distance alone.
    """
    turned = 2 * rotation.shape[-1]
    pairs = np.ascontiguousarray(x[..., :turned]).view(np.complex64) * rotation
    return np.concatenate([pairs.view(np.float32), x[..., turned:]], axis=-1)


def attend(queries: Floats, keys: Floats, values: Floats) -> Floats:
    """``softmax(QK^T / sqrt(d)) V``; the last of the ``keys`` are those of the queries' own tokens.

    ``queries`` has shape (n, heads, d), ``keys`` and ``values`` (tokens, kv heads, d); returns
    (n, heads times d).
    """
    n, heads, d = queries.shape
    tokens, kv_heads, _ = keys.shape
    grouped = queries.reshape(n, kv_heads, -1, d).transpose(1, 2, 0, 3).reshape(kv_heads, -1, d)
    scores = grouped @ keys.transpose(1, 2, 0) / np.float32(np.sqrt(d))
    scores = scores.reshape(kv_heads, -1, n, tokens)
    if n > 1:  # no token sees those after it
        scores += np.triu(np.full((n, tokens), -np.inf, np.float32), k=tokens - n + 1)
    weights = softmax(scores).reshape(kv_heads, -1, tokens)
    mixed = weights @ values.transpose(1, 0, 2)
    return mixed.reshape(kv_heads, -1, n, d).transpose(2, 0, 1, 3).reshape(n, heads * d)
