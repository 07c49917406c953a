"""A batch as the reading side has it: cut into requests that a peer will take."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kvxfer.backend import Submitted
from kvxfer.backend.runs import split_long
from kvxfer.block_table import Ints
from kvxfer_tcp.vectors import IovecTable

ASK_RUNS, ASK_BYTES = 8192, 1 << 30
"""Runs and bytes of one request: what the peer must keep for it is bounded by both."""

OPEN_ASKS = 32
"""Requests of a link that wait at the peer, at most."""

MIN_CHUNK, SHARED_CHUNK, MAX_CHUNK = 128 << 10, 2 << 20, 8 << 20
"""Bytes of a chunk: at least, at most where several connections share a batch, and at most. A whole chunk may still come on
a connection for a batch that was aborted. Where a chunk ends a reader may have to wait once more, so they are long."""


@dataclass(eq=False)
class Read(Submitted):
    """A batch.

    ``left``: bytes that have not come; ``told``: those that have come, as was told; ``asks``: requests that have not been made.
    """

    local: Ints
    memory: int
    remote: Ints
    lengths: Ints
    nbytes: int = 0
    left: int = 0
    told: int = 0
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

    def tell(self, come: int) -> int:
        """Return how many bytes to tell of. What has left the kernel may not be counted yet, and nothing is taken back."""
        self.told = min(max(self.told, come), self.nbytes)
        return self.told

    def chunk_bytes(self, connections: int) -> int:
        """Return how long the chunks of its requests are, which these connections share."""
        share = -(-self.nbytes // (8 * connections * MIN_CHUNK)) * MIN_CHUNK
        return MAX_CHUNK if connections == 1 else min(share, SHARED_CHUNK)


class ReadAsk:
    """A request that is under way, and where its bytes go."""

    def __init__(self, number: int, read: Read, lo: int, hi: int, chunk: int) -> None:
        self.number, self.read = number, read
        self.table = IovecTable(read.local[lo:hi], read.lengths[lo:hi], chunk)
        self.missing = bytearray(b"\1" * self.table.chunks)
        self.left = self.table.chunks
