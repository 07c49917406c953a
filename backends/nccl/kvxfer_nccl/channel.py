"""A TCP connection that carries messages, never blocks, and tells when the other side is gone."""

from __future__ import annotations

import socket

from kvxfer_nccl.wire import Message, decode, encode

SILENT_S = 15
"""Seconds after which a host that answers nothing is gone, though bytes or probes wait for its answer."""

TURNS = 16
"""Reads before others get their turn."""


class Channel:
    """Owns a connected socket. ``lost``: why it is of no more use, or ``None``."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._in = bytearray()
        self._out = bytearray()
        self.lost: str | None = None
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, SILENT_S // 3),
            (socket.TCP_KEEPINTVL, SILENT_S // 3),
            (socket.TCP_KEEPCNT, 2),
            (socket.TCP_USER_TIMEOUT, SILENT_S * 1000),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def clogged(self) -> bool:
        """Whether something is still to be written: call ``flush`` in a while."""
        return bool(self._out) and self.lost is None

    def say(self, message: Message) -> None:
        self._out += encode(message)
        self.flush()

    def flush(self) -> None:
        while self.clogged:
            try:
                del self._out[: self._sock.send(self._out)]
            except BlockingIOError:
                return
            except OSError as e:
                self.lost = f"the connection with it broke ({e.strerror or e})"

    def hear(self, most: int = 1 << 30) -> list[Message]:
        """Messages that have arrived, ``most`` at most.

        Those before the connection was lost are still told.

        Raises:
            ValueError: For what is no message.
        """
        for _ in range(TURNS):
            if self.lost is not None:
                break
            try:
                more = self._sock.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError as e:
                self.lost = f"the connection with it broke ({e.strerror or e})"
                break
            if not more:
                self.lost = "the connection with it ended: its process has died, or dropped the link"
            self._in += more
        found: list[Message] = []
        while len(found) < most and (message := decode(self._in)) is not None:
            found.append(message)
        return found

    def close(self) -> None:
        self._sock.close()


def dial(host: str, port: int, timeout: float) -> socket.socket:
    """Return a connection. Blocks.

    Raises:
        OSError: Nobody answers within ``timeout`` seconds.
    """
    return socket.create_connection((host, port), timeout)
