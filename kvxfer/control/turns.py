"""Turns: a queue in which owners take turns, so that one with many items does not keep others waiting."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Turns"]

Owner = TypeVar("Owner", bound=Hashable)
Item = TypeVar("Item")


class Turns(Generic[Owner, Item]):
    """Items that wait, by owner: the owners take turns, and the items of each stay in order."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Owner, deque[Item]] = OrderedDict()

    def add(self, owner: Owner, item: Item) -> None:
        self._waiting.setdefault(owner, deque()).append(item)

    def next(self) -> Item | None:
        """Take out the item whose turn it is; ``None`` if none waits."""
        if not self._waiting:
            return None
        owner, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[owner] = items
        return item
