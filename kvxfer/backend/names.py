"""Names of hosts, looked up where nothing waits for it: that may take minutes, and peers choose the names."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvxfer.flag import Flag
from kvxfer.threads import NamedThread

__all__ = ["LOOKUPS", "Address", "Names", "numeric"]

LOOKUPS = 64
"""The most names that a back end looks up at once."""

Address = tuple[int, tuple[Any, ...]]
"""A family of addresses, and an address of it."""

T = TypeVar("T")


def numeric(host: str, port: int) -> list[Address] | None:
    """Return the address that a host is named by, or ``None`` for one that must be looked up."""
    try:
        return _look_up(host, port, socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None


def _look_up(host: str, port: int, flags: int = 0) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, tuple(address)) for family, _, _, _, address in found]


class Names(Generic[T]):
    """Looks names of hosts up for links, on some threads of its own.

    Args:
        gone: Returns whether a link has ended, so that nothing needs to be looked up for it. Called on these threads.
    """

    def __init__(self, gone: Callable[[T], bool]) -> None:
        self._gone = gone
        self._lock = threading.Lock()
        self._wanted: deque[tuple[T, str, int]] = deque()
        self._threads = 0
        self._found: list[tuple[T, list[Address] | OSError]] = []
        self._news = Flag()
        self._closed = False

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``found`` has something to tell."""
        return self._news.fileno()

    def look_up(self, link: T, host: str, port: int) -> None:
        """Find out where the peer of a link is, unless the link ends before its turn comes."""
        with self._lock:
            self._wanted.append((link, host, port))
            if self._threads == LOOKUPS:
                return
            self._threads += 1
        try:
            NamedThread(target=self._run, name="kvxfer-lookup").start()
        except RuntimeError:  # there are none left; one that runs does it, or the link is given up in time
            with self._lock:
                self._threads -= 1

    def found(self) -> list[tuple[T, list[Address] | OSError]]:
        """Return what has been found since, or why nothing has."""
        with self._lock:
            self._news.clear()
            found, self._found = self._found, []
            return found

    def close(self) -> None:
        """Take no more answers."""
        with self._lock:
            self._closed = True
            self._wanted.clear()
            self._news.close()

    def _run(self) -> None:
        while (wanted := self._next()) is not None:
            link, host, port = wanted
            answer: list[Address] | OSError
            try:
                answer = _look_up(host, port)
            except (OSError, UnicodeError) as e:
                answer = e if isinstance(e, OSError) else OSError(str(e))
            with self._lock:
                if not self._closed:
                    self._found.append((link, answer))
                    self._news.set()

    def _next(self) -> tuple[T, str, int] | None:
        """Return a link whose peer is to be found; ``None`` ends the thread."""
        with self._lock:
            while self._wanted:
                wanted = self._wanted.popleft()
                if not self._gone(wanted[0]):
                    return wanted
            self._threads -= 1
            return None
