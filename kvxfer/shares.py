"""What owners share: a bounded amount, of which some is left for newcomers; and turns, so that many items of one keep nobody waiting."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)
Item = TypeVar("Item", bound=Hashable)


class NewcomerShares(Generic[Owner]):
    """A bounded amount, of which each owner may have three quarters of what the others leave. So some is left for a newcomer."""

    def __init__(self, total: int) -> None:
        self._total, self._taken, self._all = total, dict[Owner, int](), 0

    def room(self, owner: Owner) -> int:
        """Return how much more an owner may take."""
        mine = self._taken.get(owner, 0)
        return max(-(-3 * (self._total - (self._all - mine)) // 4) - mine, 0)

    def take(self, owner: Owner, n: int) -> bool:
        """Give an owner ``n`` more; return False if it may not take so much, and gets nothing."""
        if n > self.room(owner):
            return False
        self._taken[owner] = self._taken.get(owner, 0) + n
        self._all += n
        return True

    def give(self, owner: Owner, n: int) -> None:
        """Take ``n`` back that an owner has."""
        self._all -= n
        self._taken[owner] -= n
        if not self._taken[owner]:
            del self._taken[owner]


class Turns(Generic[Owner, Item]):
    """Items that wait, by owner: the owners take turns, and the items of each stay in order. Each waits once."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Owner, OrderedDict[Item, None]] = OrderedDict()

    def add(self, owner: Owner, item: Item) -> None:
        self._waiting.setdefault(owner, OrderedDict())[item] = None

    def remove(self, owner: Owner, item: Item) -> None:
        """Let an item wait no more, if it does."""
        items = self._waiting.get(owner)
        if items is not None and items.pop(item, self) is None and not items:
            del self._waiting[owner]

    def __bool__(self) -> bool:
        """Return whether any item waits."""
        return bool(self._waiting)

    def next(self) -> Item | None:
        """Take out the item whose turn it is; ``None`` if none waits."""
        if not self._waiting:
            return None
        owner, items = self._waiting.popitem(last=False)
        item, _ = items.popitem(last=False)
        if items:
            self._waiting[owner] = items
        return item
