"""Names of hosts, looked up where nothing waits for it: that may take minutes, and peers choose the names."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from kvxfer.fair_pool import FairPool
from kvxfer.flag import Flag

__all__ = ["LOOKUPS", "Address", "Names", "numeric"]

LOOKUPS, MAX_WAITING = 64, 1024
"""The most names that a back end looks up at once, and that are to be looked up."""

Address = tuple[int, tuple[Any, ...]]
"""A family of addresses, and an address of it."""


def numeric(host: str, port: int) -> list[Address] | None:
    """Return the address that a host is named by, or ``None`` for one that must be looked up."""
    found = _look_up(host, port, socket.AI_NUMERICHOST)
    return None if isinstance(found, OSError) else found


def _look_up(host: str, port: int, flags: int = 0) -> list[Address] | OSError:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as e:
        return e if isinstance(e, OSError) else OSError(str(e))
    return [(family, tuple(address)) for family, _, _, _, address in found]


class Names:
    """Looks names of hosts up for peers, who take turns, on threads of its own (``FairPool``)."""

    def __init__(self) -> None:
        self._found: deque[Callable[[], None]] = deque()
        self._news = Flag()
        self._pool = FairPool("kvxfer-lookup", LOOKUPS, MAX_WAITING, self._hand)

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``answer`` has something to tell."""
        return self._news.fileno()

    def look_up(
        self,
        owner: str,
        host: str,
        port: int,
        over: Callable[[], bool],
        then: Callable[[list[Address] | OSError], None],
    ) -> None:
        """Find out where a peer is.

        Args:
            owner: Whose turn it takes.
            host: The host's name.
            port: A port there.
            over: Returns whether nobody wants to know any more; called on a thread of this class.
            then: Called by ``answer`` with what has been found, or why nothing has.
        """
        if not self._pool.submit(owner, lambda: [] if over() else _look_up(host, port), then):
            then(OSError("too many names of this peer are being looked up"))

    def answer(self) -> None:
        """Tell what has been found."""
        self._news.clear()
        while self._found:
            self._found.popleft()()

    def close(self) -> None:
        """Take no more answers."""
        self._pool.close(0.0)
        self._news.close()

    def _hand(self, call: Callable[[], None]) -> None:
        self._found.append(call)
        self._news.set()
