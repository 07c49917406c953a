"""Close agents and directories before the interpreter ends, and keep forked children from touching them."""

from __future__ import annotations

import atexit
import ctypes
import os
from typing import Protocol
from weakref import WeakSet

from kvxfer import clock
from kvxfer.errors import KvxferError

EXIT_S = 5.0
"""Seconds that the interpreter waits for all of them together."""


class Closable(Protocol):
    """An object with threads that must end before the interpreter does."""

    def begin_close(self) -> None:
        """Begin to close, and return at once."""

    def close(self, timeout: float) -> object:
        """Close, and wait for that for up to ``timeout`` seconds."""


_open: WeakSet[Closable] = WeakSet()


def close_at_exit(thing: Closable) -> None:
    """Close an object when the interpreter ends, if it still exists then.

    Python calls exit handlers in reverse order, so it is closed before the libraries that have been loaded by now shut down.
    """
    _open.add(thing)
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    things, until = list(_open), clock.now() + EXIT_S
    for thing in things:
        thing.begin_close()
    for thing in things:
        thing.close(max(until - clock.now(), 0.1))


def _leave_alone() -> None:
    """Keep these objects alive for ever in a forked child: collecting them there would close what belongs to the parent."""
    for thing in list(_open):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    _open.clear()


os.register_at_fork(after_in_child=_leave_alone)


class ProcessGuard:
    """Knows the process that made an object with threads and sockets, which a forked child does not have."""

    def __init__(self, what: str) -> None:
        self._what, self._pid = what, os.getpid()

    @property
    def same_process(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Refuse use from another process.

        Raises:
            KvxferError: This is not the process that made it.
        """
        if os.getpid() != self._pid:
            raise KvxferError(
                f"{self._what} belongs to process {self._pid}, from which this one ({os.getpid()}) was forked; "
                "make another one here, or fork before it is made"
            )
