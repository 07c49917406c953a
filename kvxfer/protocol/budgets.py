"""Budgets that many peers share, so that no number of greedy ones keeps the others from what is bounded.

All may take until nothing is left. From then on whoever has least is served at the cost of whoever has most, so that ``n`` that
take all they can have one ``n``-th each, and a newcomer gets its own.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from kvxfer.protocol.index import Index

__all__ = ["Keep", "PeerBudgets"]

Owner = TypeVar("Owner", bound=Hashable)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class PeerBudgets(Generic[Owner, K]):
    """A bounded amount of something, by who has how much of it for what.

    Operations cost O(1), and O(owners) once nothing is left.

    Args:
        total: How much there is.
    """

    def __init__(self, total: int) -> None:
        self._free = total
        self._sums: Counter[Owner] = Counter()
        self._taken: dict[Owner, OrderedDict[K, int]] = {}

    def take(self, owner: Owner, key: K, n: int) -> list[K] | None:
        """Give ``owner`` another ``n`` for ``key``, which no other has.

        Returns:
            The keys that get nothing any more instead, from the newest of whoever had most; ``None`` when that would be ``owner``
            itself, which gets nothing.
        """
        mine = self._sums[owner] + n
        beyond = sum(held - mine for held in self._sums.values() if held > mine) if n > self._free else 0
        if n > self._free + beyond:
            return None
        lost = []
        while n > self._free:
            most = max(self._sums, key=self._sums.__getitem__)
            lost.append(next(reversed(self._taken[most])))
            self.give(most, lost[-1])
        self._free -= n
        self._sums[owner] = mine
        self._taken.setdefault(owner, OrderedDict())[key] = n
        return lost

    def give(self, owner: Owner, key: K) -> None:
        """Take back what ``owner`` has for ``key``, if it has not lost that."""
        taken = self._taken.get(owner)
        n = None if taken is None else taken.pop(key, None)
        if taken is None or n is None:
            return
        self._free += n
        self._sums[owner] -= n
        if not taken:
            del self._sums[owner], self._taken[owner]

    def merge(self, owner: Owner, into: Owner) -> None:
        """Count what ``owner`` has as another's: it comes no more, and must not have a share for ever."""
        taken = self._taken.pop(owner, None)
        if taken is not None:
            self._sums[into] += self._sums.pop(owner)
            self._taken.setdefault(into, OrderedDict()).update(taken)


class Keep(Generic[Owner, K, V]):
    """Values that are remembered for a while, within a budget that their owners share.

    Where a value finds no room, the oldest of the same owner go. All operations cost O(1); the clock is an argument.

    Args:
        seconds: For which each value is remembered.
        most: How many values there may be in all.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self._kept: OrderedDict[tuple[Owner, K], tuple[float, V]] = OrderedDict()
        self._keys: dict[Owner, OrderedDict[K, None]] = {}
        self._owners: Index[K, Owner] = Index()

    def put(self, owner: Owner, key: K, value: V, now: float) -> None:
        self.pop(owner, key)
        while (mine := self._keys.get(owner)) and len(mine) >= self._most - len(self._kept):
            self.pop(owner, next(iter(mine)))
        if len(self._kept) >= self._most:  # that many owners have one each
            self.pop(*next(iter(self._kept)))
        self._kept[owner, key] = now + self._seconds, value
        self._keys.setdefault(owner, OrderedDict())[key] = None
        self._owners.add(key, owner)

    def get(self, owner: Owner, key: K) -> V | None:
        found = self._kept.get((owner, key))
        return None if found is None else found[1]

    def owners(self, key: K) -> list[Owner]:
        """Return all who have a value of this key, in the order in which they came."""
        return self._owners.of(key)

    def pop(self, owner: Owner, key: K) -> None:
        """Forget the value of ``key``, if there is one."""
        if self._kept.pop((owner, key), None) is not None:
            self._owners.remove(key, owner)
            mine = self._keys[owner]
            del mine[key]
            if not mine:
                del self._keys[owner]

    def forget(self, now: float) -> None:
        """Drop what is too old."""
        while (at := self.next()) is not None and at <= now:
            self.pop(*next(iter(self._kept)))

    def next(self) -> float | None:
        """Return when ``forget`` has something to do next, or ``None``."""
        return self._kept[next(iter(self._kept))][0] if self._kept else None

    def __len__(self) -> int:
        return len(self._kept)
