"""One end of a link: what its peer shows of it, looked at before every batch."""

from __future__ import annotations

from kvxfer.errors import PeerError, TransportError
from kvxfer_mooncake.cells import Cell
from kvxfer_mooncake.endpoint import Endpoint
from kvxfer_mooncake.library import LibraryEngine
from kvxfer_mooncake.peer import Peer

__all__ = ["Link"]

LOOK_S = (0.002, 0.05)
"""How often to look for a peer that has not connected: in the first second, and later."""


class Link:
    """A link: how many looks at the peer's cell have begun, the last one that found it up, and why nothing can move any more.

    ``space``: the peer's memory, as it was lent to this side. ``lent``: of this side's memory, what was lent to the peer.
    """

    def __init__(self, number: int, cell: Cell, mine: Endpoint, theirs: Endpoint, peer: Peer, now: float) -> None:
        """Show the peer that this end is there."""
        self.number, self.agent, self.their_token, self.peer = number, theirs.agent, theirs.token, peer
        self.space, self.lent = theirs.space(), mine.memories
        self.looks = self.seen = 0
        self.broken: PeerError | None = None
        self.cell = cell
        self._there, self._my_token = theirs.cell, mine.token
        self._request: int | None = None
        self._began, self.next_look = now, now
        cell.show(theirs.token)

    def __str__(self) -> str:
        return f"peer {self.agent!r} (link {self.number})"

    @property
    def looking(self) -> bool:
        return self._request is not None

    def look(self, engine: LibraryEngine, now: float) -> None:
        """Begin to look at the peer's cell, unless that is being done or was done just now."""
        if self.broken is not None or self.looking:
            return
        if not self.peer.opened:
            if self.peer.error is not None:
                self._fail(self.peer.error)
            self.next_look = now + LOOK_S[0]
        elif now >= self.next_look:
            try:
                self._request = engine.post(
                    False, self.peer.name, self.cell.seen_at, self._there, len(self.their_token)
                )
            except TransportError as e:
                self._fail(str(e))
            else:
                self.looks += 1
                self.peer.posted += 1

    def take_in(self, engine: LibraryEngine, now: float) -> None:
        """Process what a look has found, if it has ended."""
        if self._request is None or (succeeded := engine.ended(self._request)) is None:
            return
        self._request = None
        self.peer.posted -= 1
        if not succeeded:
            self._fail("Mooncake cannot read from its process any more: it has died, or the connection has failed")
        elif self.cell.seen == self._my_token:
            self.seen = self.looks
        elif self.cell.seen == self.their_token:
            self.next_look = now + LOOK_S[now > self._began + 1]
        else:
            self._fail("the peer has closed the link")

    def close(self, why: str) -> None:
        """Let the peer see that the link is closed, and no batch move any more."""
        self.cell.wipe()
        self._fail(why)

    def _fail(self, why: str) -> None:
        if self.broken is None:
            self.broken = PeerError(f"{self} is lost: {why}")
