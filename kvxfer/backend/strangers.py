"""Listeners, and whoever has connected to one and has not said yet what for."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from kvxfer.backend.wakeup import Wakeup

__all__ = ["Listener", "Strangers"]

MOST_STRANGERS = 64
"""Of more, the oldest is hung up on."""


class Listener:
    """A socket that listens, without blocking."""

    def __init__(self, listening: socket.socket) -> None:
        """Take the socket over."""
        self.socket = listening
        self._spare = socket.socket(socket.AF_UNIX)

    def accept(self) -> socket.socket | None:
        """Return who has connected; ``None`` if nobody has.

        Where the process has no descriptor left, he is hung up on: he would keep the thread awake until there is one.
        """
        try:
            return self.socket.accept()[0]
        except (BlockingIOError, ConnectionError):
            return None  # gone before we came
        except OSError:
            self._spare.close()
            with suppress(OSError):
                self.socket.accept()[0].close()
            with suppress(OSError):
                self._spare = socket.socket(socket.AF_UNIX)
            return None

    def close(self) -> None:
        """Listen no more."""
        self.socket.close()
        self._spare.close()


class Strangers:
    """A Unix socket that listens, and those who have connected to it and said nothing.

    Attributes:
        name: Where they connect. It belongs to the network namespace, and leaves no file behind.
    """

    def __init__(self, name: str, wakeup: Wakeup) -> None:
        """Listen; ``wakeup`` wakes from then on when there is something to be ``heard``."""
        self.name = f"{name}-{os.urandom(16).hex()}"
        self._wakeup = wakeup
        self._silent: dict[socket.socket, None] = {}  # the oldest first
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        listening.bind(f"\0{self.name}")
        listening.listen(128)
        self._listener = Listener(listening)
        wakeup.add(listening.fileno(), self._listener)

    def heard(self, source: object) -> socket.socket | None:
        """Take what ``wakeup`` named; return the socket of whoever says something now, which is the caller's."""
        if source is self._listener:
            self._take_in()
        elif isinstance(source, socket.socket) and source in self._silent:
            return self._let_go(source)
        return None

    def close(self) -> None:
        """Listen no more, and hang up on those who have said nothing."""
        for stranger in list(self._silent):
            self._let_go(stranger).close()
        self._wakeup.remove(self._listener.socket.fileno())
        self._listener.close()

    def _take_in(self) -> None:
        stranger = self._listener.accept()
        if stranger is None:
            return
        stranger.setblocking(False)
        if len(self._silent) >= MOST_STRANGERS:
            self._let_go(next(iter(self._silent))).close()
        self._silent[stranger] = None
        self._wakeup.add(stranger.fileno(), stranger)

    def _let_go(self, stranger: socket.socket) -> socket.socket:
        del self._silent[stranger]
        self._wakeup.remove(stranger.fileno())
        return stranger
