"""A batch on its way, one bounded step at a time."""

from __future__ import annotations

import enum
from typing import Protocol

import numpy as np

from kvxfer.geometry.plan import Ints
from kvxfer_cma.vm import IOV_MAX, Pieces, Process

__all__ = ["Copy", "Direct", "Step", "split_long"]

STEP_BYTES = 16 << 20
"""At most these bytes go in one system call. It cannot be broken off, so they bound how long a poll blocks: 4 ms at
4 GB/s, and some 30 ms into memory that was never touched. More calls cost more: each starts with cold caches."""

PIECE_BYTES = 256 << 10
"""Longer runs are cut, so that a few long ones among many short ones do not make every step short."""


class Step(enum.Enum):
    MORE = enum.auto()  # there is more to do at once
    WAIT = enum.auto()  # nothing to do before the peer answers
    LATER = enum.auto()  # nothing to do yet, and nothing will tell: try again soon
    DONE = enum.auto()


class Copy(Protocol):
    def step(self) -> Step:
        """Move some bytes. Raises ``PeerError`` or ``OSError``; then the copy is over."""

    def drop(self) -> None:
        """Touch no registered memory of this side from now on."""


def split_long(limit: int, lengths: Ints, *offsets: Ints) -> tuple[Ints, ...]:
    """Cut runs longer than ``limit`` and drop empty ones: new lengths, then the offsets that go with them."""
    if not len(lengths) or (int(lengths.max()) <= limit and int(lengths.min()) > 0):
        return lengths, *offsets
    pieces = -(-lengths // limit)
    run = np.repeat(np.arange(len(lengths)), pieces)
    skip = (np.arange(len(run)) - (np.cumsum(pieces) - pieces)[run]) * limit
    return np.minimum(lengths[run] - skip, limit), *(o[run] + skip for o in offsets)


class Direct:
    """Straight from one process's memory into the other's."""

    def __init__(self, process: Process, write: bool, local: Ints, remote: Ints, lengths: Ints) -> None:
        lengths, local, remote = split_long(PIECE_BYTES, lengths, local, remote)
        self._process, self._move = process, process.write if write else process.read
        self._local, self._remote = Pieces(local, lengths), Pieces(remote, lengths)
        self._at, self._end = 0, len(lengths)
        longest = int(lengths.max(initial=1))
        self._runs_a_step = min(STEP_BYTES // longest, IOV_MAX - 1)

    def step(self) -> Step:
        if not self._process.ready():
            return Step.LATER
        lo, hi = self._at, min(self._at + self._runs_a_step, self._end)
        self._at = hi
        self._move(self._local, self._remote, lo, hi)
        return Step.MORE if hi < self._end else Step.DONE

    def drop(self) -> None:
        self._at = self._end
