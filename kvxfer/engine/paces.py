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
        self._refused = 0  # since one was tried against the estimate

    def took(self, tokens: int, seconds: float) -> None:
        """Take in that so many tokens took so long."""
        self._seen.append((max(tokens, 1), seconds))

    def estimate(self, tokens: int) -> float | None:
        """Return the seconds that these tokens should take, as most of their like have; None if nothing is known.

        What fewer tokens took is multiplied, though it has a part that does not grow; so the like count alone. If the last of
        them was faster than most, things have got better, and it decides; if it was slower, it is an exception.
        """
        if not self._seen:
            return None
        sizes = [max(tokens / n, n / tokens) for n, _ in self._seen]
        alike = [load for load, size in zip(self._seen, sizes, strict=True) if size <= ALIKE * min(sizes)]
        took = [s * max(1.0, tokens / n) for n, s in alike]
        return min(took[-1], statistics.median(took))

    def fits(self, tokens: int, seconds: float) -> bool:
        """Return whether these tokens may be tried where there are so many seconds for them.

        What is not tried adds nothing to what is known, and a single slow one would refuse all others for good. So when as
        many have been refused as are remembered, one is tried all the same.
        """
        fits = (self.estimate(tokens) or 0.0) <= seconds
        if fits or self._refused < len(self._seen):
            self._refused += not fits
            return fits
        self._refused = 0
        return True


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
