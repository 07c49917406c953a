"""A descriptor that one thread polls and others make readable."""

from __future__ import annotations

import os
import threading
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
        self._lock = threading.RLock()  # a handler may interrupt the thread that holds it

    def fileno(self) -> int:
        """Return the descriptor, to be polled only."""
        return self._fd

    def set(self) -> None:
        """Make it readable. Does nothing after ``close``."""
        with self._lock:
            if self._open:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make it unreadable. Does nothing after ``close``."""
        with self._lock:
            if self._open:
                with suppress(BlockingIOError):  # it is not set
                    os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor, which no thread polls any more. Idempotent."""
        with self._lock:
            self._open = False
            self._close()
