"""One descriptor that polls readable for any of several reasons: other descriptors, a flag, a time.

Linux only (epoll, eventfd, timerfd), as is the rest of kvxfer.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
from collections.abc import Hashable
from collections.abc import Set as AbstractSet

from kvxfer import clock
from kvxfer.flag import Flag, closing

__all__ = ["Timer", "Wakeup", "look_again"]

_libc = ctypes.CDLL(None, use_errno=True)
_CLOEXEC_NONBLOCK = os.O_CLOEXEC | os.O_NONBLOCK


class _TimerSpec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class Timer:
    """A descriptor that polls readable from a set time on.

    A thread that waits for it wakes more precisely than one that sleeps, or polls with a timeout in whole milliseconds. The descriptor
    is closed with this object at the latest, as where what it is part of could not be made.

    Raises:
        OSError: No descriptor is left.
    """

    def __init__(self) -> None:
        self._fd: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, _CLOEXEC_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._close = closing(self, self._fd)
        self._spec = _TimerSpec()
        self._at = ctypes.byref(self._spec)
        self._due: float | None = None

    def fileno(self) -> int:
        return self._fd

    def at(self, due: float | None) -> None:
        """Become readable at this time of ``kvxfer.clock``, which replaces the one set before; ``None`` for never.

        Raises:
            OSError: The kernel refuses.
        """
        if due == self._due:
            return
        self._due = due
        left = 0 if due is None else max(1, int((due - clock.now()) * 1e9))
        self._spec.value_s, self._spec.value_ns = divmod(left, 1_000_000_000)
        if _libc.timerfd_settime(self._fd, 0, self._at, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._close()


class Wakeup:
    """The descriptor (``fileno``) on which the thread that drives a back end waits. Other threads may only call ``set``.

    All is closed with this object at the latest, as where the back end could not be made.

    Raises:
        OSError: No descriptor is left.
    """

    def __init__(self) -> None:
        self._timer, self._epoll = Timer(), select.epoll()
        self._flag = Flag()
        self._epoll.register(self._timer, select.EPOLLIN)
        self._epoll.register(self._flag, select.EPOLLIN)
        self._keys: dict[int, Hashable] = {}
        self._due: float | None = None
        self._resting: dict[int, float] = {}

    def fileno(self) -> int:
        return self._epoll.fileno()

    def add(self, fd: int, key: Hashable) -> None:
        """Wake while ``fd`` is readable; ``clear`` then returns ``key``."""
        self._epoll.register(fd, select.EPOLLIN)
        self._keys[fd] = key

    def remove(self, fd: int) -> None:
        """Stop waking for ``fd``. Call it before ``fd`` is closed."""
        self._epoll.unregister(fd)
        del self._keys[fd]
        self._resting.pop(fd, None)

    def rest(self, fd: int, seconds: float) -> None:
        """Do not wake for ``fd`` for these seconds: what it tells of cannot be done now."""
        self._epoll.modify(fd, 0)
        self._resting[fd] = clock.now() + seconds
        self.at(self._due)

    def set(self) -> None:
        """Wake now. Any thread, even after ``close``, when it does nothing."""
        self._flag.set()

    def clear(self) -> AbstractSet[Hashable]:
        """Reset ``set`` and a time that has come; return the keys of the descriptors that are readable."""
        fired = {fd for fd, _ in self._epoll.poll(0)}
        if self._flag.fileno() in fired:
            self._flag.clear()
        if self._timer.fileno() in fired:
            now = clock.now()
            for fd in [fd for fd, until in self._resting.items() if until <= now]:
                del self._resting[fd]
                self._epoll.modify(fd, select.EPOLLIN)
            self.at(self._due if self._due is not None and self._due > now else None)
        return {self._keys[fd] for fd in fired if fd in self._keys}

    def at(self, due: float | None) -> None:
        """Wake at this time of ``kvxfer.clock``, which replaces the one set before; ``None`` for never."""
        self._due = due
        if self._resting:
            due = min(self._resting.values()) if due is None else min(due, *self._resting.values())
        self._timer.at(due)

    def by(self, due: float) -> None:
        """Wake at this time too, if none before it is set."""
        if self._due is None or due < self._due:
            self.at(due)

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        if not self._epoll.closed:
            self._epoll.close()
            self._flag.close()
            self._timer.close()


MIN_S, MAX_S = 0.00005, 0.0005
"""Bounds of the time between two looks: at 2,000 looks a second, waiting takes about a tenth of a core."""
LATENESS_DIVISOR = 32
"""The part of the time waited so far that passes until the next look, so that looking late delays little of what was waited for."""


def look_again(since: float, now: float) -> float:
    """Return when to look again at what is waited for since ``since``. All are seconds of one clock.

    What is over soon is seen at once, and what takes long costs little: an engine's forward pass takes milliseconds, and needs
    the processor.
    """
    return now + min(max(MIN_S, (now - since) / LATENESS_DIVISOR), MAX_S)
