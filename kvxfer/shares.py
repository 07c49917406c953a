"""Shares of something bounded that leave some for newcomers, whatever those take who came before."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


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
