"""A batch on its way: one request of Mooncake's for each run, some of them posted, and each asked about until it has ended."""

from __future__ import annotations

import time

from kvxfer.backend import look_again
from kvxfer.backend.runs import split_long
from kvxfer.errors import TransportError
from kvxfer.geometry.plan import Ints
from kvxfer.transport import Completion, Fence, Verb
from kvxfer_mooncake.library import LibraryEngine
from kvxfer_mooncake.link import Link

__all__ = ["Flight"]

PIECE_BYTES = 4 << 20
"""A longer run is several requests: those that were posted go on after an abort."""
WINDOW, WINDOW_BYTES = 64, 32 << 20
"""Requests of a batch that are posted and have not ended."""
PEER_WINDOW = 256
"""Requests to a peer that have not ended, of all batches."""
GIVE_UP_S = 0.5
"""How long a batch that has failed on our side waits for what was posted, before it ends without being quiet."""
LOST_S = 3.0
"""How long one of which a request has failed waits to know whether the link is lost: Mooncake lets a second pass before it
connects to the same peer again."""


class Flight:
    """A batch. ``here`` and ``there`` are addresses, one for each run."""

    def __init__(
        self, number: int, verb: Verb, link: Link, here: Ints, there: Ints, lengths: Ints, fence: Fence | None
    ) -> None:
        self.number, self.link = number, link
        self._write, self._fence = verb is Verb.WRITE, fence
        self._what = f"{verb.upper()} of {int(lengths.sum())} bytes in {len(lengths)} runs with {link}"
        self._pieces = _pieces(here, there, lengths)
        self._next = 0
        self._posted: dict[int, int] = {}  # bytes of each request
        self._posted_bytes = 0
        self._moved = 0
        self._posted_at = time.monotonic()  # the last time; at first, when the batch was started
        self._after: int | None = link.looks  # of which looks a later one has to find the link up, before bytes move
        self._error: TransportError | None = None
        self._latest = 0.0

    def advance(self, engine: LibraryEngine, now: float, until: float) -> Completion | None:
        """Look what has ended, post more until the time ``until``, and say whether this is the end."""
        if not self._ask(engine) and self._error is None:
            self.give_up("a request of it failed; Mooncake has written the reason to stderr", now)
            self._after, self._latest = self.link.looks, now + LOST_S
        if self.link.broken is not None:
            self.give_up(str(self.link.broken), now, self.link.broken)
        ready = self._ready(engine, now)
        if self._error is not None:
            over = not self._posted and (ready or self.link.broken is not None)
            return Completion(self.number, self._error, quiet=not self._posted) if over or now >= self._latest else None
        if ready:
            self._post(engine, until)
        return Completion(self.number) if ready and not self._posted and self._next == len(self._pieces) else None

    def give_up(self, why: str, now: float, cause: Exception | None = None) -> None:
        """Post no more, and end with an error when what was posted has ended, or was waited for long enough.

        The first reason counts.
        """
        if self._error is None:
            self._latest = now + GIVE_UP_S
            self._after = self._fence = None
            self._error = TransportError(f"{self._what} failed: {why}")
            self._error.__cause__ = cause

    def moved(self) -> int:
        """Return the bytes of the requests that have ended."""
        if self._error is None:
            self._moved = sum(nbytes for _, _, nbytes in self._pieces[: self._next]) - self._posted_bytes
        return self._moved

    def linger(self, engine: LibraryEngine) -> bool:
        """After the end: whether some requests have still not ended."""
        self._ask(engine)
        return bool(self._posted)

    def due(self, now: float) -> float:
        """When to advance again."""
        soon = look_again(self._posted_at, now)
        if self._fence is not None or self._posted or self.link.looking:
            return soon
        return max(soon, self.link.next_look)

    def _ready(self, engine: LibraryEngine, now: float) -> bool:
        """Whether memory may be touched: after the fence, and once the link was seen to be up."""
        if self._fence is not None:
            if not self._fence.passed():
                return False
            self._fence, self._after = None, self.link.looks
        self.link.take_in(engine, now)
        if self._after is not None and self.link.seen > self._after:
            self._after = None
        if self._after is not None:
            self.link.look(engine, now)
        return self._after is None

    def _post(self, engine: LibraryEngine, until: float) -> None:
        peer = self.link.peer
        while (
            self._next < len(self._pieces)
            and len(self._posted) < WINDOW
            and self._posted_bytes < WINDOW_BYTES
            and peer.posted < PEER_WINDOW
            and time.monotonic() < until
        ):
            here, there, nbytes = self._pieces[self._next]
            try:
                request = engine.post(self._write, peer.name, here, there, nbytes)
            except TransportError as e:
                self.give_up(str(e), time.monotonic(), e)
                return
            self._next += 1
            self._posted[request] = nbytes
            self._posted_bytes += nbytes
            peer.posted += 1
            self._posted_at = time.monotonic()

    def _ask(self, engine: LibraryEngine) -> bool:
        """Forget the requests that have ended. Returns false if one of them has failed."""
        well = True
        for request in list(self._posted):
            succeeded = engine.ended(request)
            if succeeded is not None:
                self._posted_bytes -= self._posted.pop(request)
                self.link.peer.posted -= 1
                well &= succeeded
        return well


def _pieces(here: Ints, there: Ints, lengths: Ints) -> list[tuple[int, int, int]]:
    """Return address here, address there and bytes of each request; none is empty."""
    lengths, here, there = split_long(PIECE_BYTES, lengths, here, there)
    return list(zip(here.tolist(), there.tolist(), lengths.tolist(), strict=True))
