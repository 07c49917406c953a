"""Budgets of bounded resources that many peers share, so that greedy ones cannot keep the others from them.

Peers may take until nothing is left. From then on the peer that has least is served at the cost of the one that has most, so that ``n``
peers that take all they can get one ``n``-th each, and so does a newcomer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from kvxfer.protocol.index import Index
from kvxfer.protocol.peer import NOBODY, PeerIdentity

__all__ = ["IndexedExpiringMap", "ExpiringMap", "PeerBudgets"]

Owner = TypeVar("Owner", bound=Hashable)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Share(Generic[Owner, K]):
    """What an owner has, or a group of them: a host, or an engine of it."""

    __slots__ = ("above", "gone", "inside", "name", "path", "taken", "total")

    def __init__(self, name: Hashable, above: _Share[Owner, K] | None) -> None:
        self.name, self.above, self.total, self.gone = name, above, 0, False
        self.inside: dict[Hashable, _Share[Owner, K]] = {}
        self.taken: OrderedDict[K, int] = OrderedDict()
        self.path: list[_Share[Owner, K]] = [self] if above is None else [self, *above.path]

    def add(self, n: int) -> None:
        for share in self.path:
            share.total += n


class PeerBudgets(Generic[Owner, K]):
    """A bounded amount of something, with what each owner has of it for each key.

    Owners belong to peers. What a peer's owners have counts together, level by level (``peer.py``): hosts have equal shares, then
    the engines of a host, then the owners of an engine.

    Operations cost O(1), and O(owners) once nothing is left.
    """

    def __init__(self, total: int) -> None:
        self._free = total
        self._all: _Share[Owner, K] = _Share(None, None)
        self._owners: dict[Owner, _Share[Owner, K]] = {}

    def take(self, owner: Owner, key: K, n: int, peer: PeerIdentity = NOBODY) -> list[K] | None:
        """Give ``owner`` another ``n`` for ``key``, which is not in use yet.

        Returns:
            The keys that lose theirs to make room, the newest first of the owner that has most; ``None`` if that would be ``owner``
            itself, which then gets nothing.
        """
        mine = self._owners.get(owner) or self._enter(owner, peer)
        lost: list[K] = []
        if n > self._free:
            if n > self._free + self._beyond(mine, n):
                return None
            while n > self._free:
                most = self._largest(mine, n)
                lost.append(next(reversed(most.taken)))
                self._take_back(most, lost[-1])
        self._free -= n
        for share in mine.path:
            share.total += n
        mine.taken[key] = n
        return lost

    def give(self, owner: Owner, key: K) -> None:
        """Take back what ``owner`` has for ``key``, if it still has it."""
        share = self._owners.get(owner)
        if share is not None and key in share.taken:
            self._take_back(share, key)

    def leave(self, owner: Owner) -> None:
        """Forget an owner that takes nothing more, as soon as it has nothing."""
        share = self._owners.get(owner)
        if share is not None:
            share.gone = True
            self._prune(share)

    def merge(self, owner: Owner, into: Owner, peer: PeerIdentity = NOBODY) -> None:
        """Count what ``owner`` has as another's, of this peer, because it is gone and must not keep a share for ever."""
        share = self._owners.get(owner)
        if share is not None:
            heir = self._owners.get(into) or self._enter(into, peer)
            heir.taken.update(share.taken)
            heir.add(share.total)
            share.add(-share.total)
            share.taken.clear()
            share.gone = True
            self._prune(share)

    def _enter(self, owner: Owner, peer: PeerIdentity) -> _Share[Owner, K]:
        share = self._all
        for name in (*peer.levels, owner):
            inside = share.inside.get(name)
            if inside is None:
                inside = share.inside[name] = _Share(name, share)
            share = inside
        self._owners[owner] = share
        return share

    def _take_back(self, share: _Share[Owner, K], key: K) -> None:
        n = share.taken.pop(key)
        self._free += n
        for group in share.path:
            group.total -= n
        if share.gone:
            self._prune(share)

    def _prune(self, share: _Share[Owner, K]) -> None:
        """Forget an owner that is gone and has nothing, and the groups in which nobody is left."""
        if share.gone and not share.taken:
            del self._owners[share.name]  # type: ignore[arg-type]
            while share.above is not None and not share.inside:
                del share.above.inside[share.name]
                share = share.above

    def _beyond(self, share: _Share[Owner, K], n: int) -> int:
        """Return how much others have beyond what an owner would have with ``n`` more."""
        beyond = 0
        while share.above is not None:
            mine = share.total + n
            beyond += sum(one.total - mine for one in share.above.inside.values() if one.total > mine)
            share = share.above
        return beyond

    def _largest(self, mine: _Share[Owner, K], n: int) -> _Share[Owner, K]:
        """Return the owner that has most in the group that has most, where ``mine`` counts as having ``n`` more."""
        share = self._all
        while share.inside:
            share = max(share.inside.values(), key=lambda one: one.total + (n if one in mine.path else 0))
        return share


class ExpiringMap(Generic[Owner, K, V]):
    """Values that are remembered for a while, within a budget that their owners share.

    If there is no room for a value, the oldest one goes of the same owner, or of the owner that has most if that owner has less than
    an equal share. All operations cost O(1), and that last one O(owners). The clock is an argument.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self._until: OrderedDict[tuple[Owner, K], float] = OrderedDict()
        self._values: dict[Owner, OrderedDict[K, V]] = {}

    def put(self, owner: Owner, key: K, value: V, now: float) -> None:
        self.pop(owner, key)
        if len(self._until) >= self._most:
            self._make_room(owner)
        self._until[owner, key] = now + self._seconds
        mine = self._values.get(owner)
        if mine is None:
            mine = self._values[owner] = OrderedDict()
        mine[key] = value

    def _make_room(self, owner: Owner) -> None:
        mine = len(self._values.get(owner, ()))
        if mine * (len(self._values) + (not mine)) < self._most:
            owner = max(self._values, key=lambda other: len(self._values[other]))
        self.pop(owner, next(iter(self._values[owner])))

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

    def leave(self, owner: Owner) -> None:
        """Forget all values of an owner."""
        for key in list(self._values.get(owner, ())):
            self.pop(owner, key)

    def forget(self, now: float) -> None:
        """Drop what is too old."""
        while (at := self.next()) is not None and at <= now:
            self.pop(*next(iter(self._until)))

    def next(self) -> float | None:
        """Return when ``forget`` has something to do next, or ``None``."""
        return self._until[next(iter(self._until))] if self._until else None

    def __len__(self) -> int:
        return len(self._until)


class IndexedExpiringMap(ExpiringMap[Owner, K, V]):
    """An ``ExpiringMap`` that also knows which owners have a value for a key."""

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
