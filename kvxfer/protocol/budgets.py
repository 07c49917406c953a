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
    """A bounded amount of something (``total``), with what each owner has of it for each key.

    Owners belong to peers. What a peer's owners have counts together, level by level (``peer.py``): hosts have equal shares, then
    the engines of a host, then the owners of an engine.

    Operations cost O(1), and O(owners) once nothing is left.
    """

    def __init__(self, total: int) -> None:
        self._free = total
        self._all: _Share[Owner, K] = _Share(None, None)
        self._owners: dict[Owner, _Share[Owner, K]] = {}

    def take(self, owner: Owner, key: K, n: int, peer: PeerIdentity = NOBODY) -> list[K] | None:
        """Give ``owner``, which belongs to this peer, another ``n`` for ``key``, which is not in use yet.

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


class _Held(Generic[Owner, K, V]):
    """The values of all owners of one host, with how many owners have how many."""

    __slots__ = ("by_size", "host", "largest", "n", "values")

    def __init__(self, host: Hashable) -> None:
        self.host = host
        self.values: dict[Owner, OrderedDict[K, V]] = {}
        self.by_size: dict[int, dict[Owner, None]] = {}
        self.n = self.largest = 0

    def count(self, owner: Owner, now: int, more: int) -> None:
        """Record that an owner has ``now`` values, which is one more or one less than it had."""
        was = self.by_size.get(now - more)
        if was is not None:
            was.pop(owner, None)
            if not was:
                del self.by_size[now - more]
        if now:
            same = self.by_size.get(now)
            if same is None:
                self.by_size[now] = {owner: None}
            else:
                same[owner] = None
        self.n += more
        if now > self.largest or self.largest not in self.by_size:
            self.largest = now

    @property
    def greediest(self) -> Owner:
        """Who of them has most."""
        return next(iter(self.by_size[self.largest]))


class ExpiringMap(Generic[Owner, K, V]):
    """Values that are remembered for a while, within a budget that their owners' hosts share, and the owners of each host.

    If there is no room for a value, the oldest one goes of the same owner, or of the owner that has most if that owner has less than
    an equal share. An owner with more names, or more connections, has no more. All operations cost O(1), and that last one O(hosts).
    The clock is an argument. Each value is remembered for ``seconds``, and there are ``most`` of them at most.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self._until: OrderedDict[tuple[Owner, K], float] = OrderedDict()
        self._hosts: dict[Hashable, _Held[Owner, K, V]] = {}
        self._held: dict[Owner, _Held[Owner, K, V]] = {}  # of each owner that has something: its host's

    def put(self, owner: Owner, key: K, value: V, now: float, peer: PeerIdentity = NOBODY) -> None:
        """Remember a value; ``peer``: whose its owner is, which stays so while the owner has anything."""
        if (owner, key) in self._until:
            self.pop(owner, key)
        if len(self._until) >= self._most:
            self._make_room(owner, peer)
        self._until[owner, key] = now + self._seconds
        held = self._held.get(owner)
        if held is None:
            host = peer.levels[0]
            held = self._held[owner] = self._hosts.get(host) or self._hosts.setdefault(host, _Held(host))
            held.values[owner] = OrderedDict()
        mine = held.values[owner]
        mine[key] = value
        held.count(owner, len(mine), 1)

    def _make_room(self, owner: Owner, peer: PeerIdentity) -> None:
        own = self._held.get(owner) or self._hosts.get(peer.levels[0])
        if own is None or own.n * len(self._hosts) < self._most:
            own = max(self._hosts.values(), key=lambda other: other.n)
        mine = len(own.values.get(owner, ()))
        if mine * (len(own.values) + (not mine)) < own.n:
            owner = own.greediest
        self.pop(owner, next(iter(own.values[owner])))

    def get(self, owner: Owner, key: K) -> V | None:
        held = self._held.get(owner)
        return None if held is None else held.values[owner].get(key)

    def pop(self, owner: Owner, key: K) -> bool:
        """Forget the value of ``key``; return whether there was one."""
        if (owner, key) not in self._until:
            return False
        held = self._held[owner]
        mine = held.values[owner]
        del mine[key], self._until[owner, key]
        held.count(owner, len(mine), -1)
        if not mine:
            del held.values[owner], self._held[owner]
            if not held.values:
                del self._hosts[held.host]
        return True

    def leave(self, owner: Owner) -> None:
        """Forget all values of an owner."""
        held = self._held.get(owner)
        for key in list(() if held is None else held.values[owner]):
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

    def put(self, owner: Owner, key: K, value: V, now: float, peer: PeerIdentity = NOBODY) -> None:
        super().put(owner, key, value, now, peer)
        self._owners.add(key, owner)

    def pop(self, owner: Owner, key: K) -> bool:
        had = super().pop(owner, key)
        if had:
            self._owners.remove(key, owner)
        return had

    def owners(self, key: K) -> list[Owner]:
        """Return all owners that have a value for this key, in the order in which they came."""
        return self._owners.of(key)
