"""Keep the KV of answers from being evicted for a while, if the operator asks for that: a next turn may want it.

The engine's own requests come first. What is kept is at most a quarter of the pool. The oldest is given back as soon as less than a
quarter is free.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Hashable

from kvxfer.engine import BlockPins

__all__ = ["KeptAnswers"]

SHARE = 4
"""Which part of the pool may be kept, and which must be free while anything is."""


class KeptAnswers:
    """The answers that are kept, each for a number of seconds; 0 for not at all. One thread. ``pins`` keeps their blocks from reuse."""

    def __init__(self, pins: BlockPins, blocks: int, seconds: float) -> None:
        self._pins, self._most, self._seconds = pins, blocks // SHARE, seconds
        self._kept: deque[tuple[Hashable, int, float]] = deque()  # under what, how many blocks, and until when
        self._blocks = 0

    def keep(self, number: int, blocks: Collection[int]) -> None:
        """Keep the blocks of the request of this number, which has just ended; they are still in use."""
        holder = "answer", number
        if self._seconds and len(blocks) <= self._most and self._pins.keep(holder, blocks):
            self._kept.append((holder, len(blocks), time.monotonic() + self._seconds))
            self._blocks += len(blocks)

    def give_back(self, free: int) -> None:
        """Let go of what has been kept long enough, and of the oldest while too few blocks of the pool are free."""
        now = time.monotonic()
        while self._kept:
            _, count, until = self._kept[0]
            if until > now and self._blocks <= self._most and free >= self._most:
                return
            self._drop_oldest()
            free += count

    def clear(self) -> None:
        """Let go of everything."""
        while self._kept:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        holder, count, _ = self._kept.popleft()
        self._blocks -= count
        self._pins.drop(holder)

    def __len__(self) -> int:
        return len(self._kept)
