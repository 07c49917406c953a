"""Whether blocks that are held for other engines will be free so soon that waiting for them costs less than preempting a request.

A decode engine mostly fetches a prompt as soon as the prefill engine has answered. Preempting a running request instead costs all of its
KV. How long holds take is measured; what is held for longer, as if nobody fetched it, is not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["PendingFrees"]

FIRST_S = 0.1
"""A first guess of how long blocks are held."""
MIN_S, MAX_S = 0.02, 0.5
"""The shortest and the longest time for which anything is waited for."""
WEIGHT = 0.2
"""That of the newest hold in what is usual."""


class PendingFrees:
    """The requests that are over and whose blocks are held; one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._usual = clock, FIRST_S
        self._held: list[tuple[str, float]] = []  # since when, the oldest first: mostly these are the first to be free
        self._since: float | None = None  # when vLLM began to wait without getting anything

    def held(self, name: str) -> None:
        """Record that a request is over, and its blocks are held."""
        self._held.append((name, self._clock()))

    def released(self, name: str) -> None:
        hold = next((hold for hold in self._held if hold[0] == name), None)
        if hold is not None:
            self._held.remove(hold)
            took = min(self._clock() - hold[1], MAX_S)
            self._usual += WEIGHT * (took - self._usual)
            self._since = None

    @property
    def patience(self) -> float:
        """How many seconds a hold may take before it counts as one that nobody ends."""
        return min(max(2 * self._usual, MIN_S), MAX_S)

    def soon(self) -> bool:
        """Return whether some are likely to be free soon. Call it only where there are no blocks for a running request."""
        now = self._clock()
        if not self._held or now - self._held[-1][1] > self.patience:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since <= self.patience
