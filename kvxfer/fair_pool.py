"""Threads for jobs that take as long as somebody else likes, such as looking a name up that a peer has chosen."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from kvxfer.errors import PeerError
from kvxfer.failures import Failure, FailureKind
from kvxfer.logs import logger
from kvxfer.shares import NewcomerShares
from kvxfer.threads import NamedThread

__all__ = ["FairPool", "result_of"]

log = logger("kvxfer.agent")

T = TypeVar("T")

_Job = tuple[Callable[[], Any], Callable[..., Any]]
"""What to do, and what follows from its result."""


class FairPool:
    """Threads that do jobs for owners, who take turns.

    Each owner may have three quarters of what the others leave of the threads, and of the room to wait. So a newcomer's job is begun though
    those of others do not end. The threads start as they are needed, and end when there is nothing to do. Any thread may call the methods.

    Args:
        name: The threads' name.
        threads: How many there are at the most.
        most: How many jobs may wait or be under way.
        hand: Has another thread call what follows from a job's result; not called after ``close``. It must not call the pool.
    """

    def __init__(self, name: str, threads: int, most: int, hand: Callable[[Callable[..., Any]], None]) -> None:
        self._name, self._most, self._hand = name, threads, hand
        self._lock = threading.Lock()
        self._room: NewcomerShares[str] = NewcomerShares(most)
        self._busy: NewcomerShares[str] = NewcomerShares(threads)
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def submit(self, owner: str, job: Callable[[], T], then: Callable[..., Any]) -> bool:
        """Queue a job.

        Args:
            owner: Whose job it is.
            job: The job.
            then: What follows: called with its result first, or with a ``Failure`` that says why there is none.

        Returns:
            Whether it will be done; not when its owner has too many, when no thread is to be had, or after ``close``.
        """
        with self._lock:
            if self._closed or not self._room.room(owner):
                return False
            self._waiting.setdefault(owner, deque()).append((job, then))
            self._start()
            if not self._threads:
                del self._waiting[owner]  # in which nothing else waits, as something would have a thread
                return False
            self._room.take(owner, 1)
        return True

    def close(self, timeout: float) -> None:
        """Begin no more jobs, and wait for those that have begun for up to ``timeout`` seconds (the threads are daemons). Idempotent."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            threads = list(self._threads)
        until = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))

    def _start(self) -> None:
        """Start a thread if a job may begin now, and another thread may run."""
        if len(self._threads) < self._most and self._next() is not None:
            thread = NamedThread(target=self._run, name=self._name)
            try:
                thread.start()
            except RuntimeError:  # there are none left: one that runs goes on with the job
                return
            self._threads.add(thread)

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            owner, (job, then) = taken
            result = result_of(job)
            with self._lock:
                self._busy.give(owner, 1)
                self._room.give(owner, 1)
                if not self._closed:
                    self._hand(partial(then, result))

    def _next(self) -> str | None:
        """Return the owner whose turn it is, of those that may have one more thread."""
        return next((owner for owner in self._waiting if self._busy.room(owner)), None)

    def _take(self) -> tuple[str, _Job] | None:
        """Take out the next job, of an owner whose turn comes last from then on; ``None`` ends the thread."""
        with self._lock:
            owner = self._next()
            if owner is None:
                self._threads.discard(threading.current_thread())
                return None
            waiting = self._waiting.pop(owner)
            self._busy.take(owner, 1)
            job = waiting.popleft()
            if waiting:
                self._waiting[owner] = waiting
            self._start()  # for a job that had to wait for a share of the threads
            return owner, job


def result_of(job: Callable[[], T]) -> T | Failure:
    """Do a job, and return its result, or why there is none."""
    try:
        return job()
    except (PeerError, ValueError) as e:
        return Failure.of(e, FailureKind.INCOMPATIBLE)
    except Exception as e:
        log.exception("something could not be examined")
        return Failure(FailureKind.MISUSE, f"it could not be examined: {e!r}")
