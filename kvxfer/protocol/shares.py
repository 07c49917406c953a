"""What peers share: bounded amounts, values that are remembered for a while, turns, and a thread's time.

What is shared counts for peers, level by level (``peer.py``): hosts have equal shares, then the engines of a host, then the owners of an
engine, such as its connections. So one that is greedy, or claims many names, takes from its own share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, Literal, TypeVar

from kvxfer.protocol.index import Index
from kvxfer.protocol.peer import NOBODY, PeerIdentity

Owner = TypeVar("Owner", bound=Hashable)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_DEBTORS = 4096
"""The most owners whose debts are remembered. The one that has cost nothing for longest is forgiven."""


class _Share(Generic[Owner, K]):
    """What an owner has, or a group of them: a host, or an engine of it."""

    __slots__ = ("above", "entered", "inside", "keys", "largest_first", "name", "number", "peer", "total")

    def __init__(self, name: Hashable, above: _Share[Owner, K] | None) -> None:
        self.name, self.above, self.total = name, above, 0
        self.peer = NOBODY  # of an owner
        # How often one inside has come to have something, and which of those times it was this one.
        self.entered = self.number = 0
        if above is not None:
            above.entered = self.number = above.entered + 1
        self.inside: dict[Hashable, _Share[Owner, K]] = {}
        self.keys: OrderedDict[K, int] = OrderedDict()
        # A heap of those inside; empty while nobody has asked. An entry counts if it is still what its share has.
        self.largest_first: list[tuple[int, int, _Share[Owner, K]]] = []

    def add(self, n: int) -> None:
        share: _Share[Owner, K] | None = self
        while share is not None:
            share.total += n
            if share.above is not None and share.above.largest_first:
                share.changed()
            share = share.above

    def changed(self) -> None:
        """Have the heap that this share is in know its total."""
        assert self.above is not None
        heap = self.above.largest_first
        if len(heap) > 2 * len(self.above.inside) + 8:
            heap.clear()
        else:
            heappush(heap, (-self.total, self.number, self))

    def largest(self) -> _Share[Owner, K]:
        """Return which of those inside has most."""
        heap = self.largest_first
        while heap and heap[0][:2] != (-heap[0][2].total, heap[0][2].number):
            heappop(heap)
        if not heap:
            heap += [(-share.total, share.number, share) for share in self.inside.values()]
            heapify(heap)
        return heap[0][2]


class Shares(Generic[Owner, K]):
    """A bounded amount of something (``total``), with what each owner has of it for each key.

    Peers may take until nothing is left. From then on the one that has least is served at the cost of the one that has most, so that
    ``n`` peers that take all they can get one ``n``-th each, and so does a newcomer.

    Operations cost O(log owners), and O(owners) the first time that something is short, or where something may be refused.

    Args:
        total: The amount.
        loses: What the owner that has most loses first. ``newest``: who asks for more than its share gets nothing. ``oldest``: it loses
            what it had. ``nothing``: what is given cannot be taken back, and a host may have three quarters of what the others leave,
            so that some is left for a newcomer.
    """

    def __init__(self, total: int, loses: Literal["newest", "oldest", "nothing"]) -> None:
        self._total, self._loses = total, loses
        self._all: _Share[Owner, K] = _Share(None, None)
        self._owners: dict[Owner, _Share[Owner, K]] = {}
        # Those of them that have nothing. They are forgotten when they leave, or another one comes.
        self._idle: dict[Owner, _Share[Owner, K]] = {}

    @property
    def taken(self) -> int:
        """How much all owners have together."""
        return self._all.total

    def room(self, peer: PeerIdentity) -> int:
        """Return how much more a peer's host may have, and leave a quarter of what the others leave."""
        host = self._all.inside.get(peer.levels[0])
        mine = 0 if host is None else host.total
        return max(-(-3 * (self._total - (self._all.total - mine)) // 4) - mine, 0)

    def take(self, owner: Owner, key: K, n: int = 1, peer: PeerIdentity = NOBODY) -> list[K] | None:
        """Give ``owner``, which belongs to this peer, another ``n`` for ``key``, which is not in use yet.

        Returns:
            The keys that lose theirs to make room, those of the owner that has most first; ``None`` if ``owner`` gets nothing.
        """
        if self._loses == "nothing" and n > self.room(peer):
            return None
        if owner in self._idle and self._idle[owner].peer != peer:
            self.leave(owner)  # it has proved who it is since
        mine = self._owners[owner] if owner in self._owners else self._enter(owner, peer)
        mine.keys[key] = n
        self._idle.pop(owner, None)
        share: _Share[Owner, K] | None = mine
        while share is not None:  # not by ``add``: every transfer comes here twice
            if share.above is not None and not share.total:
                # Of those that have as much, it is the last to lose something, or it would lose at once what it takes.
                share.above.entered = share.number = share.above.entered + 1
            share.total += n
            if share.above is not None and share.above.largest_first:
                share.changed()
            share = share.above
        lost: list[K] = []
        lacking = self._all.total - self._total
        if lacking > 0 and self._loses == "newest" and lacking > self._beyond(mine):
            self.give(owner, key)
            return None
        while self._all.total > self._total:
            most = self._all
            while most.inside:
                most = most.largest()
            lost.append(next(iter(most.keys) if self._loses == "oldest" else reversed(most.keys)))
            self.give(most.name, lost[-1])  # type: ignore[arg-type]
        return lost

    def give(self, owner: Owner, key: K) -> None:
        """Take back what ``owner`` has for ``key``, if it still has it."""
        share = self._owners.get(owner)
        if share is not None and key in share.keys:
            share.add(-share.keys.pop(key))
            if not share.keys:
                self._idle[owner] = share

    def leave(self, owner: Owner) -> None:
        """Forget an owner, if it has nothing."""
        share = self._idle.pop(owner, None)
        if share is not None:
            self._forget(share)

    def merge(self, owner: Owner, into: Owner, peer: PeerIdentity = NOBODY) -> None:
        """Count what ``owner`` has as another's, of this peer, because it is gone and must not keep a share for ever."""
        share = self._owners.get(owner)
        if share is not None and share.keys:
            heir = self._owners.get(into) or self._enter(into, peer)
            self._idle.pop(into, None)
            heir.keys.update(share.keys)
            heir.add(share.total)
            share.add(-share.total)
            self._forget(share)
        self.leave(owner)

    def keys(self, owner: Owner) -> list[K]:
        """Return the keys for which an owner has something, the oldest first."""
        share = self._owners.get(owner)
        return [] if share is None else list(share.keys)

    def _enter(self, owner: Owner, peer: PeerIdentity) -> _Share[Owner, K]:
        for idle in list(self._idle):
            self.leave(idle)
        share = self._all
        for name in (*peer.levels, owner):
            inside = share.inside.get(name)
            if inside is None:
                inside = share.inside[name] = _Share(name, share)
            share = inside
        self._owners[owner], share.peer = share, peer
        return share

    def _forget(self, share: _Share[Owner, K]) -> None:
        """Forget an owner, and the groups in which nobody is left."""
        del self._owners[share.name]  # type: ignore[arg-type]
        while share.above is not None and not share.inside:
            del share.above.inside[share.name]
            share.name = None  # which may hold much, as a connection does; what is left of a share may be in a heap
            share = share.above

    def _beyond(self, share: _Share[Owner, K]) -> int:
        """Return how much others have beyond what an owner has."""
        beyond = 0
        while share.above is not None:
            beyond += sum(one.total - share.total for one in share.above.inside.values() if one.total > share.total)
            share = share.above
        return beyond


class ExpiringMap(Generic[Owner, K, V]):
    """Values that are remembered for a while. If there are too many, the oldest goes of the owner that has most.

    The clock is an argument. Each value is remembered for ``seconds``, and there are ``most`` of them at most.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds = seconds
        # With the time until which each is kept.
        self._values: OrderedDict[tuple[Owner, K], tuple[float, V]] = OrderedDict()
        self._shares: Shares[Owner, tuple[Owner, K]] = Shares(most, "oldest")

    def put(self, owner: Owner, key: K, value: V, now: float, peer: PeerIdentity = NOBODY) -> None:
        """Remember a value; ``peer``: whose its owner is, which stays so while the owner has anything."""
        if (owner, key) in self._values:
            self.pop(owner, key)
        self._values[owner, key] = now + self._seconds, value
        for lost in self._shares.take(owner, (owner, key), 1, peer) or ():
            self.pop(*lost)

    def get(self, owner: Owner, key: K) -> V | None:
        known = self._values.get((owner, key))
        return None if known is None else known[1]

    def pop(self, owner: Owner, key: K) -> bool:
        """Forget the value of ``key``; return whether there was one."""
        if self._values.pop((owner, key), None) is None:
            return False
        self._shares.give(owner, (owner, key))
        return True

    def leave(self, owner: Owner) -> None:
        """Forget all values of an owner."""
        for key in self._shares.keys(owner):
            self.pop(*key)
        self._shares.leave(owner)

    def forget(self, now: float) -> None:
        """Drop what is too old."""
        while (at := self.next()) is not None and at <= now:
            self.pop(*next(iter(self._values)))

    def next(self) -> float | None:
        """Return when ``forget`` has something to do next, or ``None``."""
        return self._values[next(iter(self._values))][0] if self._values else None

    def __len__(self) -> int:
        return len(self._values)


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


class Turns(Generic[Owner, K]):
    """Keys that wait, by owner: the owners take turns, and the keys of each stay in order. Each waits once."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Owner, OrderedDict[K, None]] = OrderedDict()

    def add(self, owner: Owner, key: K) -> None:
        self._waiting.setdefault(owner, OrderedDict())[key] = None

    def remove(self, owner: Owner, key: K) -> None:
        """Let a key wait no more, if it does."""
        keys = self._waiting.get(owner)
        if keys is not None and keys.pop(key, self) is None and not keys:
            del self._waiting[owner]

    def __bool__(self) -> bool:
        """Return whether any key waits."""
        return bool(self._waiting)

    def next(self) -> K | None:
        """Take out the key whose turn it is; ``None`` if none waits."""
        if not self._waiting:
            return None
        owner, keys = self._waiting.popitem(last=False)
        key, _ = keys.popitem(last=False)
        if keys:
            self._waiting[owner] = keys
        return key


class Debts(Generic[Owner]):
    """What owners owe, in seconds, for what they have cost lately. Each second pays off one. The clock is an argument."""

    def __init__(self) -> None:
        # How much, as of when; the last to owe is the last.
        self._owed: OrderedDict[Owner, tuple[float, float]] = OrderedDict()

    def of(self, owner: Owner, now: float) -> float:
        """Return how much an owner owes."""
        owed, then = self._owed.get(owner, (0.0, now))
        return max(0.0, owed - (now - then))

    def add(self, owner: Owner, seconds: float, now: float) -> float:
        """Have an owner owe more; return how much it owes."""
        owed = self.of(owner, now) + seconds
        self._owed[owner] = owed, now
        self._owed.move_to_end(owner)
        while self._owed and (len(self._owed) > MAX_DEBTORS or not self.of(next(iter(self._owed)), now)):
            self._owed.popitem(last=False)
        return owed

    def owing(self, now: float) -> int:
        """Return how many owners owe something."""
        return sum(self.of(owner, now) > 0 for owner in self._owed)
