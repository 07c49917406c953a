"""A thread for jobs that take time, for which neither the control thread nor a data thread waits."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, TypeVar

from kvxfer.errors import PeerError
from kvxfer.failures import Failure, FailureKind
from kvxfer.logs import logger
from kvxfer.threads import NamedThread

log = logger("kvxfer.agent")

T = TypeVar("T")

IDLE_S = 5.0
"""Seconds without a job after which the thread ends."""


class Worker:
    """A thread that does one job after the other, the lightest first; at most ``most`` may wait.

    A heavy job delays others only once it has begun. The thread starts with a job, and ends once there has been none for a while. Any
    thread may call the methods. What follows from a job's result is given to ``hand``, which has another thread call it.
    """

    def __init__(self, name: str, most: int, hand: Callable[[Callable[..., Any]], None]) -> None:
        self._most, self._hand = most, hand
        self._jobs: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._change = threading.Condition()
        self._closed, self._name = False, name
        self._thread: NamedThread | None = None

    def submit(self, weight: int, job: Callable[[], T], then: Callable[..., Any]) -> bool:
        """Queue a job of a ``weight``, its approximate cost in any unit.

        ``then`` is called with its result first, or with a ``Failure`` that says why there is none.

        Returns:
            Whether it will be done; not when as many wait as may, when no thread is to be had, or after ``close``.
        """
        with self._change:
            if self._closed or len(self._jobs) >= self._most:
                return False
            if self._thread is None:
                thread = NamedThread(target=self._run, name=self._name)
                try:
                    thread.start()
                except RuntimeError:
                    return False
                self._thread = thread
            heapq.heappush(self._jobs, (weight, next(self._order), lambda: self._hand(partial(then, _result_of(job)))))
            self._change.notify()
        return True

    def close(self, timeout: float) -> None:
        """Begin no more jobs, and wait for one that has begun for up to ``timeout`` seconds (the thread is a daemon). Idempotent."""
        with self._change:
            self._closed = True
            self._jobs.clear()
            self._change.notify()
            thread = self._thread
        if thread is not None and threading.current_thread() is not thread:
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._change:
                if not self._change.wait_for(lambda: self._jobs or self._closed, IDLE_S) or self._closed:
                    self._thread = None
                    return
                job = heapq.heappop(self._jobs)[2]
            job()


def _result_of(job: Callable[[], T]) -> T | Failure:
    """Do a job, and return its result, or why there is none."""
    try:
        return job()
    except (PeerError, ValueError) as e:
        return Failure.of(e, FailureKind.INCOMPATIBLE)
    except Exception as e:
        log.exception("something could not be examined")
        return Failure(FailureKind.MISUSE, f"it could not be examined: {e!r}")
