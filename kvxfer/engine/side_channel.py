"""The side channel between the scheduler side and the worker sides of one host, which does not wait for a step of the engine.

An engine carries commands and reports between its scheduler and its workers once a step, and while other requests
decode, a step takes as long as a forward pass. Through this channel a fetch reaches the worker at once, and the result of a
load reaches the scheduler at once. Everything is said again with a step, so that a lost message, or a worker on another host,
costs only time.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from kvxfer.flag import Flag
from kvxfer.identity import Source
from kvxfer.logs import logger
from kvxfer.schedule import RankResult
from kvxfer.threads import NamedThread
from kvxfer.values import Fetch, Rank

__all__ = ["ChannelAddress", "DirectFetches", "RankResult", "Results", "SideChannel", "Take", "WorkerChannel"]

log = logger("kvxfer.engine")

NAMES = "kvxfer-side-"
"""The prefix of the sockets' names in the abstract namespace."""
LONGEST = 1 << 17
"""The most bytes of a message; a longer one goes with the step only."""
CONNECT_S = 0.2
PAUSE_MS = 100
"""Seconds for which no connection is accepted after the process has run out of descriptors."""
MAX_STRANGERS = 4
"""The most connections that have not sent the secret yet; for one more, the oldest is closed."""


class ChannelAddress(msgspec.Struct, frozen=True):
    """Where a worker side listens, and the secret that its scheduler side must send. Must not reach other engines."""

    name: str
    token: bytes


class DirectFetches(msgspec.Struct, frozen=True):
    """Fetches that go ahead of their step, and engines that later ones will need links to."""

    # the number of the first fetch; the others count up from it. Each comes again with its step, under its number
    first: int
    fetches: tuple[Fetch, ...] = ()
    prefetches: tuple[int, ...] = ()  # the numbers of those fetches that are prefetches
    # the engines to make links to, each with this engine's own directory if it has several workers
    prepare: tuple[tuple[Source, Source | None], ...] = ()


Take = Callable[[DirectFetches], None]
Results = Callable[[], Iterable[RankResult]]

_decode_fetches = msgspec.msgpack.Decoder(DirectFetches).decode
_decode_result = msgspec.msgpack.Decoder(RankResult).decode
_encode = msgspec.msgpack.Encoder().encode


class WorkerChannel:
    """A worker's end, with a thread of its own.

    Args:
        take: Called on that thread with what the scheduler side sends.
        results: Called on that thread after ``wake``; returns what is to be sent.

    Raises:
        OSError: No socket could be made.
    """

    def __init__(self, take: Take, results: Results) -> None:
        self._take, self._results = take, results
        name = f"{NAMES}{secrets.token_hex(12)}"
        self.address = ChannelAddress(name, secrets.token_bytes(16))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._listener.bind("\0" + name)  # no file, so it vanishes with the process
            self._listener.listen(128)
            self._listener.setblocking(False)
            self._wake = Flag()
        except BaseException:
            self._listener.close()
            raise
        self._peer: socket.socket | None = None  # our scheduler side
        self._strangers: dict[int, socket.socket] = {}  # connections that have not sent the token yet
        self._closing = self._deaf = False
        self._thread = NamedThread(target=self._run, name="kvxfer-channel")
        try:
            self._thread.start()
        except BaseException:
            self._listener.close()
            raise

    def wake(self) -> None:
        """Have ``results`` called soon. Any thread; never blocks."""
        if not self._closing:
            self._wake.set()

    def close(self) -> None:
        """Stop listening; may be called more than once."""
        if not self._closing:
            self._closing = True
            self._wake.set()
            self._thread.join(2.0)

    def _run(self) -> None:
        poll = select.poll()
        for waited in (self._listener, self._wake):
            poll.register(waited, select.POLLIN)
        try:
            while not self._closing:
                events = poll.poll(PAUSE_MS if self._deaf else None)
                if self._deaf:
                    self._deaf = False
                    poll.modify(self._listener.fileno(), select.POLLIN)
                for fd, _ in events:
                    try:
                        self._ready(fd, poll)
                    except OSError as e:
                        log.debug("side channel: %s", e)
                        self._forget(fd, poll)
                    except Exception:
                        log.exception(
                            "side channel: a message could not be handled and was ignored; it comes again with the step"
                        )
        finally:
            for s in (self._listener, self._peer, *self._strangers.values()):
                if s is not None:
                    s.close()

    def _ready(self, fd: int, poll: select.poll) -> None:
        if self._closing:
            return
        if fd == self._wake.fileno():
            self._wake.clear()
            for result in self._results():
                if self._peer is not None:
                    self._peer.send(_encode(result), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        elif fd == self._listener.fileno():
            try:
                found, _ = self._listener.accept()
            except BlockingIOError:
                return  # the other end has gone again
            except OSError:  # no descriptor is left; polled at once, the listener would be ready again
                poll.modify(fd, 0)
                self._deaf = True
                return
            found.setblocking(False)
            if len(self._strangers) >= MAX_STRANGERS:
                self._forget(next(iter(self._strangers)), poll)
            self._strangers[found.fileno()] = found
            poll.register(found.fileno(), select.POLLIN)
        elif fd in self._strangers:
            said = self._strangers[fd].recv(64)
            if self._peer is None and hmac.compare_digest(said, self.address.token):
                self._peer = self._strangers.pop(fd)
            else:
                self._forget(fd, poll)
        elif self._peer is not None and fd == self._peer.fileno():
            said = self._peer.recv(2 * LONGEST)
            if said:
                self._take(_decode_fetches(said))
            else:
                self._forget(fd, poll)

    def _forget(self, fd: int, poll: select.poll) -> None:
        gone = self._strangers.pop(fd, None)
        if self._peer is not None and self._peer.fileno() == fd:
            gone, self._peer = self._peer, None
        if gone is not None:
            poll.unregister(fd)
            gone.close()


class SideChannel:
    """The scheduler's end, to all workers of the engine. One thread."""

    def __init__(self) -> None:
        self._sockets: dict[Rank, socket.socket] = {}
        self._poll = select.poll()

    def connect(self, addresses: Mapping[Rank, ChannelAddress]) -> None:
        """Connect to all workers, or to none if one cannot be reached, as on another host."""
        self.close()
        for rank, address in addresses.items():
            s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            self._sockets[rank] = s
            try:
                s.settimeout(CONNECT_S)
                s.connect("\0" + address.name)
                s.send(address.token, socket.MSG_NOSIGNAL)
                s.setblocking(False)
                self._poll.register(s.fileno(), select.POLLIN)
            except OSError as e:
                log.info("rank %s is not on this host: fetches go with the engine's steps (%s)", rank, e)
                self.close()
                return

    @property
    def open(self) -> bool:
        """Whether all workers are connected."""
        return bool(self._sockets)

    def send(self, fetches: DirectFetches) -> bool:
        """Send to all workers without blocking; return False if some may not get it before its step."""
        raw = _encode(fetches)
        if len(raw) > LONGEST or not self._sockets:
            return False
        try:
            for s in self._sockets.values():
                s.send(raw, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as e:
            log.warning("the side channel is broken, fetches go with the engine's steps: %s", e)
            self.close()
            return False
        return True

    def receive(self, timeout: float = 0.0) -> list[RankResult]:
        """Return what workers have sent; wait for something for up to ``timeout`` seconds."""
        out: list[RankResult] = []
        until = time.monotonic() + timeout
        while self._sockets and not out:
            ready = {fd for fd, _ in self._poll.poll(max(0.0, until - time.monotonic()) * 1000)}
            for s in list(self._sockets.values()):
                if s.fileno() in ready and not self._read(s, out):
                    self.close()
                    break
            if not ready:
                break
        return out

    @staticmethod
    def _read(s: socket.socket, out: list[RankResult]) -> bool:
        """Read all that has arrived; return False if the other end is gone."""
        while True:
            try:
                said = s.recv(2 * LONGEST)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not said:
                return False
            out.append(_decode_result(said))

    def close(self) -> None:
        """Close the channel; may be called more than once."""
        for s in self._sockets.values():
            s.close()
        self._sockets.clear()
        self._poll = select.poll()
