"""Control sockets: ZeroMQ, typed messages, never blocking. Used by one thread each."""

from __future__ import annotations

import contextlib

import zmq

from kvxfer.session import messages as m

__all__ = ["address", "dial", "listen", "receive", "send"]

_QUEUE = 10_000
"""Messages that may wait for a slow peer before it counts as lost."""


def address(host: str, port: int) -> str:
    """A ZeroMQ TCP address; an IPv6 host gets its brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"tcp://{host}:{port}"


def _settle(sock: zmq.Socket[bytes]) -> None:
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, _QUEUE)
    sock.setsockopt(zmq.RCVHWM, _QUEUE)
    sock.setsockopt(zmq.MAXMSGSIZE, m.MAX_BYTES)
    sock.setsockopt(zmq.IPV6, 1)


def listen(context: zmq.Context[zmq.Socket[bytes]], host: str, port: int) -> tuple[zmq.Socket[bytes], int]:
    """A ROUTER on ``host``; ``port`` 0 takes a free one. Returns the socket and its port. Raises ``OSError``."""
    sock = context.socket(zmq.ROUTER)
    _settle(sock)
    try:
        sock.bind(address(host, port))
    except zmq.ZMQError as e:
        sock.close()
        raise OSError(e.errno, f"cannot listen on {host} port {port or 'any'}: {e}") from None
    endpoint = sock.getsockopt_string(zmq.LAST_ENDPOINT)
    return sock, int(endpoint.rsplit(":", 1)[1])


def dial(context: zmq.Context[zmq.Socket[bytes]], where: str) -> zmq.Socket[bytes]:
    """A DEALER to ``where``. Connecting happens behind the scenes; an unreachable peer simply never answers."""
    sock = context.socket(zmq.DEALER)
    _settle(sock)
    sock.connect(where)
    return sock


def send(sock: zmq.Socket[bytes], message: m.Message, to: bytes | None = None) -> bool:
    """Queue a message; false when the peer has stopped reading or is unknown."""
    frames = [m.encode(message)] if to is None else [to, m.encode(message)]
    with contextlib.suppress(zmq.Again, zmq.ZMQError):
        sock.send_multipart(frames, zmq.NOBLOCK)
        return True
    return False


def receive(sock: zmq.Socket[bytes]) -> list[bytes] | None:
    """The frames of one message, or ``None`` when there is none now."""
    try:
        return sock.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
