"""Estimate how long loads will take, from how long recent ones took."""

from __future__ import annotations

import math
import statistics
from collections import deque

from kvxfer.config import Ask
from kvxfer.identity import Source

REMEMBERED = 16
"""The number of recent loads that are remembered."""
ALIKE = 2
"""An estimate uses the remembered loads of about the same size: the nearest, and those up to this factor farther off."""
MAX_LINKS = 1024
MIN_STEP = 32
"""The fewest tokens of prompts in a step whose time counts as the time of computing them. With fewer, most goes into the step itself."""


class _Trials:
    """Lets one through now and then that an estimate refuses: after a single slow one, that could refuse all others for ever."""

    def __init__(self) -> None:
        self._refused = 0  # after the last that was let through

    def due(self, after: int) -> bool:
        """Count one that is refused; return whether it is let through, because as many before it were not."""
        self._refused += 1
        if self._refused <= after:
            return False
        self._refused = 0
        return True


class Pace:
    """Estimates how long something takes, by the number of tokens and by how long it took recently."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)
        self._trials = _Trials()

    def took(self, tokens: int, seconds: float) -> None:
        """Record how long a number of tokens took."""
        self._seen.append((max(tokens, 1), seconds))

    def estimate(self, tokens: int) -> float | None:
        """Return the seconds that this number of tokens should take; None if nothing is known.

        Only loads of about the same size count: scaling up the time of a much smaller one would scale its fixed cost too.
        The estimate is their median, or the last one if it was faster (the link has got better; a slower one may be an exception).
        """
        if not self._seen:
            return None
        sizes = [tokens / n if n < tokens else n / tokens for n, _ in self._seen]
        farthest = ALIKE * min(sizes)
        took = [s * max(1.0, tokens / n) for (n, s), size in zip(self._seen, sizes, strict=True) if size <= farthest]
        return min(took[-1], statistics.median(took))

    def fits(self, tokens: int, seconds: float) -> bool:
        """Return whether this number of tokens may be tried within these seconds."""
        return (self.estimate(tokens) or 0.0) <= seconds or self._trials.due(len(self._seen))


class LinkPaces:
    """The pace of loads from each other engine."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, int], Pace | None] = {}  # None: a load failed, and none was delivered since

    def delivered(self, source: Source, tokens: int, seconds: float) -> None:
        """Record how long a load of this number of tokens took."""
        pace = self._links.pop((source.host, source.port), None) or Pace()
        pace.took(tokens, seconds)
        self._know(source, pace)

    def failed(self, source: Source) -> None:
        """Record that a load failed, or was waited for in vain; what was known of the link is dropped."""
        self._know(source, None)

    def estimate(self, source: Source, tokens: int) -> float | None:
        """Return the seconds that a load should take; 0 if nothing is known yet, None if the last load failed."""
        pace = self._links.get((source.host, source.port), Pace())
        return None if pace is None else pace.estimate(tokens) or 0.0

    def _know(self, source: Source, pace: Pace | None) -> None:
        self._links[source.host, source.port] = pace
        while len(self._links) > MAX_LINKS:  # that which has delivered nothing for longest
            del self._links[next(iter(self._links))]


class StepCost:
    """Estimates how much longer a step takes for some more tokens of prompts, by how long recent steps took.

    A step has a fixed time, which is spent in any case. So each step tells only the most that one token can cost, and the fullest steps
    tell it best. Of steps of about the same size the median counts: a slow one may be an exception.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}  # seconds for a token, by the size of the step in powers of two

    def took(self, tokens: int, seconds: float) -> None:
        """Record how long a step with this number of tokens took."""
        alike = self._seen.setdefault(tokens.bit_length(), deque(maxlen=REMEMBERED))
        alike.append(seconds / tokens)

    def estimate(self, tokens: int) -> float | None:
        """Return the seconds that computing this number of tokens should take; None if nothing is known."""
        if not self._seen:
            return None
        return tokens * min(statistics.median(alike) for alike in self._seen.values())


class LoadOrCompute:
    """Estimates whether a load ends before its tokens could be computed.

    How long a load takes counts from its request to the source until the engine is told of its end. So what a load costs whatever its size
    is in it.
    """

    def __init__(self) -> None:
        self._links, self._computing = LinkPaces(), StepCost()
        self._trials = _Trials()

    def took(self, tokens: int, seconds: float) -> None:
        """Record how long a step took that computed ``tokens`` tokens of prompts."""
        if tokens >= MIN_STEP:
            self._computing.took(tokens, seconds)

    def loaded(self, source: Source, tokens: int, seconds: float) -> None:
        """Record how long it took until a load of ``tokens`` tokens was over."""
        self._links.delivered(source, tokens, seconds)

    def computing(self, tokens: int, ask: Ask) -> float:
        """Return the seconds that computing these tokens should take; ``inf`` if that is not known, or does not matter."""
        known = None if ask == "always" else self._computing.estimate(tokens)
        return math.inf if known is None else known

    def saves(self, source: Source, tokens: int, ask: Ask) -> float:
        """Return the seconds that a load should save: less than 0 if it does not pay, ``inf`` if it may be tried anyway.

        That is so if nothing is known, if it does not matter, or after ``REMEMBERED`` that did not pay.
        """
        saved = self.computing(tokens, ask) - (self._links.estimate(source, tokens) or 0.0)
        return saved if saved > 0 or not self._trials.due(REMEMBERED) else math.inf
