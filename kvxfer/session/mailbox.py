"""A mailbox: calls from any thread for one that sleeps in a poll."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

__all__ = ["Mailbox"]


class Mailbox:
    """``post`` from any thread, ``take`` on one, which may wait until ``fileno`` is readable."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._wake

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Have ``call(*args)`` made by whoever takes it; never, once the mailbox is closed."""
        self._calls.append(lambda: call(*args))
        with self._lock:  # so that no descriptor is written to that is somebody else's by now
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def take(self) -> Iterator[Callable[[], None]]:
        """The calls that have come, those that come meanwhile included."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._calls:
            yield self._calls.popleft()

    def close(self) -> None:
        """Once nobody takes any more. Idempotent."""
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
            self._wake = -1
