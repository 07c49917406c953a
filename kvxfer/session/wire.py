"""Control sockets: ZeroMQ over TCP, one typed message a frame, never blocking."""

from __future__ import annotations

import contextlib
import os
import threading

import zmq

from kvxfer.errors import PeerError
from kvxfer.identity import IdentityError, parse_address
from kvxfer.security import Security
from kvxfer.session import messages as m

__all__ = ["Hub", "Socket", "address", "receive", "send"]

Socket = zmq.Socket[bytes]

_QUEUE = 10_000
"""Messages that may wait for a slow peer before it counts as lost."""


def address(host: str, port: int) -> str:
    """A ZeroMQ TCP address; an IPv6 host gets its brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"tcp://{host}:{port}"


class Hub:
    """The control sockets of one thread, which may poll them and be woken from others.

    Made by any thread before that one runs; ``wake`` is for all threads, ``close`` for after it has ended.
    ``security``: who may connect and be dialled.
    """

    def __init__(self, security: Security) -> None:
        self._security = security
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, 65535)
        self._flag = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._flag_lock = threading.Lock()  # so that a late wake never writes to a descriptor that is another's by now
        self._sockets: set[Socket] = set()
        self._poller = zmq.Poller()
        self._poller.register(self._flag, zmq.POLLIN)
        # Whoever connects, ZeroMQ asks here before it lets a message through.
        self._doorbell = self._socket(zmq.REP)
        self._doorbell.bind("inproc://zeromq.zap.01")

    def listen(self, host: str, port: int) -> tuple[Socket, int]:
        """A ROUTER on ``host``; ``port`` 0 takes a free one. Returns the socket and its port. Raises ``OSError``."""
        sock = self._socket(zmq.ROUTER)
        self._security.serve(sock)
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)  # to be told of peers that are gone or have stopped reading
        try:
            sock.bind(address(host, port))
        except zmq.ZMQError as e:
            self.drop(sock)
            raise OSError(e.errno, f"cannot listen on {host} port {port or 'any'}: {e}") from None
        endpoint = sock.getsockopt_string(zmq.LAST_ENDPOINT)
        return sock, int(endpoint.rsplit(":", 1)[1])

    def dial(self, where: str) -> Socket:
        """A DEALER to a TCP address. Connecting happens behind the scenes; an unreachable peer simply never answers.
        Raises ``PeerError`` for what is no such address: it came from a peer."""
        try:
            if not where.startswith("tcp://"):
                raise IdentityError(f"{where!r} is not tcp://HOST:PORT")
            target = parse_address(where.removeprefix("tcp://"))
        except IdentityError as e:
            raise PeerError(f"cannot dial {where!r}: {e}") from None
        sock = self._socket(zmq.DEALER)
        try:
            self._security.dial(sock, target)
            sock.connect(address(target.host, target.port))
        except (zmq.ZMQError, PeerError) as e:
            self.drop(sock)
            raise PeerError(f"cannot dial {where!r}: {e}") from None
        return sock

    def drop(self, sock: Socket) -> None:
        """Close a socket; what has not been sent is lost. Idempotent."""
        if sock in self._sockets:
            self._sockets.remove(sock)
            self._poller.unregister(sock)
            sock.close(0)

    def poll(self, seconds: float) -> set[Socket]:
        """Wait for messages, or ``wake``; returns the sockets that have some."""
        ready = self._poller.poll(max(0, int(seconds * 1000 + 0.999)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._flag)
        found = {sock for sock, _ in ready if isinstance(sock, zmq.Socket)}
        if self._doorbell in found:
            found.remove(self._doorbell)
            for _ in range(64):
                request = receive(self._doorbell)
                if request is None:
                    break
                self._doorbell.send_multipart(self._security.admits(request))
        return found

    def wake(self) -> None:
        """Let ``poll`` return. Any thread; does nothing after ``close``."""
        with self._flag_lock:
            if self._flag >= 0:
                os.eventfd_write(self._flag, 1)

    def close(self) -> None:
        """Close all sockets. Idempotent."""
        for sock in list(self._sockets):
            self.drop(sock)
        self._context.term()
        with self._flag_lock:
            if self._flag >= 0:
                os.close(self._flag)
            self._flag = -1

    def _socket(self, kind: int) -> Socket:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, _QUEUE)
        sock.setsockopt(zmq.RCVHWM, _QUEUE)
        sock.setsockopt(zmq.MAXMSGSIZE, m.MAX_BYTES)
        sock.setsockopt(zmq.IPV6, 1)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._sockets.add(sock)
        self._poller.register(sock, zmq.POLLIN)
        return sock


def send(sock: Socket, message: m.Message, to: bytes | None = None) -> bool:
    """Queue a message; false when the peer is gone or has stopped reading. Raises ``PeerError`` for one too large."""
    frames = [m.encode(message)] if to is None else [to, m.encode(message)]
    with contextlib.suppress(zmq.ZMQError):
        sock.send_multipart(frames, zmq.NOBLOCK)
        return True
    return False


def receive(sock: Socket) -> list[bytes] | None:
    """The frames of one message, or ``None`` when there is none now."""
    try:
        return sock.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
