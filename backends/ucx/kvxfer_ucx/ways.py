"""Which of UCX's two contexts a link uses: the one with shared memory, or the one with networks (``kvxfer.backend.ucx.split``)."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.backend import Liveness
from kvxfer.backend.introduction import Introduction
from kvxfer.errors import PeerError
from kvxfer_ucx.connection import Connection


@dataclass
class Ways:
    """The ways to a peer, of which one is chosen, once."""

    network: Connection | None  # the worker that waits for the peer on a network
    there: bytes  # the address of the peer's; empty if it has none
    liveness: Liveness | None  # the socket to a peer of this host
    host: Connection | None = None  # the worker that waits for it there, if it may
    introduction: Introduction | None = None  # what the two tell each other over that socket

    def choose(self) -> Connection | None:
        """Return the worker to use, whose endpoint leads to the peer; ``None`` while the peer has not said what it takes.

        Raises:
            PeerError: There is no way to the peer.
        """
        address = None
        if self.introduction is not None:
            self.introduction.hear()
            if not self.introduction.over:
                return None
            address = self.introduction.address
        if address is not None:
            chosen, self.host = self.host, None
        elif self.network is not None and self.there:
            chosen, self.network, address = self.network, None, self.there
        else:
            raise PeerError(self._lack())
        assert chosen is not None  # this side has said yes
        self.close()
        try:
            chosen.connect(address)
        except PeerError:
            chosen.destroy()
            raise
        return chosen

    def close(self) -> None:
        """Give back what was not chosen."""
        for unused in (self.host, self.network):
            if unused is not None:
                unused.destroy()
        self.host = self.network = None

    def _lack(self) -> str:
        if self.liveness is None:
            where = "it runs on another host or in another network namespace, or has ended"
        else:
            where = "it runs as another user or in another pid namespace, or may not use shared memory"
        side = "this side" if self.network is None else "it"
        return f"{where}, and {side} has no network: 'listen' is a loopback address, or 'TLS' allows none"
