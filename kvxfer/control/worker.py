"""A thread for jobs that take time, for which neither the control thread nor a data thread waits."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from itertools import count

from kvxfer.logs import logger
from kvxfer.threads import NamedThread

__all__ = ["Worker"]

log = logger("kvxfer.worker")


class Worker:
    """A thread that does one job after the other, the lightest first; at most ``most`` may wait.

    A heavy job delays others only once it has begun. The thread starts with the first job. Any thread may call the methods.
    """

    def __init__(self, name: str, most: int) -> None:
        self._most = most
        self._jobs: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._change = threading.Condition()
        self._closed = self._started = False
        self._thread = NamedThread(target=self._run, name=name)

    def submit(self, weight: int, job: Callable[[], None]) -> bool:
        """Queue a job, which must itself report its result; ``weight`` is its approximate cost, in any unit.

        Return false when as many wait as may, no thread is to be had, or after ``close``; then the job is not done.
        """
        with self._change:
            if self._closed or len(self._jobs) >= self._most:
                return False
            if not self._started:
                try:
                    self._thread.start()
                except RuntimeError:
                    return False
                self._started = True
            heapq.heappush(self._jobs, (weight, next(self._order), job))
            self._change.notify()
        return True

    def close(self, timeout: float) -> None:
        """Begin no more jobs, and wait for one that has begun for up to ``timeout`` seconds (the thread is a daemon). Idempotent."""
        with self._change:
            self._closed = True
            self._jobs.clear()
            self._change.notify()
        if self._started and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                job = heapq.heappop(self._jobs)[2]
            try:
                job()
            except Exception:
                log.exception("a job failed")
