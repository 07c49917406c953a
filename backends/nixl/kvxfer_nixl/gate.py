"""Keeps threads out of NIXL while the interpreter ends.

A daemon thread that comes back from a C++ call into an interpreter that has ended is unwound through that call, and C++ aborts the
process ("terminate called without an active exception"). So before that nobody is inside any more, and nobody gets in.

A forked child has what the parent has of NIXL, and shares the descriptors in it: taken down there, it takes the parent's along.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Callable

from kvxfer.errors import TransportError

PATIENCE_S = 5.0
"""How long the end of the interpreter waits for calls that are under way."""


def keep(what: object) -> None:
    """Never give this back, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


class _Gate:
    """``with``: a call into NIXL. Raises ``TransportError`` once the interpreter ends. Any thread, many at a time."""

    def __init__(self) -> None:
        self._last: list[Callable[[], object]] = []
        self._open()

    def _open(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False

    def __enter__(self) -> None:
        with self._changed:
            if self._shut:
                raise TransportError("NIXL is not called any more because the interpreter ends")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            if self._shut:
                self._changed.notify_all()

    def before_the_end(self, call: Callable[[], object]) -> None:
        """Have this called once nobody is inside any more, and take that back by ``forget``."""
        with self._changed:
            self._last.append(call)

    def forget(self, call: Callable[[], object]) -> None:
        with self._changed:
            if call in self._last:
                self._last.remove(call)

    def shut(self) -> None:
        with self._changed:
            self._shut = True
            if not self._changed.wait_for(lambda: not self._inside, PATIENCE_S):
                return  # stuck in there; what it uses must stay
        for call in list(self._last):
            call()

    def leave(self) -> None:
        """Start over in a forked child, and never give back there what is the parent's, not even when the child ends."""
        for call in self._last:
            keep(call)
        self._last.clear()
        self._open()


inside = _Gate()

atexit.register(inside.shut)
os.register_at_fork(after_in_child=inside.leave)
