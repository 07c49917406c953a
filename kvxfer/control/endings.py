"""What has to end before the interpreter does, and what a forked child must leave alone."""

from __future__ import annotations

import atexit
import ctypes
import os
import time
from typing import Protocol
from weakref import WeakSet

from kvxfer.errors import KvxferError

__all__ = ["ProcessGuard", "close_at_exit"]

EXIT_S = 5.0
"""How long the interpreter waits for all of them together."""


class Closable(Protocol):
    """What has threads that must end before the interpreter does."""

    def begin_close(self) -> None:
        """Have it close, and return at once."""

    def close(self, timeout: float) -> object:
        """Wait until it is closed, ``timeout`` seconds at the most."""


_open: WeakSet[Closable] = WeakSet()


def close_at_exit(thing: Closable) -> None:
    """Close it when the interpreter ends, if it is still there then.

    Python calls first what was registered last. So it is closed before the libraries shut down that were loaded until now.
    """
    _open.add(thing)
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    things, until = list(_open), time.monotonic() + EXIT_S
    for thing in things:
        thing.begin_close()
    for thing in things:
        thing.close(max(until - time.monotonic(), 0.1))


def _leave_alone() -> None:
    """Keep alive in a forked child, to its very end, what libraries hold: closing it there would touch what is the parent's."""
    for thing in list(_open):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    _open.clear()


os.register_at_fork(after_in_child=_leave_alone)


class ProcessGuard:
    """The process that made something with threads and sockets of its own; a forked child has neither."""

    def __init__(self, what: str) -> None:
        self._what, self._pid = what, os.getpid()

    @property
    def here(self) -> bool:
        """Whether we are in that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Refuse use from another process.

        Raises:
            KvxferError: This is not the process that made it.
        """
        if not self.here:
            raise KvxferError(
                f"{self._what} belongs to process {self._pid}, of which this one ({os.getpid()}) was forked; "
                "make one of its own here, or fork before it is made"
            )
