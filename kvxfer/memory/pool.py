"""A few threads that share the copying of large plans: numpy lets go of the interpreter while it copies."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_parallel"]

T = TypeVar("T")

_WORTH = 2 << 20
"""Bytes below which a share is not worth another thread."""

_MOST = 8
"""A few cores fill the memory bus; more would only take them from the engine."""

_pools: dict[int, ThreadPoolExecutor] = {}


def in_parallel(nbytes: int, share: Callable[[int, int], T]) -> list[T]:
    """Return ``[share(i, n) for i in range(n)]``, computed by ``n`` threads, the calling one among them.

    ``n`` follows from ``nbytes`` and the cores that this process may use. What a share raises is raised after all have
    ended.
    """
    n = max(1, min(_MOST, len(os.sched_getaffinity(0)), nbytes // _WORTH))
    others = [_pool().submit(share, i, n) for i in range(1, n)]
    try:
        first = share(0, n)
    finally:
        rest = [f.exception() for f in others]  # their end is as near as ours: they do nothing but copy
    for error in rest:
        if error is not None:
            raise error
    return [first, *(f.result() for f in others)]


def _pool() -> ThreadPoolExecutor:
    """Return this process's threads; those of a parent did not survive the fork."""
    pool = _pools.get(os.getpid())
    if pool is None:
        _pools.clear()
        pool = _pools[os.getpid()] = ThreadPoolExecutor(_MOST, thread_name_prefix="kvxfer-copy")
    return pool
