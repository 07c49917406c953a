"""Calls that may block, each on a thread that it has to itself meanwhile, watched by the data thread.

Threads are used again: a new one may allocate from another arena of the C library, and what NCCL's init takes there (some
17 MiB) stays with the arena. In 24 rounds of ``test_nothing_leaks`` on GPUs (NCCL 2.28) new threads left 135 MB behind,
and these less than the 16 that it allows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from kvxfer import clock
from kvxfer.threads import NamedThread

T = TypeVar("T")

KEPT = 2
"""Threads that stay when they have nothing to do: one communicator may be opened while another is closed."""


class _Worker:
    """A thread that does one call after the other; a daemon, because nobody can end a call that hangs in a library."""

    _lock = threading.Lock()
    _idle: list[_Worker] = []

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        NamedThread(target=self._run, name="kvxfer-nccl").start()

    @classmethod
    def do(cls, call: Callable[[], None]) -> None:
        """Have a call made that does not raise: by the thread that was idle last, or a new one."""
        with cls._lock:
            worker = cls._idle.pop() if cls._idle else None
        (worker or cls())._calls.put(call)

    @classmethod
    def forget(cls) -> None:
        """In a forked process, which has none of the threads."""
        cls._lock, cls._idle = threading.Lock(), []

    def _run(self) -> None:
        while True:
            self._calls.get()()
            with self._lock:
                if len(self._idle) >= KEPT:
                    return
                self._idle.append(self)


os.register_at_fork(after_in_child=_Worker.forget)


class Task(Generic[T]):
    """One call under way. ``wake``: called when it is over, on its thread. All else is for the data thread."""

    def __init__(self, call: Callable[[], T], wake: Callable[[], None]) -> None:
        self._call, self._wake = call, wake
        self._lock = threading.Lock()
        self._unwanted: Callable[[T], None] | None = None
        self._value: T | None = None
        self.error: Exception | None = None
        self.done = False
        self._begun = clock.now()
        self._over = threading.Event()
        _Worker.do(self._run)

    @property
    def value(self) -> T:
        """What the call returned.

        Raises:
            Exception: What the call raised.
        """
        if self.error is not None:
            raise self.error
        assert self.done
        return self._value  # type: ignore[return-value]  # T may be None

    @property
    def well(self) -> bool:
        """Whether it is over, and did not raise."""
        return self.done and self.error is None

    @property
    def age(self) -> float:
        return clock.now() - self._begun

    def wait(self, until: float) -> bool:
        """Block until it is over, or until a time of ``kvxfer.clock``; whether it then is, and did not raise."""
        self._over.wait(max(0.0, until - clock.now()))
        return self.well

    def abandon(self, unwanted: Callable[[T], None]) -> None:
        """Nobody waits for it any more. What it returns (has returned, or will) goes to ``unwanted``."""
        with self._lock:
            if not self.done:
                self._unwanted = unwanted
                return
        if self.error is None:
            unwanted(self.value)

    def _run(self) -> None:
        value: T | None = None
        try:
            value = self._call()
        except Exception as e:
            self.error = e
        with self._lock:
            self._value, self.done = value, True
        try:
            if self._unwanted is not None and self.error is None:
                self._unwanted(self.value)
            self._wake()
        finally:
            self._over.set()
