"""A link: what this side reads from a peer, and what the peer reads from here."""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.backend import LinkBase
from kvxfer.backend.memories import Memories
from kvxfer.errors import KvxferError, PeerError
from kvxfer.transport.contract import Completion
from kvxfer_tcp.connection import Loop
from kvxfer_tcp.endpoint import Endpoint
from kvxfer_tcp.options import Options
from kvxfer_tcp.read import Read
from kvxfer_tcp.reader import Reader
from kvxfer_tcp.server import Server
from kvxfer_tcp.vectors import Pipes
from kvxfer_tcp.wire import greeting


class Link(LinkBase[Read]):
    """Both directions of a link; what ends one ends the other, too. It is up once this side can read."""

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
        super().__init__(done, options.connect_timeout_s)
        self.mine, self.theirs = mine, theirs
        self.peer = f"{theirs.agent!r} at {theirs.host}:{theirs.port}"
        self._reader = Reader(loop, options, mine, theirs, pipes, self.end, self.lose)
        most = min(mine.connections, theirs.connections)
        self.server = Server(loop, memories, frozenset(mine.lends), most, greeting(theirs.token), pipes, self.lose)
        if theirs.lends:
            try:
                self._reader.dial()
            except OSError as e:
                self.lose(f"it cannot be reached: {e}")

    def failed(self, read: Read, why: Exception) -> str:
        return f"reading {read.nbytes} bytes from {self.peer} failed after {read.nbytes - read.left} bytes: {why}"

    def greet(self) -> bool:
        return self._reader.connected

    def post(self, read: Read) -> None:
        self._reader.start(read)

    def stop(self, read: Read) -> None:
        """End a batch; what still comes for it is dropped."""
        self._reader.forget(read)
        self.end(read, PeerError("aborted here"))

    def moved(self, read: Read) -> int:
        """Return how many bytes of a batch have come."""
        return self._reader.moved(read)

    def bye(self, cause: KvxferError, says: str | None) -> None:
        self.server.close()
        self._reader.close()
        for read in list(self.flights.values()):
            self.end(read, cause)
