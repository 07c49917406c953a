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
import threading
from collections.abc import Callable, Iterable, Mapping

import msgspec

from kvxfer import clock
from kvxfer.backend.door import UnixDoor, knock
from kvxfer.backend.wakeup import Wakeup
from kvxfer.errors import TransportError
from kvxfer.identity import Source
from kvxfer.logs import logger
from kvxfer.schedule import RankResult
from kvxfer.threads import NamedThread
from kvxfer.values import Fetch, Rank

log = logger("kvxfer.engine")

NAMES = "kvxfer-side-"
"""The prefix of the names of the workers' doors."""
LONGEST = 1 << 17
"""The most bytes of a message; a longer one goes with the step only."""


class ChannelAddress(msgspec.Struct, frozen=True):
    """Where a worker side listens, and the secret that its scheduler side must send. Must not reach other engines."""

    name: str
    token: bytes


class DirectFetches(msgspec.Struct, frozen=True):
    """Fetches that go ahead of their step, and engines that later ones will need links to."""

    fetches: tuple[Fetch, ...] = ()  # each comes again with its step
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
        results: Called on that thread after ``wake``, or when something comes; returns what is to be sent.

    Raises:
        OSError: No socket could be made.
    """

    def __init__(self, take: Take, results: Results) -> None:
        self._take, self._results = take, results
        self._wakeup = Wakeup()
        self._door = UnixDoor("side", self._wakeup)
        self.address = ChannelAddress(self._door.name, secrets.token_bytes(16))
        self._peer: socket.socket | None = None  # our scheduler side
        self._closing = False
        self._thread = NamedThread(target=self._run, name="kvxfer-channel")
        try:
            self._thread.start()
        except BaseException:
            self._door.close()
            self._wakeup.close()
            raise

    def wake(self) -> None:
        """Have ``results`` called soon. Any thread; never blocks."""
        if not self._closing:
            self._wakeup.set()

    def close(self) -> None:
        """Stop listening; may be called more than once."""
        if not self._closing:
            self._closing = True
            self._wakeup.set()
            if threading.current_thread() is not self._thread:
                self._thread.join(2.0)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wakeup.fileno(), select.POLLIN)
        try:
            while not self._closing:
                poll.poll()
                for source in self._wakeup.clear():
                    try:
                        self._ready(source)
                    except OSError as e:
                        log.debug("side channel: %s", e)
                        self._forget()
                    except Exception:
                        log.exception(
                            "side channel: a message could not be handled and was ignored; it comes again with the step"
                        )
                if not self._closing:
                    self._send()
        finally:
            self._forget()
            self._door.close()
            self._wakeup.close()

    def _send(self) -> None:
        try:
            for result in self._results():
                if self._peer is not None:
                    self._peer.send(_encode(result), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as e:
            log.debug("side channel: %s", e)
            self._forget()
        except Exception:
            log.exception("side channel: a result could not be sent; it comes again with the step")

    def _ready(self, source: object) -> None:
        if source is self._peer and self._peer is not None:
            said = self._peer.recv(2 * LONGEST)
            if said:
                self._take(_decode_fetches(said))
            else:
                self._forget()
            return
        stranger = self._door.answer(source)
        if stranger is None:
            return
        if self._peer is None and hmac.compare_digest(stranger.recv(64), self.address.token):
            self._peer = stranger
            self._wakeup.add(stranger.fileno(), stranger)
        else:
            stranger.close()

    def _forget(self) -> None:
        """Let the scheduler side go; it may connect again."""
        if self._peer is not None:
            self._wakeup.remove(self._peer.fileno())
            self._peer.close()
            self._peer = None


class SideChannel:
    """The scheduler's end, to all workers of the engine. One thread."""

    def __init__(self) -> None:
        self._sockets: dict[Rank, socket.socket] = {}
        self._poll = select.poll()

    def connect(self, addresses: Mapping[Rank, ChannelAddress]) -> None:
        """Connect to all workers, or to none if one cannot be reached, as on another host."""
        self.close()
        for rank, address in addresses.items():
            try:
                self._sockets[rank] = s = knock(address.name, f"rank {rank}")
                s.send(address.token, socket.MSG_NOSIGNAL)
                self._poll.register(s.fileno(), select.POLLIN)
            except (OSError, TransportError) as e:
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
        until = clock.now() + timeout
        while self._sockets and not out:
            ready = {fd for fd, _ in self._poll.poll(max(0.0, until - clock.now()) * 1000)}
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
