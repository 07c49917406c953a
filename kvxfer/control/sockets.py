"""The control connections of one thread: polls them, and closes those that have to go (``accept.py``)."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator, Sized
from functools import partial

from kvxfer import clock
from kvxfer.backend.door import short_of_descriptors
from kvxfer.control.accept import AcceptPolicy
from kvxfer.control.connection import ControlConnection, Destination
from kvxfer.control.key_watch import KeyWatch
from kvxfer.control.ports import listener
from kvxfer.errors import PeerError
from kvxfer.failures import FailureKind
from kvxfer.flag import Flag
from kvxfer.identity import Address, IdentityError, is_ip, parse_address
from kvxfer.security import Security

__all__ = ["GUEST_FRAME", "ControlConnection", "ControlSockets", "address"]

GUEST_FRAME = 256 << 10
"""The most bytes of a guest's frame: ten times the hello of a model with 126 layers."""
_ACCEPTS, _LOOKS = 8, 64
"""The most connections that are accepted at once, each of which may take a millisecond, and with those that are refused."""
_EVENTS = 64
"""The most connections that are handled in a turn, but for handshakes."""
REST_S = 0.1
"""Seconds until the next try when nobody could be accepted, as where the process has no descriptor left."""


def address(host: str, port: int) -> str:
    """Return the written form of a control socket's address, with brackets around an IPv6 host."""
    return f"tcp://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"tcp://{host}:{port}"


class ControlSockets:
    """The control connections of one thread, which polls them and can be woken by others.

    Any thread may make it, before the one that runs it starts; only that one may close it. Any thread may call ``wake``.

    Args:
        security: Who may connect and be dialled.
        inbox: What other threads leave for this one before they ``wake`` it.
        patience: Seconds after which a connection made from here is lost if what was sent has not reached the peer's system. None: TCP
            goes on for a quarter of an hour, which is for owners that hear from each peer.

    Attributes:
        policy: Says how many there may be, and who goes.
    """

    def __init__(self, security: Security, inbox: Sized = (), patience: float | None = None) -> None:
        self._security, self._inbox, self._patience = security, inbox, patience
        self.policy = AcceptPolicy(security)
        self._epoll = select.epoll()
        self._flag = Flag()
        self._epoll.register(self._flag, select.EPOLLIN)
        self._asleep = False
        self._listener: socket.socket | None = None
        self._rests_until: float | None = None  # while the listener is not polled
        self._by_fd: dict[int, ControlConnection] = {}
        self._dirty: set[ControlConnection] = set()
        # Those with frames, and those lost without the owner's knowing yet.
        self._ready: dict[ControlConnection, None] = {}
        self._busy: dict[ControlConnection, None] = {}  # those that had frames left after their turn
        self._to_busy = True  # whose turn was the last
        self._more: set[ControlConnection] = set()
        self._beginning: set[ControlConnection] = set()  # those that dialled, and are in their handshake
        self._keys = KeyWatch(security, self.wake)

    def listen(self, host: str, port: int) -> int:
        """Accept connections from now on, and return the port; 0 takes a free one.

        Raises:
            OSError: The address is not available.
        """
        self._listener = sock = listener(host, port)
        self._epoll.register(sock, select.EPOLLIN)
        return int(sock.getsockname()[1])

    def dial(self, where: str, destination: Destination | None, limit: int, by: str = "") -> ControlConnection:
        """Begin a connection, over which messages may be sent at once; if it cannot be made, it is ``lost``.

        ``where`` came from a peer, whose host is ``by``; empty: it is the peer. ``destination`` is for the owner to recognise it.
        ``limit``: the most bytes of a frame that may come.

        Raises:
            PeerError: ``where`` is not an address, or may not be dialled.
        """
        try:
            if not where.startswith("tcp://"):
                raise IdentityError(f"{where!r} is not tcp://HOST:PORT")
            target = parse_address(where.removeprefix("tcp://"))
            if target.host == "localhost":
                target = Address("127.0.0.1", target.port)
            if not is_ip(target.host):
                raise PeerError(f"{target.host!r} is a name: engines are dialled by address", kind=FailureKind.REFUSED)
            self._security.check_target(target)
        except (IdentityError, PeerError) as e:
            raise PeerError(f"cannot dial {where[:200]!r}: {e}", kind=e.kind) from None
        keys = self._secured, self._security.proved
        conn = ControlConnection(target.host, destination, limit, self._dirty, *keys, guest=False, met=bool(by))
        self._keys.when_read(partial(self._begin, conn, target))
        return conn

    def keep(self, conn: ControlConnection, limit: int) -> None:
        """No longer count a connection as a guest; its peer may send frames of ``limit`` bytes from now on."""
        self.policy.discard(conn)
        conn.guest, conn.limit = False, limit

    def put_back(self, conn: ControlConnection, frame: bytes) -> None:
        """Return a received frame; it and those after it wait until ``go_on``."""
        conn.put_back(frame)
        conn.waits = True

    def go_on(self, conn: ControlConnection) -> bool:
        """Receive from a connection again; return whether there is something to receive now."""
        conn.waits = False
        if conn.lost is None:
            self._settle(conn)
        return conn.lost is None and conn.ready

    def drop(self, conn: ControlConnection) -> None:
        """Close a connection after sending what can be sent at once; the owner is not told. Idempotent."""
        conn.told = True
        conn.flush()
        conn.finish()
        conn.lose("it was closed here")
        self._forget(conn)
        self._unready(conn)

    def finish(self, conn: ControlConnection) -> None:
        """Close a connection once what is queued has been sent."""
        if conn.lost is None:
            conn.finish()
            self._unready(conn)
            if not conn.guest:
                conn.guest = True  # until the peer has hung up, it may be cut off like a guest
                self.policy.guest(conn)

    def poll(self, seconds: float) -> set[ControlConnection]:
        """Wait up to ``seconds`` for something to do; read and write without blocking.

        Return the connections from which something may have come.
        """
        self._asleep = True  # before the keys and the inbox are looked at, so that a thread that fills them later wakes this thread
        for past in self._keys.turn(self._by_fd.values()):
            self._security.turned_away(past.host, gone := f"its key {past.key_id} is no longer in the key file")
            self._lose(past, gone)
        if self._rests_until is not None:
            seconds = min(seconds, REST_S)
            if clock.now() >= self._rests_until:
                self._rest(None)
        idle = not (self._inbox or self._ready or self._busy or self._more)
        events = self._epoll.poll(seconds if idle else 0, _EVENTS + len(self._beginning))
        self._asleep = False
        more, self._more = self._more, set()
        shaking: list[ControlConnection] = []
        for fd, _ in events:
            conn = self._by_fd.get(fd)
            if conn is not None and conn in self._beginning:
                shaking.append(conn)
            elif conn is not None:
                if len(more) < _EVENTS:
                    more.add(conn)
            elif fd == self._flag.fileno():
                self._flag.clear()
            elif self._listener is not None and fd == self._listener.fileno():
                self._accept()
        if shaking:
            more.update(self.policy.next(shaking))
        for conn in more:
            if conn.pump():
                self._more.add(conn)
            self._settle(conn)
        return more

    def ready(self) -> Iterator[ControlConnection]:
        """Yield the connections that have frames, or are lost, each once.

        Those that are not reached now come first the next time. Those that had more than a turn's frames and the others
        alternate, so that floods do not keep newcomers waiting.
        """
        for _ in range(len(self._ready) + len(self._busy)):
            self._to_busy = not self._to_busy
            queue = (self._busy or self._ready) if self._to_busy else (self._ready or self._busy)
            conn = next(iter(queue), None)
            if conn is None:
                return
            del queue[conn]
            self.policy.heard(conn)
            try:
                yield conn
            finally:
                if conn.ready:
                    self._busy[conn] = self._ready.pop(conn, None)
                self._dirty.add(conn)

    def _unready(self, conn: ControlConnection) -> None:
        self._ready.pop(conn, None)
        self._busy.pop(conn, None)

    def flush(self) -> None:
        """Send what is queued, as far as that is possible now."""
        while self._dirty:
            conn = self._dirty.pop()
            conn.flush()
            self._settle(conn)

    def wake(self) -> None:
        """Let ``poll`` return. Any thread; does nothing after ``close``."""
        if self._asleep:
            self._asleep = False  # one word is enough
            self._flag.set()

    def linger(self, seconds: float) -> None:
        """Send what is queued, and wait up to ``seconds`` for peers to read it."""
        until = clock.now() + seconds
        self.flush()
        while any(conn.unsent for conn in self._by_fd.values()) and clock.now() < until:
            self.poll(0.01)
            self.flush()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for conn in [*self._by_fd.values(), *self.policy.guests]:
            conn.lose("it was closed here")
        self._by_fd.clear()
        if self._listener is not None:
            self._listener.close()
        self._epoll.close()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        accepted = 0
        for _ in range(_LOOKS):
            if accepted == _ACCEPTS:
                return
            try:
                sock, where = self._listener.accept()
            except OSError as e:  # if short of descriptors and polled at once, the listener would be ready again
                if short_of_descriptors(e):
                    self._rest(clock.now() + REST_S)
                return
            host = str(where[0])
            if why := self.policy.refusal(host):
                sock.close()
                self._security.turned_away(host, why)
                continue
            secure, proved = self._security.accepted, self._security.proved
            conn = ControlConnection(host, None, GUEST_FRAME, self._dirty, secure, proved, guest=True)
            accepted += 1
            self.policy.guest(conn)
            conn.hold(sock)
            self._keys.when_read(partial(self._admit, conn))
            if (excess := self.policy.crowded()) is not None:
                self._lose(*excess)

    def _admit(self, conn: ControlConnection) -> None:
        """Begin with a peer that dialled."""
        if conn.lost is None:
            conn.accept()
            if self._security.keys is not None:
                self._beginning.add(conn)
            self._settle(conn)

    def _rest(self, until: float | None) -> None:
        """Accept nobody until then; ``None``: accept again. Nothing else tells when there is a descriptor again."""
        assert self._listener is not None
        self._epoll.modify(self._listener, select.EPOLLIN if until is None else 0)
        self._rests_until = until

    def _lose(self, conn: ControlConnection, why: str) -> None:
        conn.lose(why)
        self._settle(conn)

    def _forget(self, conn: ControlConnection) -> None:
        """Drop what is kept of a connection that is closed."""
        if conn.watched is not None and self._by_fd.get(conn.watched[0]) is conn:
            del self._by_fd[conn.watched[0]]
        conn.watched = None
        self._more.discard(conn)
        self._beginning.discard(conn)
        self.policy.discard(conn)

    def _settle(self, conn: ControlConnection) -> None:
        """Update what is polled, counted and ready after a connection has changed."""
        if conn.lost is not None:
            self._forget(conn)
            if conn.dialled_us and not conn.opened and not conn.told:
                self._security.turned_away(conn.host, conn.lost)
            if not conn.told:
                conn.told = True
                self._ready[conn] = self._busy.pop(conn, None)
            return
        if conn.opened:
            self._beginning.discard(conn)
        if conn.ready and conn not in self._busy:
            self._ready[conn] = None
        if conn.pending:
            self._more.add(conn)
        for greedy, why in self.policy.measure(conn):
            self._security.turned_away(greedy.host, why)
            self._lose(greedy, why)
        wanted = conn.fileno(), conn.interest
        if wanted[0] < 0 or wanted == conn.watched:
            return
        if conn.watched is None:
            self._epoll.register(*wanted)
            self._by_fd[wanted[0]] = conn
        else:
            self._epoll.modify(*wanted)
        conn.watched = wanted

    def _secured(self, sock: socket.socket) -> socket.socket:
        if self._patience is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(int(self._patience * 1e3), 1))
        return self._security.dialled(sock)

    def _begin(self, conn: ControlConnection, target: Address) -> None:
        if conn.lost is not None:
            return
        if self.policy.spent:
            conn.lack()
        else:
            if (unheard := self.policy.dials(conn)) is not None:
                unheard[0].short = True
                self._lose(*unheard)
            conn.connect(target)
        self._settle(conn)
