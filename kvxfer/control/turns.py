"""Turns: whatever waits, one after the other, so that nobody who brings much keeps others waiting."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Turns"]

Owner = TypeVar("Owner", bound=Hashable)
Item = TypeVar("Item")


class Turns(Generic[Owner, Item]):
    """Items that wait, by who has brought them: each of those has a turn, the items of one are in order."""

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
