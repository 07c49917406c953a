"""Threads that copy beside a back end's own: one core seldom moves as much as the memory would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Crew"]

SHARE_BYTES = 4 << 20
"""No thread is woken for less."""


class Crew:
    """``size`` threads, the calling one counted; the others have names that begin with ``name``, and are made when there is work for
    them. Used by one thread at a time."""

    def __init__(self, size: int, name: str) -> None:
        self.size = size
        self._others = ThreadPoolExecutor(size - 1, name) if size > 1 else None

    def shares(self, nbytes: int) -> int:
        """Among how many of them so many bytes are worth sharing."""
        return max(1, min(self.size, nbytes // SHARE_BYTES))

    def do(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make at most ``size`` calls at the same time; returns when all have ended. Raises what one of them raised."""
        others = self._others
        if others is None:
            for call in calls:
                call()
            return
        first, *rest = calls
        try:
            begun = [others.submit(call) for call in rest]
        except RuntimeError:  # the system gives no more threads
            self.close()  # what was begun ends now, and what was queued for them never runs
            raise
        errors = []
        for result in (first, *(future.result for future in begun)):
            try:
                result()
            except BaseException as e:
                errors.append(e)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Wait for the others to end; from then on the calling thread is alone."""
        others, self._others, self.size = self._others, None, 1
        if others is not None:
            others.shutdown(cancel_futures=True)
