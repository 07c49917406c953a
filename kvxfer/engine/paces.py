"""How long loads have taken of late, by which the next ones are judged."""

from __future__ import annotations

import statistics
from collections import deque

from kvxfer.identity import Source

__all__ = ["LinkPaces", "Pace"]

REMEMBERED = 16
"""By so many of the last ones the next is judged."""
ALIKE = 2
"""Of what was nearest in size, and up to so many times as far from it, most decide."""
MOST_LINKS = 1024


class Pace:
    """How long something took of late, and for how many tokens."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)

    def took(self, tokens: int, seconds: float) -> None:
        """Take in that so many tokens took so long."""
        self._seen.append((max(tokens, 1), seconds))

    def estimate(self, tokens: int) -> float | None:
        """Return the seconds that these tokens should take, as most of their like have; None if nothing is known.

        What fewer tokens took is multiplied, though it has a part that does not grow; so the like count alone.
        """
        if not self._seen:
            return None
        sizes = [max(tokens / n, n / tokens) for n, _ in self._seen]
        alike = [load for load, size in zip(self._seen, sizes, strict=True) if size <= ALIKE * min(sizes)]
        return statistics.median(s * max(1.0, tokens / n) for n, s in alike)


class LinkPaces:
    """The pace of loads from each other engine."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, int], Pace | None] = {}  # None: it has failed, and nothing has come since

    def delivered(self, source: Source, tokens: int, seconds: float) -> None:
        """Take in that a load of so many tokens took so long."""
        pace = self._links.pop((source.host, source.port), None) or Pace()
        pace.took(tokens, seconds)
        self._know(source, pace)

    def failed(self, source: Source) -> None:
        """Take in that a load failed, or was waited for in vain: what was known holds no more."""
        self._know(source, None)

    def estimate(self, source: Source, tokens: int) -> float | None:
        """Return the seconds that a load should take; 0 if it is the first, None if nothing is to be expected."""
        pace = self._links.get((source.host, source.port), Pace())
        return None if pace is None else pace.estimate(tokens) or 0.0

    def _know(self, source: Source, pace: Pace | None) -> None:
        self._links[source.host, source.port] = pace
        while len(self._links) > MOST_LINKS:  # that of which something was known first
            del self._links[next(iter(self._links))]
