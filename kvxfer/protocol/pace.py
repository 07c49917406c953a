"""How fast a link has moved bytes of late, by which it is judged whether bands of layers pay over it."""

from __future__ import annotations

from collections import deque

__all__ = ["LinkPace"]

LEAST = 1 << 20
"""Bytes of a part that tells how fast its link is: of shorter ones most of the time is spent elsewhere."""
REMEMBERED = 8
PAYS_S = 0.02
"""What all bytes of a transfer must take on the wire for bands to pay: these save up to seven eighths of it, and cost both sides seven
more parts."""


class LinkPace:
    """The pace of one link, in one direction."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=REMEMBERED)

    def took(self, nbytes: int, seconds: float) -> None:
        """Take in that a part of so many bytes took so long."""
        if nbytes >= LEAST and seconds > 0:
            self._rates.append(nbytes / seconds)

    def slow(self, nbytes: float) -> bool:
        """Return whether so many bytes would take long enough for bands to pay; not before anything is known.

        The fastest of the last parts tells: others may have shared the link, or waited for something.
        """
        return bool(self._rates) and nbytes >= PAYS_S * max(self._rates)
