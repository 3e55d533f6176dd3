"""Accounting of the context's cells.

llama.cpp has no public call that tells how many cells are in use, and sequences share cells after
a range copy, so the engine keeps its own books: which cells each sequence holds, and how many
sequences hold each cell. Cell numbers here stand in for llama.cpp's own; like it, new tokens take
the lowest free ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Cells = NDArray[np.int32]


class CellLedger:
    """Cells of one unified context: ``size`` of them, held by any number of sequences."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._holders = np.zeros(size, dtype=np.int32)
        self._held: dict[int, _Held] = {}
        self._used = 0
        self._lowest = 0
        """No cell below this one is free."""

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
        return self._held[seq].count if seq in self._held else 0

    def alone(self, seq: int) -> int:
        """Cells that would become free if ``seq`` went away."""
        if seq not in self._held:
            return 0
        return int(np.count_nonzero(self._holders[self._held[seq].cells] == 1))

    def append(self, seq: int, count: int) -> None:
        """Give ``seq`` ``count`` new cells. The caller has checked :attr:`free`."""
        if count > self.free:
            raise ValueError(f"{count} cells wanted, {self.free} free")
        self._used += count
        held = self._held.get(seq)
        if held is None:
            held = self._held[seq] = _Held()
        if count == 1 and not self._holders[self._lowest]:  # a decode step, nearly always
            self._holders[self._lowest] = 1
            held.append_one(self._lowest)
            self._lowest += 1
            return
        new = np.flatnonzero(self._holders[self._lowest :] == 0)[:count] + self._lowest
        self._holders[new] = 1
        self._lowest = int(new[-1]) + 1
        held.append(new.astype(np.int32))

    def share(self, source: int, target: int, length: int) -> None:
        """Let ``target``, which holds nothing, hold the first ``length`` cells of ``source``."""
        cells = self._held[source].cells[:length]
        self._holders[cells] += 1
        self._held[target] = _Held()
        self._held[target].append(cells)

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first ``length`` tokens of ``seq`` and let the rest go."""
        if seq not in self._held or length >= self._held[seq].count:
            return
        gone = self._held[seq].cut(length)
        self._holders[gone] -= 1
        free = gone[self._holders[gone] == 0]
        if free.size:
            self._used -= free.size
            self._lowest = min(self._lowest, int(free.min()))
        if not length:
            del self._held[seq]


class _Held:
    """The cells of one sequence, in order, in a buffer that grows."""

    def __init__(self) -> None:
        self._buffer: Cells = np.empty(256, dtype=np.int32)
        self.count = 0

    @property
    def cells(self) -> Cells:
        return self._buffer[: self.count]

    def append(self, cells: Cells) -> None:
        end = self.count + len(cells)
        if end > len(self._buffer):
            self._buffer = np.resize(self._buffer, 2 * end)
        self._buffer[self.count : end] = cells
        self.count = end

    def append_one(self, cell: int) -> None:
        if self.count == len(self._buffer):
            self._buffer = np.resize(self._buffer, 2 * self.count)
        self._buffer[self.count] = cell
        self.count += 1

    def cut(self, length: int) -> Cells:
        """Keep the first ``length``; returns the others."""
        gone = self._buffer[length : self.count]
        self.count = length
        return gone
