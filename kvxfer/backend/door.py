"""A Unix socket at which peers of this host connect, and whoever has done so and not said yet what for."""

from __future__ import annotations

import errno
import os
import socket

from kvxfer.backend.wakeup import Wakeup

__all__ = ["MOST_STRANGERS", "UnixDoor", "accept"]

MOST_STRANGERS = 64
"""Sockets that have not said yet what they are for; of more, the oldest is closed."""

REST_S = 0.1
"""How soon to accept again where the process has no descriptor left, or the system no memory."""

_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def accept(listener: socket.socket, wakeup: Wakeup) -> socket.socket | None:
    """Return a connection that has come, or ``None``; whoever gets no descriptor for it goes on without, and tries again soon."""
    try:
        accepted = listener.accept()[0]
    except OSError as e:  # else none has come, or it was gone before we came
        if e.errno in _SHORT:
            wakeup.rest(listener.fileno(), REST_S)
        return None
    accepted.setblocking(False)
    return accepted


class UnixDoor:
    """``name``: where it is. ``wakeup`` wakes when ``answer`` has something to do."""

    def __init__(self, backend: str, wakeup: Wakeup) -> None:
        self.name = f"kvxfer-{backend}-{os.urandom(16).hex()}"
        self._wakeup = wakeup
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        # The abstract namespace belongs to the network namespace, and leaves no file behind.
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(128)
        wakeup.add(self._listener.fileno(), self._listener)

    def answer(self, source: object) -> socket.socket | None:
        """Take what ``wakeup`` named. Returns a stranger who has said something, or is gone: the caller's from then on."""
        if source is self._listener:
            accepted = accept(self._listener, self._wakeup)
            if accepted is not None:
                if len(self._strangers) >= MOST_STRANGERS:
                    self._let_go(next(iter(self._strangers))).close()
                self._strangers[accepted] = None
                self._wakeup.add(accepted.fileno(), accepted)
        elif isinstance(source, socket.socket) and source in self._strangers:
            return self._let_go(source)
        return None

    def close(self) -> None:
        """Once only."""
        for stranger in list(self._strangers):
            self._let_go(stranger).close()
        self._wakeup.remove(self._listener.fileno())
        self._listener.close()

    def _let_go(self, stranger: socket.socket) -> socket.socket:
        del self._strangers[stranger]
        self._wakeup.remove(stranger.fileno())
        return stranger
