"""Threads that share the copying of large plans and batches: one core seldom moves as much as the memory would.

What they run lets go of the interpreter while it copies, as numpy and system calls do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvxfer.threads import name_this_thread

__all__ = ["SHARE_BYTES", "CopyPool", "in_parallel"]

T = TypeVar("T")

SHARE_BYTES = 4 << 20
"""No thread is woken for fewer bytes than these, unless the user of a pool says otherwise."""

_WORTH = 2 << 20
"""The same, where numpy copies."""

_MAX_THREADS = 8
"""A few cores fill the memory bus; more would only take them from the engine."""

_pools: dict[int, CopyPool] = {}


class CopyPool:
    """``size`` threads, the calling one counted. The others are made when there is work for them.

    Attributes:
        size: How many calls are made at the same time at most.
    """

    def __init__(self, size: int, name: str) -> None:
        """Make a pool; ``name`` is what the names of its threads begin with."""
        from concurrent.futures import ThreadPoolExecutor  # here: most agents never copy as much as this

        self.size = size
        self._others = ThreadPoolExecutor(size - 1, name, name_this_thread) if size > 1 else None

    def shares(self, nbytes: int, worth: int | None = None) -> int:
        """Return among how many threads ``nbytes`` are worth sharing, if less than ``worth`` bytes are not."""
        return max(1, min(self.size, nbytes // (worth or SHARE_BYTES)))

    def do(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Make at most ``size`` calls at the same time, the first on the calling thread; return what they returned.

        Raises:
            RuntimeError: The system gives no more threads. From then on the calling thread is alone; nothing of what
                was to be done happens later.
            BaseException: What one of the calls raised, after all have ended.
        """
        others = self._others
        if others is None:
            return [call() for call in calls]
        first, *rest = calls
        try:
            begun = [others.submit(call) for call in rest]
        except RuntimeError:
            self.close()  # what was begun ends now, and what was queued for them never runs
            raise
        results, errors = [], []
        for result in (first, *(future.result for future in begun)):
            try:
                results.append(result())
            except BaseException as e:
                errors.append(e)
        if errors:
            raise errors[0]
        return results

    def close(self) -> None:
        """Wait for the other threads to end; from then on the calling thread is alone."""
        others, self._others, self.size = self._others, None, 1
        if others is not None:
            others.shutdown(cancel_futures=True)


def in_parallel(nbytes: int, share: Callable[[int, int], T]) -> list[T]:
    """Return ``[share(i, n) for i in range(n)]``, computed by threads of this process.

    Args:
        nbytes: Bytes to copy in all; ``n`` follows from them and from the cores that this process may use.
        share: Makes the ``i``-th of ``n`` shares. Any thread.

    Raises:
        BaseException: What a share raised, after all have ended.
    """
    pool = _pool()
    n = min(pool.shares(nbytes, _WORTH), len(os.sched_getaffinity(0)))
    return pool.do([partial(share, i, n) for i in range(n)])


def _pool() -> CopyPool:
    """Return this process's threads; those of a parent did not survive the fork."""
    pool = _pools.get(os.getpid())
    if pool is None:
        _pools.clear()
        pool = _pools[os.getpid()] = CopyPool(_MAX_THREADS, "kvxfer-copy")
    return pool
