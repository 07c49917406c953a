"""A descriptor that one thread polls and others make readable."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def closing(owner: object, fd: int) -> Callable[[], object]:
    """Return a function that closes a descriptor, once; at the latest its owner's end does, as where the constructor raises.

    The end of the interpreter does not, because threads may still use it.
    """
    close = weakref.finalize(owner, os.close, fd)
    close.atexit = False
    return close


class _Descriptor:
    """An event's descriptor, which is closed when nothing refers to this object any more."""

    def __init__(self) -> None:
        self.number = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        closing(self, self.number)


class Flag:
    """A descriptor that polls readable while it is set. Any thread may use it, and a signal's handler too.

    The descriptor is closed with this object at the latest. It is not closed at the end of the interpreter, when threads may
    still wait for it, and its number is never used once it may be another file's.

    Raises:
        OSError: No descriptor is left.
    """

    def __init__(self) -> None:
        # A call under way refers to it, so it outlives the call, without a lock that would have threads wait for each other.
        self._open: _Descriptor | None = _Descriptor()
        self._number = self._open.number

    def fileno(self) -> int:
        """Return the descriptor, to be polled only."""
        return self._number

    def set(self) -> None:
        """Make it readable. Does nothing after ``close``."""
        descriptor = self._open
        if descriptor is not None:
            os.eventfd_write(descriptor.number, 1)

    def clear(self) -> None:
        """Make it unreadable. Does nothing after ``close``."""
        descriptor = self._open
        if descriptor is not None:
            try:
                os.eventfd_read(descriptor.number)
            except BlockingIOError:
                pass  # it is not set

    def close(self) -> None:
        """Close the descriptor, which no thread polls any more, once the calls under way have returned. Idempotent."""
        self._open = None
