"""A clock by which parts that are under way together have only their share of that time."""

from __future__ import annotations


class ShareClock:
    """A clock that goes slower the more parts are under way; times are seconds of a clock that does not.

    By it, the parts that are under way in some time have that time in all, whether they take turns or share the link.
    """

    def __init__(self) -> None:
        self._seconds, self._read = 0.0, 0.0

    def read(self, now: float, parts: int) -> float:
        """Return the time, given how many parts have been under way since the last call."""
        self._seconds += (now - self._read) / (parts or 1)
        self._read = now
        return self._seconds
