"""Budgets of bounded resources that many peers share, so that greedy ones cannot keep the others from them.

Peers may take until nothing is left. From then on whoever has least is served at the cost of whoever has most, so that ``n``
peers that take all they can get one ``n``-th each, and so does a newcomer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from kvxfer.protocol.index import Index

__all__ = ["IndexedKeep", "Keep", "PeerBudgets"]

Owner = TypeVar("Owner", bound=Hashable)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class PeerBudgets(Generic[Owner, K]):
    """A bounded amount of something, with what each owner has of it for each key.

    Operations cost O(1), and O(owners) once nothing is left.

    Args:
        total: How much there is.
    """

    def __init__(self, total: int) -> None:
        self._free = total
        self._sums: dict[Owner, int] = {}
        self._taken: dict[Owner, OrderedDict[K, int]] = {}

    def take(self, owner: Owner, key: K, n: int) -> list[K] | None:
        """Give ``owner`` another ``n`` for ``key``, which is not in use yet.

        Returns:
            The keys that lose theirs to make room, the newest first of whoever has most; ``None`` if that would be ``owner``
            itself, which then gets nothing.
        """
        mine = self._sums.get(owner, 0) + n
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
        _of(self._taken, owner)[key] = n
        return lost

    def give(self, owner: Owner, key: K) -> None:
        """Take back what ``owner`` has for ``key``, if it still has it."""
        taken = self._taken.get(owner)
        n = None if taken is None else taken.pop(key, None)
        if taken is None or n is None:
            return
        self._free += n
        self._sums[owner] -= n
        if not taken:
            del self._sums[owner], self._taken[owner]

    def merge(self, owner: Owner, into: Owner) -> None:
        """Count what ``owner`` has as another's, since it is gone and must not keep a share for ever."""
        taken = self._taken.pop(owner, None)
        if taken is not None:
            self._sums[into] = self._sums.get(into, 0) + self._sums.pop(owner)
            _of(self._taken, into).update(taken)


class Keep(Generic[Owner, K, V]):
    """Values that are remembered for a while, within a budget that their owners share.

    If there is no room for a value, the oldest ones of the same owner go. All operations cost O(1); the clock is an argument.

    Args:
        seconds: How long each value is remembered.
        most: How many values there may be in all.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self._until: OrderedDict[tuple[Owner, K], float] = OrderedDict()
        self._values: dict[Owner, OrderedDict[K, V]] = {}

    def put(self, owner: Owner, key: K, value: V, now: float) -> None:
        self.pop(owner, key)
        while (mine := self._values.get(owner)) and len(mine) >= self._most - len(self._until):
            self.pop(owner, next(iter(mine)))
        if len(self._until) >= self._most:  # that many owners have one each
            self.pop(*next(iter(self._until)))
        self._until[owner, key] = now + self._seconds
        _of(self._values, owner)[key] = value

    def get(self, owner: Owner, key: K) -> V | None:
        mine = self._values.get(owner)
        return None if mine is None else mine.get(key)

    def pop(self, owner: Owner, key: K) -> bool:
        """Forget the value of ``key``; return whether there was one."""
        mine = self._values.get(owner)
        if mine is None or key not in mine:
            return False
        del mine[key], self._until[owner, key]
        if not mine:
            del self._values[owner]
        return True

    def forget(self, now: float) -> None:
        """Drop what is too old."""
        while (at := self.next()) is not None and at <= now:
            self.pop(*next(iter(self._until)))

    def next(self) -> float | None:
        """Return when ``forget`` has something to do next, or ``None``."""
        return self._until[next(iter(self._until))] if self._until else None

    def __len__(self) -> int:
        return len(self._until)


class IndexedKeep(Keep[Owner, K, V]):
    """A ``Keep`` that also knows which owners have a value for a key."""

    def __init__(self, seconds: float, most: int) -> None:
        super().__init__(seconds, most)
        self._owners: Index[K, Owner] = Index()

    def put(self, owner: Owner, key: K, value: V, now: float) -> None:
        super().put(owner, key, value, now)
        self._owners.add(key, owner)

    def pop(self, owner: Owner, key: K) -> bool:
        had = super().pop(owner, key)
        if had:
            self._owners.remove(key, owner)
        return had

    def owners(self, key: K) -> list[Owner]:
        """Return all owners that have a value for this key, in the order in which they came."""
        return self._owners.of(key)


def _of(table: dict[Owner, OrderedDict[K, V]], owner: Owner) -> OrderedDict[K, V]:
    """Return the entries of one owner, to add to."""
    found = table.get(owner)
    if found is None:
        found = table[owner] = OrderedDict()
    return found
