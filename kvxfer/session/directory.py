"""The engine's directory: one address, served by the scheduler half, that finds all of the engine's ranks.

It also carries what scheduler halves say to each other about requests that no worker knows yet: keep the lease
of those (``Renew``), free those (``Settle``).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque

from kvxfer.errors import PeerError
from kvxfer.identity import Source
from kvxfer.security import OPEN, Complaints, Security
from kvxfer.session import messages as m
from kvxfer.session import wire

__all__ = ["Directory"]

log = logging.getLogger("kvxfer.directory")

ANY_EPOCH = 0
"""The epoch of a source that a router named before the engine could say its own. The transfer's id and digest must then
suffice to tell an engine from one that was there before."""
_IDLE_S = 60.0  # a socket to another directory that was not used for so long is closed


class Directory:
    """Serve the card of engine ``engine`` on ``host``:``port`` (0: any free port) from a thread of its own.

    ``security``: who may connect and be dialled. All methods may be called from any thread and do not block. Raises
    ``OSError`` when the address cannot be had.
    """

    def __init__(
        self, engine: str, epoch: int, host: str, port: int, advertise: str | None = None, *,
        security: Security = OPEN,
    ) -> None:  # fmt: skip
        self.engine, self.epoch = engine, epoch
        self._members: tuple[m.Member, ...] = ()
        self._hub = wire.Hub(security)
        try:
            self._router, bound = self._hub.listen(host, port)
        except OSError:
            self._hub.close()
            raise
        self.source = Source(advertise or host, bound, epoch)
        self._notices: deque[m.Renew | m.Settle] = deque(maxlen=100_000)
        self._outbox: deque[tuple[Source, m.Message]] = deque(maxlen=100_000)
        self._peers: dict[tuple[str, int], tuple[wire.Socket, float]] = {}
        self._complain = Complaints(log)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvxfer-directory", daemon=True)
        self._thread.start()

    def publish(self, members: tuple[m.Member, ...]) -> None:
        """Set the engine's ranks. Until then lookups get no answer, and whoever asks asks again."""
        self._members = members

    def notices(self) -> list[m.Renew | m.Settle]:
        """What other engines' scheduler halves have said about our transfers since the last call."""
        out: list[m.Renew | m.Settle] = []
        with contextlib.suppress(IndexError):
            while True:
                out.append(self._notices.popleft())
        return out

    def tell(self, source: Source, message: m.Renew | m.Settle) -> None:
        """Send a notice to another engine's directory; it may be lost, so what matters is repeated or leased."""
        self._outbox.append((source, message))
        self._hub.wake()

    def close(self) -> None:
        """Stop serving. Idempotent; returns within two seconds."""
        self._closed = True
        self._hub.wake()
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self._hub.close()

    def _run(self) -> None:
        while not self._closed:
            try:
                self._turn()
            except Exception:
                log.exception("directory: something could not be handled; it is dropped")

    def _turn(self) -> None:
        ready = self._hub.poll(1.0)
        if self._router in ready:
            for _ in range(256):  # a flood on the socket must not keep the outbox waiting
                frames = wire.receive(self._router)
                if frames is None:
                    break
                self._answer(frames)
        while self._outbox:
            self._deliver(*self._outbox.popleft())
        now = time.monotonic()
        for key, (sock, used) in list(self._peers.items()):
            while wire.receive(sock) is not None:
                pass  # directories do not answer notices; what a stranger says in their place is not kept
            if now - used > _IDLE_S:
                self._hub.drop(sock)
                del self._peers[key]

    def _answer(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 2:
                raise PeerError(f"{len(frames)} frames where two were expected")
            msg = m.decode(frames[1])
        except PeerError as e:
            wire.send(self._router, m.Refused(f"not understood by kvxfer protocol {m.PROTOCOL}", False), to=frames[0])
            self._complain("directory: ignored a message: %s", e)
            return
        match msg:
            case m.Lookup() if self._members:
                card = m.Card(m.PROTOCOL, self.engine, self.epoch, self._members)
                wire.send(self._router, card, to=frames[0])
            case m.Renew() | m.Settle() if msg.epoch in (self.epoch, ANY_EPOCH):
                self._notices.append(msg)
            case _:
                pass  # a lookup that comes too early, or news for an engine that was here before

    def _deliver(self, source: Source, message: m.Message) -> None:
        key = (source.host, source.port)
        try:
            sock = self._peers[key][0] if key in self._peers else self._hub.dial(wire.address(*key))
        except PeerError as e:
            self._complain("directory: a notice for %s is lost: %s", source, e)
            return
        self._peers[key] = (sock, time.monotonic())
        if not wire.send(sock, message):
            self._complain("directory: %s does not take our notices", source)
