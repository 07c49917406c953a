"""Runs of a batch: cut where they are too long to move at once, or copied piece by piece through memory of the back end's own."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable

import numpy as np

from kvxfer.block_table import Ints

__all__ = ["RunCursor", "split_long"]


def split_long(limit: int, lengths: Ints, *offsets: Ints) -> tuple[Ints, ...]:
    """Cut runs longer than ``limit`` bytes and drop empty ones; return the new lengths, then each new array of offsets."""
    if not len(lengths) or (int(lengths.max()) <= limit and int(lengths.min()) > 0):
        return lengths, *offsets
    pieces = -(-lengths // limit)
    run = np.repeat(np.arange(len(lengths)), pieces)
    skip = (np.arange(len(run)) - (np.cumsum(pieces) - pieces)[run]) * limit
    return np.minimum(lengths[run] - skip, limit), *(o[run] + skip for o in offsets)


class RunCursor:
    """A position in the runs of a batch, seen as one sequence of bytes; ``left`` is how many are left."""

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        """Start at the first byte. ``runs``: the address and length of each run, as from ``Memories.runs``."""
        self._runs = deque((address, n) for address, n in runs if n)
        self.left = sum(n for _, n in self._runs)

    def gather(self, to: int, nbytes: int) -> None:
        """Copy the next bytes to address ``to``."""
        for address, n in self._next(nbytes):
            ctypes.memmove(to, address, n)
            to += n

    def scatter(self, source: int, nbytes: int) -> None:
        """Copy bytes from address ``source`` to where the next bytes belong."""
        for address, n in self._next(nbytes):
            ctypes.memmove(address, source, n)
            source += n

    def _next(self, nbytes: int) -> Iterable[tuple[int, int]]:
        if nbytes > self.left:
            raise ValueError(f"{nbytes} bytes of a batch that has {self.left} left")
        self.left -= nbytes
        while nbytes:
            address, length = self._runs.popleft()
            n = min(length, nbytes)
            if n < length:
                self._runs.appendleft((address + n, length - n))
            nbytes -= n
            yield address, n
