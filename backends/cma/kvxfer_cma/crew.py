"""Threads that copy beside the one that has them: one core seldom moves as much as the memory would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Crew"]


class Crew:
    """``size`` threads, the calling one counted. The others are made when there is work for them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._others = ThreadPoolExecutor(size - 1, "kvxfer-cma") if size > 1 else None

    def do(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make at most ``size`` calls at the same time; returns when all have ended. Raises what one of them raised."""
        first, *rest = calls
        begun = [self._others.submit(call) for call in rest] if self._others is not None else []
        errors = []
        for result in (first, *(future.result for future in begun)):
            try:
                result()
            except Exception as e:
                errors.append(e)
        if errors:
            raise errors[0]

    def close(self) -> None:
        if self._others is not None:
            self._others.shutdown()
