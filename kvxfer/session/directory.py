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

import zmq

from kvxfer.errors import PeerError
from kvxfer.session import messages as m
from kvxfer.session import wire
from kvxfer.session.values import Source

__all__ = ["Directory"]

log = logging.getLogger("kvxfer.directory")

_IDLE_S = 60.0  # a socket to another directory that was not used for so long is closed


class Directory:
    """Serve the card of engine ``engine`` on ``host``:``port`` (0: any free port) from a thread of its own.

    All methods may be called from any thread and do not block. Raises ``OSError`` when the address cannot be had.
    """

    def __init__(self, engine: str, epoch: int, backend: str, host: str, port: int, advertise: str | None = None) -> None:
        self.engine, self.epoch, self.backend = engine, epoch, backend
        self._members: tuple[m.Member, ...] = ()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router, bound = wire.listen(self._context, host, port)
        self.source = Source(advertise or host, bound, epoch)
        self._notices: deque[m.Renew | m.Settle] = deque(maxlen=100_000)
        self._outbox: deque[tuple[Source, m.Message]] = deque(maxlen=100_000)
        self._pull, self._push = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._pull.bind("inproc://wake")
        self._push.connect("inproc://wake")
        self._push_lock = threading.Lock()
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
        self._wake()

    def close(self) -> None:
        """Stop serving. Idempotent; returns within two seconds."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self._push.close(0)
            self._context.term()

    def _wake(self) -> None:
        with self._push_lock, contextlib.suppress(zmq.ZMQError):
            self._push.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        peers: dict[tuple[str, int], tuple[zmq.Socket[bytes], float]] = {}
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._pull, zmq.POLLIN)
        while not self._closed:
            poller.poll(1000)
            while wire.receive(self._pull) is not None:
                pass
            for _ in range(256):  # a flood on the socket must not keep the outbox waiting
                frames = wire.receive(self._router)
                if frames is None:
                    break
                self._answer(frames)
            self._deliver(peers)
        for sock, _ in peers.values():
            sock.close(0)
        self._router.close(0)
        self._pull.close(0)

    def _answer(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 2:
                raise PeerError(f"{len(frames)} frames where two were expected")
            msg = m.decode(frames[1])
        except PeerError as e:
            log.warning("directory: ignored a message: %s", e)
            return
        match msg:
            case m.Lookup() if self._members:
                card = m.Card(m.PROTOCOL, self.engine, self.epoch, self.backend, self._members)
                wire.send(self._router, card, to=frames[0])
            case m.Renew(epoch=self.epoch) | m.Settle(epoch=self.epoch):
                self._notices.append(msg)
            case _:
                pass

    def _deliver(self, peers: dict[tuple[str, int], tuple[zmq.Socket[bytes], float]]) -> None:
        now = time.monotonic()
        while self._outbox:
            source, message = self._outbox.popleft()
            key = (source.host, source.port)
            sock = peers[key][0] if key in peers else wire.dial(self._context, wire.address(*key))
            peers[key] = (sock, now)
            if not wire.send(sock, message):
                log.warning("directory: %s does not take our notices", source)
        for key, (sock, used) in list(peers.items()):
            if now - used > _IDLE_S:
                sock.close(0)
                del peers[key]
