"""Rounds in turns, and what they say of two configurations: a median with its interval, and a verdict in words."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, TypeVar

from kvxfer.cli.terminal import Say

LEVEL = 0.95
FEWEST = 6
"""Rounds below which no interval has that level: all of five are on one side of the median in one of sixteen runs."""

Item = TypeVar("Item")


def mixed_rounds(what: str, items: Collection[Item], rounds: int, say: Say) -> Iterator[tuple[int, Item]]:
    """Yield the number of each round and each item that is left, in a random order; round 0 warms up.

    So other work on the machine affects all alike.
    """
    for number in range(rounds + 1):
        for item in random.sample(list(items), len(items)):
            say(f"{what}, {item}, round {number} of {rounds}" if number else f"{what}, {item}, warm-up")
            yield number, item


class Estimate(NamedTuple):
    """A median of rounds, and between which of its values the true one lies with a probability of ``LEVEL`` or more."""

    median: float
    low: float
    high: float

    def interval(self, digits: int) -> list[float] | None:
        """Return the interval, rounded, or None if there were too few rounds."""
        return None if self.low == -math.inf else [round(self.low, digits), round(self.high, digits)]

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
