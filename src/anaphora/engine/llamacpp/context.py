"""The context: decode calls, and KV going in and out of it through llama.cpp's public API.

Ranges of a sequence leave by way of a scratch sequence (range copy, then state export) and come
back the same way (state import, then range copy). Range copies need a unified KV buffer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from anaphora.cache.keys import Tokens
from anaphora.engine.llamacpp import logs
from anaphora.engine.llamacpp.model import LlamaModel
from anaphora.engine.llamacpp.params import Params
from anaphora.errors import ContextMemoryError, EngineError

GRID = 64
"""Prefill cuts lie on multiples of this: kernels change with a chunk's shape, but not across it."""

_byte_pointer = ctypes.POINTER(ctypes.c_uint8)


class NoCells(EngineError):
    """llama.cpp found no free cells for a batch."""


class LlamaContext:
    """A llama.cpp context of ``cells`` cells and ``sequences`` sequences, numbered from 0."""

    def __init__(
        self, model: LlamaModel, params: Params, cells: int, sequences: int, *, ranges: bool
    ) -> None:
        """Make a context; ``ranges``: whether ranges of sequences can be copied, and so exported.

        Raises :class:`ContextMemoryError` where llama.cpp can't make it.
        """
        self.cells = cells
        self._scratch = sequences  # one more than the caller has
        params.context.n_ctx = cells
        params.context.n_seq_max = sequences + ranges
        params.context.kv_unified = ranges
        # llama.cpp aborts where one token of every sequence doesn't fit one batch.
        least = max(GRID, sequences + ranges)
        params.context.n_batch = max(min(params.context.n_batch, cells), least)
        params.context.n_ubatch = min(params.context.n_ubatch, params.context.n_batch)
        with logs.errors() as errors:
            self._context: Any = lib.llama_init_from_model(model.pointer, params.context)
        if not self._context:
            why = errors[-1] if errors else "llama.cpp gives no reason"
            raise ContextMemoryError(
                f"no context of {cells} tokens can be made ({why}): "
                "use a smaller context, fewer requests at a time, or q8_0 as KV type"
            )
        self._memory = lib.llama_get_memory(self._context)
        self.batch_size = int(lib.llama_n_batch(self._context))
        self.microbatch_size = int(lib.llama_n_ubatch(self._context))
        self._vocabulary_size = model.vocabulary.size
        self._batch = _Batch(self.batch_size)
        if model.adapters:
            pointers = (lib.llama_adapter_lora_p_ctypes * len(model.adapters))(
                *(ctypes.cast(a[0], lib.llama_adapter_lora_p_ctypes) for a in model.adapters)
            )
            scales = (ctypes.c_float * len(model.adapters))(*(a[1] for a in model.adapters))
            lib.llama_set_adapters_lora(self._context, pointers, len(model.adapters), scales)

    @property
    def pointer(self) -> Any:
        return self._context

    def warm_up(self, token: int) -> None:
        """Touch every weight once, as a first decode would."""
        lib.llama_set_warmup(self._context, True)
        self.prefill(0, np.array([token], dtype=np.int32), 0, want_logits=True)
        lib.llama_set_warmup(self._context, False)
        # The warm-up ran every expert, and llama.cpp would use its graph again for the next single
        # token: a batch of another size takes the graph's place.
        self.prefill(0, np.array([token, token], dtype=np.int32), 1, want_logits=True)
        lib.llama_memory_clear(self._memory, True)
        lib.llama_synchronize(self._context)

    def prefill(self, seq: int, tokens: Tokens, start: int, *, want_logits: bool) -> None:
        """Compute ``tokens`` (n ≤ batch size) at positions from ``start`` on."""
        count = len(tokens)
        batch = self._batch
        batch.token[:count] = tokens
        batch.position[:count] = np.arange(start, start + count, dtype=np.int32)
        batch.sequence[:count] = seq
        batch.output[:count] = 0
        batch.output[count - 1] = want_logits
        self._decode(count)

    def decode(self, seqs: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Compute one token for each of several sequences; row i's logits belong to ``seqs[i]``."""
        count = len(seqs)
        batch = self._batch
        batch.token[:count] = tokens
        batch.position[:count] = positions
        batch.sequence[:count] = seqs
        batch.output[:count] = 1
        self._decode(count)

    def logits(self, row: int = -1) -> NDArray[np.float32]:
        """A copy of one row of the latest logits, shape (vocabulary size,)."""
        pointer = lib.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, shape=(self._vocabulary_size,)).copy()

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Let ``target`` share ``source``'s cells of positions [start, end)."""
        lib.llama_memory_seq_cp(self._memory, source, target, start, end)

    def truncate(self, seq: int, length: int) -> None:
        """Drop positions from ``length`` on. A whole sequence can always be dropped."""
        start = length if length else -1
        if not lib.llama_memory_seq_rm(self._memory, seq, start, -1):
            raise EngineError(f"llama.cpp refused to cut a sequence at {length}")

    def export(
        self, seq: int, start: int, end: int, store: Callable[[int, Callable[[Any], bool]], bool]
    ) -> bool:
        """Hand the state of positions [start, end) out.

        ``store(size, fill)`` gets its size in bytes and calls ``fill`` with a writable buffer of
        that size. Returns what ``store`` returns.
        """
        self.copy(seq, self._scratch, start, end)
        try:
            size = int(lib.llama_state_seq_get_size(self._context, self._scratch))

            def fill(buffer: Any) -> bool:
                view = (ctypes.c_uint8 * size).from_buffer(buffer)
                written = lib.llama_state_seq_get_data(
                    self._context, ctypes.cast(view, _byte_pointer), size, self._scratch
                )
                return int(written) == size

            return store(size, fill)
        finally:
            self.truncate(self._scratch, 0)

    def restore(self, seq: int, state: Any, start: int, end: int, block_end: int) -> bool:
        """Put positions [start, end) of an exported state that ends at ``block_end`` into ``seq``.

        Returns False, with nothing changed, where llama.cpp doesn't take the state or it isn't
        of the positions it should be.
        """
        size = len(state)
        view = (ctypes.c_uint8 * size).from_buffer(state)
        taken = lib.llama_state_seq_set_data(
            self._context, ctypes.cast(view, _byte_pointer), size, self._scratch
        )
        last = int(lib.llama_memory_seq_pos_max(self._memory, self._scratch))
        right = int(taken) == size and last == block_end - 1
        if right:
            self.copy(self._scratch, seq, start, end)
            right = int(lib.llama_memory_seq_pos_max(self._memory, seq)) == end - 1
        self.truncate(self._scratch, 0)
        return right

    def close(self) -> None:
        if self._context:
            lib.llama_free(self._context)
            self._context = None

    def _decode(self, count: int) -> None:
        self._batch.struct.n_tokens = count
        status = int(lib.llama_decode(self._context, self._batch.struct))
        if status == 1:
            raise NoCells(f"no cells for {count} tokens")
        if status:
            raise EngineError(f"llama.cpp failed to decode {count} tokens (status {status})")


class _Batch:
    """A ``llama_batch`` over NumPy arrays, one sequence a token."""

    def __init__(self, size: int) -> None:
        self.token = np.zeros(size, dtype=np.int32)
        self.position = np.zeros(size, dtype=np.int32)
        self.sequence = np.zeros(size, dtype=np.int32)
        self.output = np.zeros(size, dtype=np.int8)
        self._counts = np.ones(size, dtype=np.int32)
        self._rows = self.sequence.ctypes.data + 4 * np.arange(size, dtype=np.uint64)
        self.struct = lib.llama_batch()
        self.struct.token = self.token.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self.struct.embd = None
        self.struct.pos = self.position.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self.struct.n_seq_id = self._counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self.struct.seq_id = ctypes.cast(
            self._rows.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))
        )
        self.struct.logits = self.output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
