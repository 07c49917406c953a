"""A batch as the reading side has it: cut into requests that a peer will take."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kvxfer.backend.runs import split_long
from kvxfer.geometry.plan import Ints
from kvxfer.transport.contract import Fence

__all__ = ["ASK_BYTES", "ASK_RUNS", "Read"]

ASK_RUNS, ASK_BYTES = 8192, 1 << 30
"""Runs and bytes of one request: what the peer must keep for it is bounded by both."""


@dataclass(eq=False)
class Read:
    """A batch that has not ended. ``left``: bytes that have not come; ``asks``: requests that have not been made."""

    number: int
    local: Ints
    memory: int
    remote: Ints
    lengths: Ints
    after: Fence | None
    nbytes: int = 0
    left: int = 0
    asks: deque[tuple[int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        if len(self.lengths) and not int(self.lengths.min()):
            keep = self.lengths > 0
            self.local, self.remote, self.lengths = self.local[keep], self.remote[keep], self.lengths[keep]
        ends = np.cumsum(self.lengths)
        self.nbytes = self.left = int(ends[-1]) if len(ends) else 0
        if len(ends) <= ASK_RUNS and self.nbytes <= ASK_BYTES:
            self.asks.extend([(0, len(ends))] if len(ends) else [])
            return
        if int(self.lengths.max()) > ASK_BYTES:
            self.lengths, self.local, self.remote = split_long(ASK_BYTES, self.lengths, self.local, self.remote)
            ends = np.cumsum(self.lengths)
        lo = 0
        while lo < len(ends):
            before = int(ends[lo - 1]) if lo else 0
            hi = min(lo + ASK_RUNS, int(np.searchsorted(ends, before + ASK_BYTES, side="right")))
            self.asks.append((lo, hi))
            lo = hi
