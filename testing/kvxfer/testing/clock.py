"""Clocks for tests: one that a test plays, one that it sets forward, and one that stands still while a thread gets no processor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from unittest import mock

from kvxfer import clock


class PlayedClock:
    """Time that passes only when a test says so, and what happens in it. One thread.

    Within ``installed`` it is the clock of all that reads ``kvxfer.clock``.

    Attributes:
        now: The time in seconds.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put it in the place of the product's clock."""
        with mock.patch.multiple(clock, now=lambda: self.now, wait=self.turn):
            yield

    def after(self, seconds: float, do: Callable[[], object]) -> None:
        """Have something happen after a number of seconds."""
        heappush(self._events, (self.now + seconds, next(self._numbers), do))

    def turn(self, seconds: float) -> None:
        """Let time pass until the next event, for ``seconds`` at most, and have happen what is due."""
        due = self._events[0][0] if self._events else self.now + seconds
        self.now = max(self.now, min(due, self.now + seconds))
        while self._events and self._events[0][0] <= self.now:
            heappop(self._events)[2]()


class SetForward:
    """The product's clock, which a test sets forward while threads run: one that waits for a time looks at the clock when it is woken.

    It must not go back for a thread: have it ``installed`` before the thread starts, and until it has ended.
    """

    def __init__(self) -> None:
        self._ahead = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put it in the place of the product's clock."""
        with mock.patch.object(clock, "now", self.now):
            yield

    def now(self) -> float:
        """Return its time."""
        return time.monotonic() + self._ahead

    def forward(self, seconds: float) -> None:
        """Set it forward."""
        self._ahead += seconds


def thread_clock() -> float:
    """Return a time in seconds that stands still while the calling thread is ready to run but gets no processor.

    It goes on while the thread runs or sleeps. If the kernel does not account for such waiting, this is the monotonic clock.
    It may go back a little from one reading to the next, by what the thread has waited meanwhile: it is for patience, and no clock for
    ``kvxfer.clock``. Any thread, but only times of the same thread can be compared.
    """
    now = time.monotonic()
    try:
        with open("/proc/thread-self/schedstat") as f:
            return now - int(f.read().split()[1]) / 1e9
    except OSError:
        return now
