"""Deadlines by key, and values remembered for a while; what is due is found without a search."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import count
from typing import Generic, TypeVar

MAX_DUE = 64
"""The most keys that are due, or values that are forgotten, in one call."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Timers(Generic[K]):
    """At most one time for each key. All operations cost O(log keys); the clock is an argument."""

    def __init__(self) -> None:
        self._times: dict[K, float] = {}
        # For every key there is an entry that is not later than its time; others are stale and skipped.
        self._heap: list[tuple[float, int, K]] = []
        self._order = count()

    def set(self, key: K, at: float) -> None:
        """Have ``key`` fall due at ``at``, instead of at the time set before."""
        before = self._times.get(key)
        self._times[key] = at
        if before is None or at < before:
            heapq.heappush(self._heap, (at, next(self._order), key))

    def cancel(self, key: K) -> None:
        """Forget the time of ``key``, if there is one."""
        self._times.pop(key, None)
        if len(self._heap) > 2 * len(self._times) + 64:
            self._heap = [(at, next(self._order), k) for k, at in self._times.items()]
            heapq.heapify(self._heap)

    def due(self, now: float) -> Iterator[K]:
        """Take out, one by one, keys whose time has come, ``MAX_DUE`` at the most.

        The bound lets the thread do other things in between. Keys may be set and cancelled during the iteration.
        """
        for _ in range(MAX_DUE):
            at = self.next()
            if at is None or at > now:
                return
            key = heapq.heappop(self._heap)[2]
            del self._times[key]
            yield key

    def next(self) -> float | None:
        """Return the earliest time that is set, or ``None``."""
        while self._heap:
            at, _, key = self._heap[0]
            wanted = self._times.get(key)
            if wanted == at:
                return at
            heapq.heappop(self._heap)
            if wanted is not None:
                heapq.heappush(self._heap, (wanted, next(self._order), key))
        return None

    def __len__(self) -> int:
        return len(self._times)


class Recent(Generic[K, V]):
    """Values kept for a number of seconds; if there are more than ``most``, the oldest go first."""

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        # The first key of a plain dict is slow to find once many have been removed.
        self._kept: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def put(self, key: K, value: V, now: float) -> None:
        self._kept.pop(key, None)
        self._kept[key] = now + self._seconds, value
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def get(self, key: K) -> V | None:
        found = self._kept.get(key)
        return None if found is None else found[1]

    def pop(self, key: K) -> None:
        self._kept.pop(key, None)

    def keys(self) -> list[K]:
        return list(self._kept)

    def forget(self, now: float) -> None:
        """Drop values that are too old, ``MAX_DUE`` at the most."""
        for _ in range(MAX_DUE):
            at = self.next()
            if at is None or at > now:
                return
            self._kept.popitem(last=False)

    def next(self) -> float | None:
        """Return when ``forget`` has something to do next, or ``None``."""
        return next(iter(self._kept.values()))[0] if self._kept else None

    def __len__(self) -> int:
        return len(self._kept)
