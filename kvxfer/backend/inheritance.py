"""Keeps the sockets that a library opens from the programs that this process starts.

Libraries open sockets without the flag that closes them in a child, some of them at any time and on threads of their own. A child
that has one keeps a port or a connection open after this process has ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from kvxfer import clock

__all__ = ["LOOK_S", "Uninherited"]

LOOK_S = 0.01, 1.0
"""The shortest and the longest time between two looks. It doubles from the one to the other after each link."""


class Uninherited:
    """Has no child get a socket that was opened since this object was made; the data thread makes it before it calls a library.

    What was inheritable before stays so.
    """

    def __init__(self) -> None:
        self._spared = set(_inheritable())
        self._next, self._wait = 0.0, LOOK_S[0]

    def soon(self) -> None:
        """Look often from now on, because a link is being made."""
        self._next, self._wait = 0.0, LOOK_S[0]

    def look(self, now: float | None = None) -> None:
        """Look for new sockets, unless that was done a moment ago. ``now`` is the time of ``kvxfer.clock``, if it is known."""
        now = clock.now() if now is None else now
        if now < self._next:
            return
        for fd, name in _inheritable():
            if (fd, name) not in self._spared:
                with suppress(OSError):  # closed since
                    os.set_inheritable(fd, False)
        self._next, self._wait = now + self._wait, min(2 * self._wait, LOOK_S[1])


def _inheritable() -> Iterator[tuple[int, str]]:
    """Yield the sockets that a child would get, as descriptor and what the kernel calls it."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.get_inheritable(fd) and (name := os.readlink(f"/proc/self/fd/{fd}")).startswith("socket:"):
                yield fd, name
        except OSError:
            pass  # closed since
