"""A queue of commands from any thread for one that sleeps in a poll."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from kvxfer import clock
from kvxfer.backend.wakeup import Timer
from kvxfer.flag import Flag

C = TypeVar("C")


class CommandQueue(Generic[C]):
    """Commands that wait for a thread: ``post`` from any thread, ``sleep`` and ``take`` on one.

    It does not use a ``Wakeup``, whose own epoll would have to be polled within this poll and read after it: the data thread
    sleeps too often and too briefly for that.
    """

    def __init__(self) -> None:
        self._waiting: deque[C] = deque()
        self._flag = Flag()
        self._timer = Timer()
        self._poller = select.poll()
        self._poller.register(self._flag, select.POLLIN)
        self._poller.register(self._timer, select.POLLIN)
        self._other: int | None = None  # the other descriptor that is polled
        self._asleep = False

    def sleep(self, fd: int | None, seconds: float) -> None:
        """Sleep until there is a command, ``fd`` is readable, or ``seconds`` have passed."""
        if fd != self._other:
            if self._other is not None:
                self._poller.unregister(self._other)
            if fd is not None:
                self._poller.register(fd, select.POLLIN)
            self._other = fd
        self._asleep = True  # before the queue is checked, so that a thread that adds a command later wakes this thread
        if not self._waiting:
            self._timer.at(clock.now() + seconds)
            if any(ready == self._flag.fileno() for ready, _ in self._poller.poll()):
                self._flag.clear()
        self._asleep = False

    def post(self, command: C) -> None:
        """Hand a command to the thread that takes them; after ``close`` it is dropped."""
        self._waiting.append(command)
        if not self._asleep:
            return
        self._asleep = False  # waking once is enough
        self._flag.set()

    def take(self) -> Iterator[C]:
        """Yield the commands that have come, including those that come meanwhile."""
        while self._waiting:
            yield self._waiting.popleft()

    def close(self) -> None:
        """Close the queue, once no thread takes commands any more. Idempotent."""
        self._flag.close()
        self._timer.close()
