"""A link: what this side reads from a peer, and what the peer reads from here."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvxfer.backend.memories import Memories
from kvxfer.errors import PeerError
from kvxfer.transport.contract import Completion
from kvxfer_tcp.connection import Loop
from kvxfer_tcp.endpoint import Endpoint
from kvxfer_tcp.options import Options
from kvxfer_tcp.reader import Reader
from kvxfer_tcp.server import Server
from kvxfer_tcp.vectors import Pipes
from kvxfer_tcp.wire import greeting


class Link:
    """Both directions of a link; what ends one ends the other, too.

    Attributes:
        broken: Why it is of no more use, or ``None``.
        dial_by: When it must be connected, if it dials at all.
    """

    def __init__(
        self,
        loop: Loop,
        options: Options,
        memories: Memories,
        mine: Endpoint,
        theirs: Endpoint,
        pipes: Pipes,
        done: Callable[[Completion], None],
    ) -> None:
        self.mine, self.theirs = mine, theirs
        self.broken: PeerError | None = None
        self.dial_by = math.inf
        self.reader = Reader(loop, options, mine, theirs, pipes, done, self.cut)
        most = min(mine.connections, theirs.connections)
        self.server = Server(loop, memories, frozenset(mine.lends), most, greeting(theirs.token), pipes, self.cut)

    def dial(self) -> None:
        """Connect to where the peer is."""
        try:
            self.reader.dial()
        except OSError as e:
            self.cut(f"it cannot be reached: {e}")

    def cut(self, why: str) -> None:
        """End the link: all that is in flight on it fails."""
        if self.broken is None:
            self.broken = PeerError(why)
            self.server.close()
            self.reader.fail(why)
