"""What many peers have of something bounded, so that no number of greedy ones keeps it from the others.

One rule for all of it: whoever has ``n`` gets more only while more than ``n`` are free. One that takes all it can gets half,
the next one a third, and a newcomer finds something free.
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
    """``total`` of something, by who has it."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._held: Counter[Owner] = Counter()

    def take(self, owner: Owner, n: int = 1) -> bool:
        """Whether ``owner`` may have ``n`` more; then it has them."""
        if self._held[owner] + n > self._free:
            return False
        self._held[owner] += n
        self._free -= n
        return True

    def give(self, owner: Owner, n: int = 1) -> None:
        """``owner`` has ``n`` less."""
        self._free += n
        self._held[owner] -= n
        if not self._held[owner]:
            del self._held[owner]


class Keep(Generic[Owner, K, V]):
    """Values that are remembered for ``seconds`` each, ``most`` in all. Where one finds no room, the oldest of the same owner
    go. All operations cost O(1); the clock is an argument."""

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self._kept: OrderedDict[tuple[Owner, K], tuple[float, V]] = OrderedDict()
        self._keys: dict[Owner, OrderedDict[K, None]] = {}

    def put(self, owner: Owner, key: K, value: V, now: float) -> None:
        self.pop(owner, key)
        while (mine := self._keys.get(owner)) and len(mine) >= self._most - len(self._kept):
            self.pop(owner, next(iter(mine)))
        if len(self._kept) >= self._most:  # that many owners have one each
            self.pop(*next(iter(self._kept)))
        self._kept[owner, key] = now + self._seconds, value
        self._keys.setdefault(owner, OrderedDict())[key] = None

    def get(self, owner: Owner, key: K) -> V | None:
        found = self._kept.get((owner, key))
        return None if found is None else found[1]

    def pop(self, owner: Owner, key: K) -> None:
        """Forget it, if it is known."""
        if self._kept.pop((owner, key), None) is not None:
            mine = self._keys[owner]
            del mine[key]
            if not mine:
                del self._keys[owner]

    def forget(self, now: float) -> None:
        """Drop what is too old."""
        while (at := self.next()) is not None and at <= now:
            self.pop(*next(iter(self._kept)))

    def next(self) -> float | None:
        """When ``forget`` has something to do."""
        return self._kept[next(iter(self._kept))][0] if self._kept else None

    def __len__(self) -> int:
        return len(self._kept)
