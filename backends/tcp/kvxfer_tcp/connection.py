"""A connection as the transport's loop sees it."""

from __future__ import annotations

import select
import socket
from typing import Protocol

from kvxfer_tcp.options import Options
from kvxfer_tcp.vectors import Pipe

ANY = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET

_ENDS = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR

WRITE_BYTES = 1 << 20
"""At most these bytes of what is said beside the data leave in one call."""

SHARED_UNSENT = 128 << 10
"""The most bytes that wait in the kernel, not yet sent, for one of several connections. With more, the first connections to have
room take what others could send sooner, and a slow one keeps a batch waiting at its end."""


class Loop(Protocol):
    """What gives connections their turns."""

    def watch(self, connection: Connection) -> None:
        """Give it turns from now on, the first one soon."""

    def heat(self, connection: Connection) -> None:
        """Give it a turn soon."""

    def forget(self, connection: Connection) -> None:
        """Give it no more turns. Called before its socket is closed."""


class Connection:
    """One socket, and whether it is worth a turn.

    The kernel tells once that it has become ``readable`` or ``writable``; then that stays true until a call finds that it is not.

    Attributes:
        readable: Whether something may have come, or the connection has ended.
        writable: Whether there may be room to send.
        out: Bytes that are to leave before any data.
    """

    def __init__(self, loop: Loop, pipe: Pipe) -> None:
        self.loop, self.pipe = loop, pipe
        self.readable = self.writable = False
        self.out = bytearray()
        loop.watch(self)

    def tell(self, events: int) -> None:
        """Take what epoll says of the socket."""
        self.readable |= bool(events & _ENDS)
        self.writable |= bool(events & (select.EPOLLOUT | select.EPOLLERR))

    def step(self) -> bool:
        """Do a bounded part of what can be done now; return whether there is more.

        Raises:
            OSError: The connection broke.
            Violation: The peer does not keep to the protocol.
        """
        raise NotImplementedError

    def lost(self, error: Exception) -> None:
        """Take what ``step`` has raised."""
        raise NotImplementedError

    def say(self, data: bytes) -> None:
        self.out += data
        self.loop.heat(self)

    @property
    def talks(self) -> bool:
        """Whether there is something that ``write`` would send."""
        return bool(self.out or self.pipe.unsent)

    def write(self) -> None:
        """Send what is in ``out`` or was taken before, as far as there is room."""
        if not self.out:
            self.writable = self.pipe.flush()
            return
        count = self.pipe.write(self.out[:WRITE_BYTES])
        if count < 0:
            self.writable = False
        else:
            del self.out[:count]

    def close(self) -> None:
        """Close it at once. Idempotent."""
        if self.pipe.socket.fileno() >= 0:
            self.loop.forget(self)
            self.pipe.socket.close()


def tune(opened: socket.socket, options: Options, dialled: bool) -> None:
    """Have the kernel send at once, and notice a host that is gone.

    The side that ``dialled`` reads and has little to send, so what is not acknowledged for long means that the host is gone; the other side
    may just wait for a reader that was stopped.
    """
    patience = max(1, round(options.heartbeat_s))
    settings = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, patience),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, patience),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5),
    ]
    if dialled:
        settings.append((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(5000 * options.heartbeat_s)))
    elif options.connections > 1:
        settings.append((socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, SHARED_UNSENT))
    for level, name, value in settings:
        opened.setsockopt(level, name, value)
