"""Calls that may block, each on a thread of its own, watched by the data thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Task"]

T = TypeVar("T")


class Task(Generic[T]):
    """One call under way. ``wake``: called when it is over, on its thread. All else is for the data thread."""

    def __init__(self, name: str, call: Callable[[], T], wake: Callable[[], None]) -> None:
        self._call, self._wake = call, wake
        self._lock = threading.Lock()
        self._unwanted: Callable[[T], None] | None = None
        self._value: T | None = None
        self.error: Exception | None = None
        self.done = False
        self._begun = time.monotonic()
        # A daemon, since nobody can end a call that hangs in a library.
        self._thread = threading.Thread(target=self._run, name=f"kvxfer-nccl-{name}", daemon=True)
        self._thread.start()

    @property
    def value(self) -> T:
        """What the call returned. Raises what it raised."""
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
        return time.monotonic() - self._begun

    def wait(self, until: float) -> bool:
        """Block until it is over, or until a time of ``time.monotonic``; whether it then is, and did not raise."""
        self._thread.join(max(0.0, until - time.monotonic()))
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
        if self._unwanted is not None and self.error is None:
            self._unwanted(self.value)
        self._wake()
