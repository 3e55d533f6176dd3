"""Accounting of the context's cells.

llama.cpp has no public call that tells how many cells are in use, and sequences share cells after
a range copy, so the engine keeps its own books: which cells each sequence holds, and how many
sequences hold each cell. Cell numbers here stand in for llama.cpp's own; like it, new tokens take
the lowest free ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class CellLedger:
    """Cells of one unified context: ``size`` of them, held by any number of sequences."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._holders = np.zeros(size, dtype=np.int32)
        self._held: dict[int, NDArray[np.int32]] = {}
        self._used = 0

    @property
    def used(self) -> int:
        """Cells held by at least one sequence."""
        return self._used

    @property
    def free(self) -> int:
        return self.size - self._used

    @property
    def top(self) -> int:
        """One past the highest cell in use: what an attention step has to look at."""
        used = np.flatnonzero(self._holders)
        return int(used[-1]) + 1 if used.size else 0

    def length(self, seq: int) -> int:
        """Tokens sequence ``seq`` holds."""
        held = self._held.get(seq)
        return 0 if held is None else len(held)

    def alone(self, seq: int) -> int:
        """Cells that would become free if ``seq`` went away."""
        held = self._held.get(seq)
        return 0 if held is None else int(np.count_nonzero(self._holders[held] == 1))

    def append(self, seq: int, count: int) -> None:
        """Give ``seq`` ``count`` new cells. The caller has checked :attr:`free`."""
        if count > self.free:
            raise ValueError(f"{count} cells wanted, {self.free} free")
        new = np.flatnonzero(self._holders == 0)[:count].astype(np.int32)
        self._holders[new] = 1
        self._used += count
        held = self._held.get(seq)
        self._held[seq] = new if held is None else np.concatenate([held, new])

    def share(self, source: int, target: int, length: int) -> None:
        """Let ``target``, which holds nothing yet, hold the first ``length`` cells of ``source``."""
        cells = self._held[source][:length].copy()
        self._holders[cells] += 1
        self._held[target] = cells

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first ``length`` tokens of ``seq`` and let the rest go."""
        held = self._held.get(seq)
        if held is None or length >= len(held):
            return
        gone = held[length:]
        self._holders[gone] -= 1
        self._used -= int(np.count_nonzero(self._holders[gone] == 0))
        if length:
            self._held[seq] = held[:length]
        else:
            del self._held[seq]
