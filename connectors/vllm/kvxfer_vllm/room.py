"""Let requests that need fewer blocks overtake loads that need more than are free, without delaying these.

vLLM admits requests in their order, and looks no further than the first for which there are no blocks. A prompt of a hundred
thousand tokens would keep all others from loading while it waits for requests to end, though there is room for most of them.
So it is skipped for a step, as a load is whose producer has not begun. It cannot be passed for ever: once it would have room if nobody
had passed it, it is skipped no more, and nobody is admitted before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from kvxfer.values import Group

__all__ = ["Room"]

MOST_PASSED = 4
"""Loads that are skipped at a time: vLLM looks for each of them in its prefix cache in every step."""


class Room:
    """Which loads are passed, and by whom; one thread."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._blocks = [group.block_tokens for group in groups if group.kind == "full"]
        self._manager: Any = None
        self._numbers = itertools.count()
        self._came: dict[str, int] = {}  # requests, in the order of their arrival
        self._passed: dict[str, set[str]] = {}  # loads that are skipped, and those who have passed them

    def bind(self, manager: Any) -> None:
        """Take vLLM's manager of the KV cache, until which nobody passes."""
        self._manager = manager

    def arrived(self, request: str) -> None:
        """Record that there is a request."""
        self._came[request] = next(self._numbers)

    def lacks(self, request: str, start: int, end: int) -> bool:
        """Return whether a load of these tokens is to be skipped, since there are no blocks for it.

        What windows and states take is not counted: it does not lack room that it may have.
        """
        if self._manager is None or request not in self._came:
            return False
        need = sum(-(-end // block) - start // block for block in self._blocks)
        free = self._manager.block_pool.get_num_free_blocks()
        if need <= free or (request not in self._passed and len(self._passed) >= MOST_PASSED):
            return False
        passers = self._passed.setdefault(request, set())
        return bool(need > free + sum(len(row) for other in passers for row in self._manager.get_block_ids(other)))

    def admitted(self, request: str) -> None:
        """Record that a request has blocks: it has passed those that came before it and wait."""
        self._passed.pop(request, None)
        number = self._came.get(request, 0)
        for waiting, passers in self._passed.items():
            if self._came[waiting] < number:
                passers.add(request)

    def finished(self, request: str) -> None:
        """Record that a request is over."""
        self._came.pop(request, None)
        self._passed.pop(request, None)
        for passers in self._passed.values():
            passers.discard(request)
