"""A link: what this side reads from a peer, and what the peer reads from here."""

from __future__ import annotations

import math
import socket
import threading
from collections import deque
from collections.abc import Callable

from kvxfer.backend.memories import Memories
from kvxfer.errors import PeerError
from kvxfer.flag import Flag
from kvxfer.threads import NamedThread
from kvxfer.transport.contract import Completion
from kvxfer_tcp.connection import Address, Loop
from kvxfer_tcp.endpoint import Endpoint
from kvxfer_tcp.options import Options
from kvxfer_tcp.reader import Reader
from kvxfer_tcp.server import Server
from kvxfer_tcp.vectors import Pipes
from kvxfer_tcp.wire import greeting

__all__ = ["Link", "Names", "numeric"]

LOOKUPS = 64
"""The most names of hosts that are looked up at once."""


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

    def dial(self, addresses: list[Address] | OSError) -> None:
        """Connect to where the peer is, as far as that has been found out."""
        if self.broken is not None:
            return
        try:
            if isinstance(addresses, OSError):
                raise addresses
            self.reader.dial(addresses, self.dial_by)
        except OSError as e:
            self.cut(f"it cannot be reached: {e}")

    def cut(self, why: str) -> None:
        """End the link: all that is in flight on it fails."""
        if self.broken is None:
            self.broken = PeerError(why)
            self.server.close()
            self.reader.fail(why)


def numeric(host: str, port: int) -> list[Address] | None:
    """Return the address that a host is named by, or ``None`` for one that must be looked up."""
    try:
        return _look_up(host, port, socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None


def _look_up(host: str, port: int, flags: int = 0) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, tuple(address)) for family, _, _, _, address in found]


class Names:
    """Looks names of hosts up, which may take minutes, on threads of its own. Peers name hosts, so there are only some threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: deque[Link] = deque()
        self._threads = 0
        self._found: list[tuple[Link, list[Address] | OSError]] = []
        self._news = Flag()
        self._closed = False

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``found`` has something to tell."""
        return self._news.fileno()

    def look_up(self, link: Link) -> None:
        """Find out where the peer of a link is, unless the link ends before its turn comes."""
        with self._lock:
            self._wanted.append(link)
            if self._threads == LOOKUPS:
                return
            self._threads += 1
        try:
            NamedThread(target=self._run, name="kvxfer-tcp-name").start()
        except RuntimeError:  # there are none left; one that runs does it, or the link is given up in time
            with self._lock:
                self._threads -= 1

    def found(self) -> list[tuple[Link, list[Address] | OSError]]:
        """Return what has been found since, or why nothing has."""
        with self._lock:
            self._news.clear()
            found, self._found = self._found, []
            return found

    def close(self) -> None:
        """Take no more answers."""
        with self._lock:
            self._closed = True
            self._wanted.clear()
            self._news.close()

    def _run(self) -> None:
        while (link := self._next()) is not None:
            answer: list[Address] | OSError
            try:
                answer = _look_up(link.theirs.host, link.theirs.port)
            except (OSError, UnicodeError) as e:
                answer = e if isinstance(e, OSError) else OSError(str(e))
            with self._lock:
                if not self._closed:
                    self._found.append((link, answer))
                    self._news.set()

    def _next(self) -> Link | None:
        """Return a link whose peer is to be found; ``None`` ends the thread."""
        with self._lock:
            while self._wanted:
                link = self._wanted.popleft()
                if link.broken is None:
                    return link
            self._threads -= 1
            return None
