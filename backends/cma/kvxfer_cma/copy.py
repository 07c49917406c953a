"""A batch on its way, one bounded step at a time."""

from __future__ import annotations

import enum
from typing import Protocol

from kvxfer.backend import CopyPool
from kvxfer.backend.runs import split_long
from kvxfer.block_table import Ints
from kvxfer_cma.vm import IOV_MAX, Pieces, Process

STEP_BYTES = 16 << 20
"""At most these bytes go in one system call of each thread. It cannot be broken off, so they bound how long a poll blocks: 4 ms at
4 GB/s, and some 30 ms into memory that was never touched. More calls cost more: each starts with cold caches."""

PIECE_BYTES = 256 << 10
"""Longer runs are cut, so that a few long ones among many short ones do not make every step short."""


class CopyStep(enum.Enum):
    """What is to be done after a step."""

    MORE = enum.auto()  # there is more to do at once
    WAIT = enum.auto()  # nothing to do before the peer answers
    DONE = enum.auto()


class Copy(Protocol):
    """A batch on its way."""

    def step(self) -> CopyStep:
        """Move some bytes.

        Raises:
            PeerError: The peer is gone or refuses; then the copy is over.
            OSError: The kernel does not copy; then the copy is over.
        """

    def moved(self) -> int:
        """Return how many bytes have been moved."""

    def drop(self) -> None:
        """Touch no registered memory of this side from now on."""


class DirectCopy:
    """Straight from one process's memory into the other's, by as many threads as it is large enough for."""

    def __init__(self, process: Process, pool: CopyPool, write: bool, local: Ints, remote: Ints, lengths: Ints) -> None:
        lengths, local, remote = split_long(PIECE_BYTES, lengths, local, remote)
        self._pool = pool
        longest = int(lengths.max(initial=1))
        runs_a_step = min(STEP_BYTES // longest, IOV_MAX - 1)
        n, self._nbytes = len(lengths), int(lengths.sum())
        shares = max(1, min(pool.shares(self._nbytes), n))
        cuts = [n * i // shares for i in range(shares + 1)]
        self._shares = [
            _Share(
                process,
                write,
                Pieces(local[lo:hi], lengths[lo:hi]),
                Pieces(remote[lo:hi], lengths[lo:hi]),
                hi - lo,
                runs_a_step,
            )
            for lo, hi in zip(cuts, cuts[1:], strict=False)
        ]

    def step(self) -> CopyStep:
        self._pool.do([share.step for share in self._shares])
        self._shares = [share for share in self._shares if share.left]
        return CopyStep.MORE if self._shares else CopyStep.DONE

    def moved(self) -> int:
        return self._nbytes - sum(share.left_bytes for share in self._shares)

    def drop(self) -> None:
        """Nothing to do: no step is under way."""


class _Share:
    """What one thread copies."""

    def __init__(self, process: Process, write: bool, local: Pieces, remote: Pieces, count: int, at_once: int) -> None:
        self._move = process.write if write else process.read
        self._local, self._remote = local, remote
        self._at, self._end, self._at_once = 0, count, at_once

    @property
    def left(self) -> bool:
        return self._at < self._end

    @property
    def left_bytes(self) -> int:
        return self._local.nbytes(self._at, self._end)

    def step(self) -> None:
        lo = self._at
        self._at = min(lo + self._at_once, self._end)
        self._move(self._local, self._remote, lo, self._at)
