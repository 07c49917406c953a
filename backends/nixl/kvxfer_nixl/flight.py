"""A batch on its way: posted to NIXL piece by piece, and watched until NIXL is done with every piece.

Pieces, because posting may be copying (CMA), at 10 GB/s, or cost microseconds a descriptor (GPUs): a call must end in
bounded time. A handle is released only when NIXL says that it is over: a released handle goes on moving bytes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from kvxfer import clock
from kvxfer.backend import CopyPool, look_again
from kvxfer.backend.runs import split_long
from kvxfer.block_table import Ints
from kvxfer.errors import TransportError
from kvxfer.transport.contract import Completion, Fence
from kvxfer_nixl.agent import Side
from kvxfer_nixl.link import Link, Peer

PIECE_BYTES = 16 << 20
"""Memory in one piece if posting copies it: some milliseconds of copying, and of a slow link the time for which nothing is known, because
NIXL tells nothing of a piece before it has ended. With half as much, 134 MB took some 5 % longer between two processes of one host."""
COPIED_BYTES, COPIED_S = 4 << 20, 250e-12
"""Posting copies if a piece of at least this many bytes takes this number of seconds a byte. It always does in host memory; in GPU memory
where UCX has no better way than through the host, as within one process: at 0.6 GB/s, so that a call would take seconds."""
PIECE_RUNS = 4096
"""Descriptors in one piece: at most some 20 ms of posting."""
WINDOW = 4
"""Pieces posted and not done: enough for the fastest link, little enough to wait for when a batch is given up."""
GIVE_UP_S = 0.5
"""How long a batch that has failed on our side waits for NIXL to be done with it, before it ends without being quiet."""
SETTLE_S = 0.02
"""After an error of NIXL's: time for it to flush what else is queued on the broken connection."""
LINK_S = (0.005, 0.05)
"""How often to look for the peer's greeting: in the first second, and later."""


@dataclass
class _Posted:
    """What became of a piece, the descriptors ``rows``: ``handle``, unless none could be made; why it could not, or could not be posted."""

    rows: slice
    handle: int | None = None
    done: bool = False
    error: TransportError | None = None


class Flight:
    """``number``: of the batch. ``pool``: posts host memory, several pieces at the same time."""

    def __init__(
        self,
        number: int,
        operation: Literal["read", "write"],
        link: Link,
        local: Side,
        remote: Side,
        fence: Fence | None,
        pool: CopyPool,
    ) -> None:
        self.number, self.link = number, link
        self._operation, self._fence, self._pool = operation, fence, pool
        on_host = not (local[0] or remote[0])
        copied = on_host or link.peer is None or link.peer.copies
        self._local, self._remote, self._cuts = _pieces(local, remote, pool if on_host else None, copied)
        self._start = 0
        self._handles: dict[int, slice] = {}  # with the rows of each piece
        self._moved = 0
        self._posted = clock.now()  # the last time; at first, when the batch was started
        self._error: TransportError | None = None
        self._earliest, self._latest = 0.0, 0.0

    def advance(self, now: float, until: float) -> Completion | None:
        """Look what is done, post more until the time ``until``, and say whether this is the end."""
        self._look()
        if self._cuts or self._handles:
            if (error := self.link.broken) is not None:
                self.give_up(str(error), now, error)
            if self._error is None and self._ready(now):
                self._post(until)
        if self._error is not None:
            if now >= (self._latest if self._handles else self._earliest):
                return Completion(self.number, self._error, quiet=not self._handles)
        elif not self._handles and not self._cuts:
            return Completion(self.number)
        return None

    def give_up(self, why: str, now: float, cause: Exception | None = None) -> None:
        """Post no more, and end with an error as soon as NIXL is done with what was posted, or waited for long enough.

        The first reason counts.
        """
        if self._error is None:
            self._latest = now + GIVE_UP_S
            lengths = self._local[1][:, 1]
            what = f"{self._operation.upper()} of {int(lengths.sum())} bytes in {len(lengths)} runs with {self.link}"
            self._error = TransportError(f"{what} failed: {why}")
            self._error.__cause__ = cause

    def moved(self) -> int:
        """Return the bytes of the pieces that NIXL is done with."""
        if self._error is None:
            sizes = self._local[1][:, 1]
            under_way = sum(int(sizes[rows].sum()) for rows in self._handles.values())
            self._moved = int(sizes[: self._start].sum()) - under_way
        return self._moved

    def linger(self) -> bool:
        """After the end: whether NIXL is still not done."""
        self._look()
        return bool(self._handles)

    def drop(self) -> None:
        """Release all handles, whatever they are doing: when the connection or the agent is no more."""
        for handle in self._handles:
            self._peer.agent.release(handle)
        self._handles.clear()

    def due(self, now: float) -> float:
        """When to look again."""
        if self._handles:
            return look_again(self._posted, now)
        if self._error is not None:
            return self._earliest
        if not self.link.up:
            return now + LINK_S[now > self.link.began + 1]
        return now if self._fence is None else look_again(self._posted, now)

    def _ready(self, now: float) -> bool:
        if not self.link.up:
            self.link.greet(now)
            return False
        if self._fence is not None and self._fence.passed():
            self._fence = None
        return self._fence is None

    @property
    def _peer(self) -> Peer:
        """The peer that a piece was posted to, or may be: the link is up by then."""
        assert self.link.peer is not None
        return self.link.peer

    def _post(self, until: float) -> None:
        on_host = not (self._local[0] or self._remote[0])
        while self._cuts and len(self._handles) < WINDOW and self._error is None and clock.now() < until:
            at_once = min(len(self._cuts), WINDOW - len(self._handles), self._pool.size if on_host else 1)
            posted = [_Posted(self._next()) for _ in range(at_once)]
            try:
                self._pool.do([partial(self._post_one, each) for each in posted])
            except RuntimeError:
                if self._pool.size > 1:
                    raise
                for piece in posted:  # the system gives no more threads; what none has tried is ours
                    if piece == _Posted(piece.rows):
                        self._post_one(piece)
            finally:
                self._take_in(posted)

    def _next(self) -> slice:
        """Return the rows of the next piece."""
        rows = slice(self._start, self._cuts.popleft())
        self._start = rows.stop
        return rows

    def _post_one(self, result: _Posted) -> None:
        """On any thread. NIXL binds what is made to a worker of the thread that makes it."""
        peer = self._peer
        here, there = ((kind, table[result.rows]) for kind, table in (self._local, self._remote))
        try:
            result.handle = peer.agent.prepare(self._operation, here, there, peer.name)
            began = clock.now()
            result.done = peer.agent.post(result.handle)
            took = clock.now() - began
            if (here[0] or there[0]) and (nbytes := int(here[1][:, 1].sum())) >= COPIED_BYTES:
                peer.copies = took > nbytes * COPIED_S
        except TransportError as e:
            result.error = e

    def _take_in(self, results: list[_Posted]) -> None:
        self._posted = clock.now()
        for r in results:
            if r.handle is None:
                if r.error is not None:
                    self.give_up(str(r.error), self._posted, r.error)
            elif r.error is not None:
                self._break(r.handle, r.error)
            elif r.done:
                self._peer.agent.release(r.handle)
            else:
                self._handles[r.handle] = r.rows

    def _look(self) -> None:
        for handle in list(self._handles):
            agent = self._peer.agent
            try:
                if agent.done(handle):
                    del self._handles[handle]
                    agent.release(handle)
            except TransportError as e:
                del self._handles[handle]
                self._break(handle, e)

    def _break(self, handle: int, error: TransportError) -> None:
        """Note that the connection has failed: its worker has closed it, and nothing of this piece moves any more.

        Of others, which another worker may have, NIXL has to say so.
        """
        self._peer.agent.release(handle)
        self._peer.error = self._peer.error or error
        now = clock.now()
        self.give_up(str(error), now, error)
        self._earliest = now + SETTLE_S


def _pieces(local: Side, remote: Side, pool: CopyPool | None, copied: bool) -> tuple[Side, Side, deque[int]]:
    """Return the same bytes, and where to cut them: indices into the rows, the last one their number.

    What is ``copied`` by posting into shares for a ``pool``, none larger than ``PIECE_BYTES``; a longer run becomes several.
    """
    sizes = local[1][:, 1]
    if not len(sizes):
        return local, remote, deque()
    nbytes = int(np.add.reduce(sizes)) if copied else 0
    shares = pool.shares(nbytes) if pool is not None else 1
    if len(sizes) <= PIECE_RUNS and nbytes <= PIECE_BYTES and shares == 1:
        return local, remote, deque([len(sizes)])
    longest = int(np.maximum.reduce(sizes))
    share = -(-nbytes // shares)
    most = min(PIECE_BYTES, share + (longest if longest < share // 8 else 0))  # no small piece is left over
    if copied and longest > most:
        local, remote = _shorten(local, remote, most)
    ends = np.cumsum(local[1][:, 1])
    cuts, start, n = deque[int](), 0, len(ends)
    while start < n:
        end = min(start + PIECE_RUNS, n)
        if copied:
            before = ends[start - 1] if start else np.uint64(0)
            full = int(np.searchsorted(ends, before + np.uint64(most), side="right"))
            end = min(end, max(start + 1, full))
        cuts.append(end)
        start = end
    return local, remote, cuts


def _shorten(local: Side, remote: Side, longest: int) -> tuple[Side, Side]:
    """Return the same bytes in runs of at most ``longest``."""
    columns = local[1][:, 1], local[1][:, 0], remote[1][:, 0]
    lengths, here, there = split_long(longest, *(column.astype(np.int64) for column in columns))

    def side(old: Side, starts: Ints) -> Side:
        table = np.full((len(lengths), 3), old[1][0], np.uint64)  # all on one device
        table[:, 0], table[:, 1] = starts, lengths
        return old[0], table

    return side(local, here), side(remote, there)
