"""Threads for jobs that take as long as somebody else likes, such as looking a name up that a peer has chosen."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from kvxfer.control.worker import result_of
from kvxfer.protocol.budgets import NewcomerShares
from kvxfer.threads import NamedThread

__all__ = ["FairPool"]

T = TypeVar("T")


class FairPool:
    """Threads that do jobs for owners, who take turns.

    Each owner may have three quarters of what the others leave of the threads, and of the room to wait. So a newcomer's job is begun though
    those of others do not end. The threads start as they are needed. Any thread may call the methods. What follows from a job's result
    is given to ``hand``, which has another thread call it.

    Args:
        name: The threads' name.
        threads: How many there are at the most.
        most: How many jobs may wait or be under way.
        hand: See above.
    """

    def __init__(self, name: str, threads: int, most: int, hand: Callable[[Callable[..., Any]], None]) -> None:
        self._name, self._most, self._hand = name, threads, hand
        self._change = threading.Condition()
        self._room: NewcomerShares[str] = NewcomerShares(most)
        self._busy: NewcomerShares[str] = NewcomerShares(threads)
        self._waiting: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()
        self._threads: list[NamedThread] = []
        self._idle = self._pending = 0  # threads without a job, and jobs without a thread
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
        with self._change:
            if self._closed or not self._room.room(owner) or not self._manned():
                return False
            self._room.take(owner, 1)
            self._waiting.setdefault(owner, deque()).append(lambda: self._hand(partial(then, result_of(job))))
            self._pending += 1
            self._change.notify()
        return True

    def _manned(self) -> bool:
        """Start a thread if one more job needs it; return whether there is any."""
        if self._idle <= self._pending and len(self._threads) < self._most:
            thread = NamedThread(target=self._run, name=self._name)
            try:
                thread.start()
            except RuntimeError:
                return bool(self._threads)
            self._threads.append(thread)
        return True

    def close(self, timeout: float) -> None:
        """Begin no more jobs, and wait for those that have begun for up to ``timeout`` seconds (the threads are daemons). Idempotent."""
        with self._change:
            self._closed = True
            self._waiting.clear()
            self._change.notify_all()
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    def _run(self) -> None:
        while True:
            with self._change:
                self._idle += 1
                self._change.wait_for(lambda: self._closed or self._next() is not None)
                self._idle -= 1
                owner = self._next()
                if self._closed or owner is None:
                    return
                job = self._take(owner)
            job()
            with self._change:
                self._busy.give(owner, 1)
                self._room.give(owner, 1)
                self._change.notify()  # a job of this owner may have waited for its share of the threads

    def _next(self) -> str | None:
        """Return the owner whose turn it is, of those that may have one more thread."""
        return next((owner for owner in self._waiting if self._busy.room(owner)), None)

    def _take(self, owner: str) -> Callable[[], None]:
        """Take out the next job of an owner, whose turn comes last from then on."""
        waiting = self._waiting.pop(owner)
        self._busy.take(owner, 1)
        self._pending -= 1
        job = waiting.popleft()
        if waiting:
            self._waiting[owner] = waiting
        return job
