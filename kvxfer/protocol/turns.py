"""Turns: a queue in which owners take turns, so that one with many items does not keep others waiting."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)
Item = TypeVar("Item", bound=Hashable)


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
