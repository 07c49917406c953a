"""A descriptor that one thread polls and others make readable."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Flag", "closing"]


def closing(owner: object, fd: int) -> Callable[[], object]:
    """Return a function that closes a descriptor, once; at the latest its owner's end does, as where the constructor raises.

    The end of the interpreter does not, because threads may still use it.
    """
    close = weakref.finalize(owner, os.close, fd)
    close.atexit = False
    return close


class Flag:
    """A descriptor that polls readable while it is set. Any thread may use it, and a signal's handler too.

    The descriptor is closed with this object at the latest. It is not closed at the end of the interpreter, when threads may
    still wait for it, and its number is never used once it may be another file's.

    Raises:
        OSError: No descriptor is left.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._close = closing(self, self._fd)
        self._open = True
        # One for each call under way: the last of them closes it. A lock would keep threads waiting for each other's system calls.
        self._calls: list[None] = []

    def fileno(self) -> int:
        """Return the descriptor, to be polled only."""
        return self._fd

    def set(self) -> None:
        """Make it readable. Does nothing after ``close``."""
        self._do(os.eventfd_write, 1)

    def clear(self) -> None:
        """Make it unreadable. Does nothing after ``close``."""
        with suppress(BlockingIOError):  # it is not set
            self._do(os.eventfd_read)

    def close(self) -> None:
        """Close the descriptor, which no thread polls any more. Idempotent."""
        self._open = False
        if not self._calls:
            self._close()

    def _do(self, call: Callable[..., object], *args: int) -> None:
        self._calls.append(
            None
        )  # before it looks whether it is open, as ``close`` looks after it has said that it is not
        try:
            if self._open:
                call(self._fd, *args)
        finally:
            self._calls.pop()
            if not self._open and not self._calls:
                self._close()
