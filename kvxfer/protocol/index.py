"""An index from keys to several values each."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Hashable)


class Index(Generic[K, V]):
    """Values by key, several for each, in the order in which they came. All operations but ``of`` cost O(1)."""

    def __init__(self) -> None:
        self._values: dict[K, dict[V, None]] = {}

    def add(self, key: K, value: V) -> None:
        self._values.setdefault(key, {})[value] = None

    def remove(self, key: K, value: V) -> None:
        """Forget a value of ``key``, if it has that."""
        values = self._values.get(key)
        if values is not None:
            values.pop(value, None)
            if not values:
                del self._values[key]

    def of(self, key: K) -> list[V]:
        return list(self._values.get(key, ()))

    def count(self, key: K) -> int:
        """Return how many values ``key`` has."""
        return len(self._values.get(key, ()))

    def pop(self, key: K) -> list[V]:
        """Forget all values of ``key``, and return them."""
        return list(self._values.pop(key, ()))
