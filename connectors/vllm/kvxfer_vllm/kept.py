"""Keep the KV of answers from being evicted for a while, if the operator asks for that: a next turn may want it.

The engine's own requests come first. What is kept is at most a quarter of the pool. The oldest is given back as soon as less than a
quarter is free.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Hashable

from kvxfer.engine import BlockPins

__all__ = ["KeptAnswers"]

SHARE = 4
"""Which part of the pool may be kept, and which must be free while anything is."""


class KeptAnswers:
    """The answers that are kept. One thread.

    Args:
        pins: Keeps their blocks from being reused.
        blocks: The blocks of the engine's pool.
        seconds: For how long an answer is kept; 0 for not at all.
    """

    def __init__(self, pins: BlockPins, blocks: int, seconds: float) -> None:
        self._pins, self._most, self._seconds = pins, blocks // SHARE, seconds
        self._kept: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()  # how many blocks, and until when
        self._blocks = 0

    def keep(self, name: str, blocks: Collection[int]) -> None:
        """Keep the blocks of a request that has just ended, which are still in use."""
        holder = "answer", name
        if self._seconds and len(blocks) <= self._most and self._pins.keep(holder, blocks):
            self._kept[holder] = len(blocks), time.monotonic() + self._seconds
            self._blocks += len(blocks)

    def give_back(self, free: int) -> None:
        """Let go of what has been kept long enough, and of the oldest while too few blocks of the pool are free."""
        now = time.monotonic()
        while self._kept:
            count, until = next(iter(self._kept.values()))
            if until > now and self._blocks <= self._most and free >= self._most:
                return
            self._drop(next(iter(self._kept)))
            free += count

    def clear(self) -> None:
        """Let go of everything."""
        while self._kept:
            self._drop(next(iter(self._kept)))

    def _drop(self, holder: Hashable) -> None:
        self._blocks -= self._kept.pop(holder)[0]
        self._pins.drop(holder)

    def __len__(self) -> int:
        """Return how many answers are kept."""
        return len(self._kept)
