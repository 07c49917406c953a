"""Budgets that many peers share, so that no number of greedy ones keeps the others from what is bounded.

One rule holds for all of it: whoever has ``n`` gets more only while more than ``n`` are free. One that takes all it can gets
half, the next one a third, and a newcomer finds something free.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Keep", "PeerBudgets"]

Owner = TypeVar("Owner", bound=Hashable)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class PeerBudgets(Generic[Owner]):
    """A bounded number of something, by who has how many.

    Args:
        total: how many there are.
    """

    def __init__(self, total: int) -> None:
        self._free = total
        self._held: Counter[Owner] = Counter()

    def take(self, owner: Owner, n: int = 1) -> bool:
        """Give ``owner`` another ``n`` if the rule allows it, and return whether it did."""
        if self._held[owner] + n > self._free:
            return False
        self._held[owner] += n
        self._free -= n
        return True

    def give(self, owner: Owner, n: int = 1) -> None:
        """Take ``n`` back from ``owner``."""
        self._free += n
        self._held[owner] -= n
        if not self._held[owner]:
            del self._held[owner]


class Keep(Generic[Owner, K, V]):
    """Values that are remembered for a while, within a budget that their owners share.

    Where a value finds no room, the oldest of the same owner go. All operations cost O(1); the clock is an argument.

    Args:
        seconds: for which each value is remembered.
        most: how many values there may be in all.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self._kept: OrderedDict[tuple[Owner, K], tuple[float, V]] = OrderedDict()
        self._keys: dict[Owner, OrderedDict[K, None]] = {}
        self._owners: dict[K, dict[Owner, None]] = {}

    def put(self, owner: Owner, key: K, value: V, now: float) -> None:
        self.pop(owner, key)
        while (mine := self._keys.get(owner)) and len(mine) >= self._most - len(self._kept):
            self.pop(owner, next(iter(mine)))
        if len(self._kept) >= self._most:  # that many owners have one each
            self.pop(*next(iter(self._kept)))
        self._kept[owner, key] = now + self._seconds, value
        self._keys.setdefault(owner, OrderedDict())[key] = None
        self._owners.setdefault(key, {})[owner] = None

    def get(self, owner: Owner, key: K) -> V | None:
        found = self._kept.get((owner, key))
        return None if found is None else found[1]

    def owners(self, key: K) -> list[Owner]:
        """Return all who have a value of this key, in the order in which they came."""
        return list(self._owners.get(key, ()))

    def pop(self, owner: Owner, key: K) -> None:
        """Forget the value of ``key``, if there is one."""
        if self._kept.pop((owner, key), None) is not None:
            mine, others = self._keys[owner], self._owners[key]
            del mine[key], others[owner]
            if not mine:
                del self._keys[owner]
            if not others:
                del self._owners[key]

    def forget(self, now: float) -> None:
        """Drop what is too old."""
        while (at := self.next()) is not None and at <= now:
            self.pop(*next(iter(self._kept)))

    def next(self) -> float | None:
        """Return when ``forget`` has something to do next, or ``None``."""
        return self._kept[next(iter(self._kept))][0] if self._kept else None

    def __len__(self) -> int:
        return len(self._kept)
