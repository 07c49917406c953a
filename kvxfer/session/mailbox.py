"""A mailbox: calls from any thread for one that sleeps in a poll."""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from kvxfer.transport.wakeup import Wakeup

__all__ = ["Mailbox"]


class Mailbox:
    """``post`` from any thread, ``sleep`` and ``take`` on one."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._wakeup = Wakeup()
        self._closed = False
        self._lock = threading.Lock()

    def sleep(self, fd: int | None, seconds: float) -> None:
        """Until there is a call, ``fd`` is readable, or so much time has passed. By a timer: poll knows whole milliseconds only, and
        a thread that merely sleeps wakes 50 us too late."""
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        if fd is not None:
            poller.register(fd, select.POLLIN)
        self._wakeup.at(time.monotonic() + seconds)
        poller.poll()

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Have ``call(*args)`` made by whoever takes it; never, once the mailbox is closed."""
        self._calls.append(lambda: call(*args))
        with self._lock:  # so that no descriptor is written to that is somebody else's by now
            if not self._closed:
                self._wakeup.set()

    def take(self) -> Iterator[Callable[[], None]]:
        """The calls that have come, those that come meanwhile included."""
        self._wakeup.clear()
        while self._calls:
            yield self._calls.popleft()

    def close(self) -> None:
        """Once nobody takes any more. Idempotent."""
        with self._lock:
            self._closed = True
            self._wakeup.close()
