"""The sockets of one transport: those through which peers ask it, and those through which it asks peers."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from kvxfer.backend.door import UnixDoor
from kvxfer.backend.memories import Memories
from kvxfer.backend.wakeup import Wakeup
from kvxfer.errors import TransportError
from kvxfer_cma.endpoint import Endpoint
from kvxfer_cma.ring import Asker, Server

__all__ = ["Relay"]

AT_ONCE = 8
"""Requests of one peer that are answered before the others get their turn."""


class Relay:
    """Serves runs of ``memories`` to a peer that knows a link that was offered and opened; ``name`` is where.

    ``wakeup`` wakes when ``handle`` has something to do. An asker counts from when it names its link; what it
    asks before the link is opened stays in its socket until then.
    """

    def __init__(self, wakeup: Wakeup, memories: Memories) -> None:
        self._door = UnixDoor("cma", wakeup)
        self.name = self._door.name
        self._wakeup, self._memories = wakeup, memories
        self._open: dict[bytes, bool] = {}
        self._lent: dict[bytes, tuple[frozenset[int], bool]] = {}
        self._servers: dict[Server, bytes] = {}  # with the link they serve
        self._askers: set[Asker] = set()

    def offer(self, link: bytes, lent: Iterable[int], writable: bool) -> None:
        """``lent``: the memories that a peer of this link may read, or if ``writable`` read and write."""
        self._open[link] = False
        self._lent[link] = frozenset(lent), writable

    def open(self, link: bytes) -> None:
        self._open[link] = True
        for server in self._of(link):
            self._wakeup.add(server.fileno(), server)

    def withdraw(self, link: bytes) -> None:
        """Stop serving the peer of this link."""
        for server in self._of(link):
            self._drop(server)
        del self._open[link], self._lent[link]

    def dial(self, peer: Endpoint) -> Asker:
        """Ask a peer for copies.

        Raises:
            TransportError: It cannot be reached.
        """
        if peer.socket is None:
            raise TransportError(
                f"{peer.agent} runs with `mode: vm`, and this side cannot, or is set not to, copy from its "
                "memory directly; set `mode: auto` there"
            )
        asker = Asker(peer.socket, peer.link, peer.agent)
        self._askers.add(asker)
        self._wakeup.add(asker.fileno(), asker)
        return asker

    def hang_up(self, asker: Asker) -> None:
        """Idempotent; its batches fail at their next step."""
        if asker in self._askers:
            self._askers.remove(asker)
            self._wakeup.remove(asker.fileno())
            asker.close()

    def handle(self, readable: Iterable[object]) -> bool:
        """Answer and take answers, without waiting. ``readable``: what ``wakeup`` named. True if some were ours."""
        did = False
        for source in readable:
            did = True
            stranger = self._door.answer(source)
            if stranger is not None:
                self._admit(stranger)
            elif isinstance(source, Asker) and source in self._askers:
                if not source.receive():
                    self.hang_up(source)
            elif isinstance(source, Server) and source in self._servers:
                self._serve(source)
        return did

    def close(self) -> None:
        for asker in list(self._askers):
            self.hang_up(asker)
        for server in list(self._servers):
            self._drop(server)
        self._door.close()

    def _admit(self, stranger: socket.socket) -> None:
        """Take in who names a link. A link has one asker: another takes its place."""
        server = Server(stranger, self._memories)
        try:
            link = server.open()
        except OSError:
            link = b""
        if link not in self._open:
            server.close()  # gone, or not one of ours; it sees the socket close, and that is its answer
            return
        for former in self._of(link):
            self._drop(former)
        self._servers[server] = link
        server.lend(*self._lent[link])
        if self._open[link]:
            self._wakeup.add(server.fileno(), server)

    def _serve(self, server: Server) -> None:
        try:
            server.serve(AT_ONCE)
        except OSError:  # gone, or it breaks the protocol
            self._drop(server)

    def _of(self, link: bytes) -> list[Server]:
        return [s for s, served in self._servers.items() if served == link]

    def _drop(self, server: Server) -> None:
        link = self._servers.pop(server)
        if self._open[link]:
            self._wakeup.remove(server.fileno())
        server.close()
