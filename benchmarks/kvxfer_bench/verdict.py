"""What rounds in turns say of two configurations: a median with its interval, and a verdict in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Estimate", "compare", "estimate"]

LEVEL = 0.95
FEWEST = 6
"""Rounds below which no interval has that level: all of five are on one side of the median in one of sixteen runs."""


class Estimate(NamedTuple):
    """A median of rounds, and between which of its values the true one lies with a probability of ``LEVEL`` or more."""

    median: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """A verdict on a difference in milliseconds: how much slower the second configuration is than the first."""
        way = "slower" if self.median >= 0 else "faster"
        found = f"{abs(self.median):.1f} ms {way}, interval {self.low:.1f} to {self.high:.1f}"
        return found if self.low > 0 or self.high < 0 else f"no difference shown: {found}"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median and its interval, which is ``-inf`` to ``inf`` for fewer than ``FEWEST`` values.

    The interval runs between two of the sorted values. It supposes nothing of how they are spread, only that rounds are independent:
    each is above the true median as often as below.
    """
    ranked, n = sorted(values), len(values)
    left, tail = -1, 0.0  # how many values lie outside on each side, less one, and how probable it is that more should
    while 2 * (tail := tail + math.comb(n, left + 1) / 2**n) <= 1 - LEVEL:
        left += 1
    low, high = (-math.inf, math.inf) if left < 0 else (ranked[left], ranked[n - 1 - left])
    return Estimate(statistics.median(ranked), low, high)


def compare(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return how much more the second configuration takes, by the differences of rounds that took turns."""
    return estimate([b - a for a, b in zip(first, second, strict=True)])
