"""Let requests that need fewer blocks overtake loads that need more than are free, without delaying these.

vLLM admits requests in their order, and looks no further than the first for which there are no blocks. A prompt of a hundred
thousand tokens would keep all others from loading while it waits for requests to end, though there is room for most of them.
So it is skipped for a step, as a load is whose producer has not begun. It cannot be passed for ever: once it would have room if nobody
had passed it, it is skipped no more, and nobody is admitted before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvxfer.values import Group
from kvxfer_vllm.requests import RequestFacts

__all__ = ["Room"]

MAX_PASSED = 4
"""Loads that are skipped at a time: vLLM looks for each of them in its prefix cache in every step."""


class Room:
    """Which loads are passed, and by which; one thread."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._blocks = [group.block_tokens for group in groups if group.kind == "full"]
        self._manager: Any = None
        self._passed: list[RequestFacts] = []  # loads that are skipped

    def bind(self, manager: Any) -> None:
        """Take vLLM's manager of the KV cache, until which nobody passes."""
        self._manager = manager

    def lacks(self, facts: RequestFacts, start: int, end: int) -> bool:
        """Return whether a load of these tokens is to be skipped, because there are no blocks for it.

        What windows and states take is not counted: it does not lack room that it may have.
        """
        if self._manager is None:
            return False
        need = sum(-(-end // block) - start // block for block in self._blocks)
        free = self._manager.block_pool.get_num_free_blocks()
        if need <= free or (facts.passers is None and len(self._passed) >= MAX_PASSED):
            return False
        if facts.passers is None:
            facts.passers = set()
            self._passed.append(facts)
        return bool(
            need > free + sum(len(row) for other in facts.passers for row in self._manager.get_block_ids(other))
        )

    def admitted(self, facts: RequestFacts) -> None:
        """Record that a request has blocks: it has passed those that came before it and wait."""
        self._waits_no_more(facts)
        for waiting in self._passed:
            if waiting.number < facts.number and waiting.passers is not None:
                waiting.passers.add(facts.name)

    def finished(self, facts: RequestFacts) -> None:
        """Record that a request is over."""
        self._waits_no_more(facts)
        for waiting in self._passed:
            if waiting.passers is not None:
                waiting.passers.discard(facts.name)

    def _waits_no_more(self, facts: RequestFacts) -> None:
        if facts.passers is not None:
            facts.passers = None
            self._passed.remove(facts)
