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
    def begin_close(self) -> None:
        """Have it close; returns at once."""

    def close(self, timeout: float) -> object:
        """Wait for that, so many seconds at most."""


_open: WeakSet[Closable] = WeakSet()


def close_at_exit(thing: Closable) -> None:
    """Close it when the interpreter ends, if it is still there then: before the libraries that were loaded until now take their
    leave, since what was registered last is called first."""
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
    """In a forked child: what libraries hold of the parent's is never given back from here, not even when the child ends."""
    for thing in list(_open):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    _open.clear()


os.register_at_fork(after_in_child=_leave_alone)


class ProcessGuard:
    """The process that made something with threads and sockets of its own: a child that is forked has neither. ``what``: it is."""

    def __init__(self, what: str) -> None:
        self._what, self._pid = what, os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is the process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises ``KvxferError`` in any other process."""
        if not self.here:
            raise KvxferError(
                f"{self._what} belongs to process {self._pid}, of which this one ({os.getpid()}) was forked; "
                "make one of its own here, or fork before it is made"
            )
