"""Blocks of a load that begin behind a window, so that a producer need not have all of their tokens.

vLLM keeps whole blocks behind a window if drafts of several modules look back further than the model. And a producer with smaller blocks
has given up some tokens of the window's first block. A load leaves these as they are. vLLM takes the blocks for loaded, and would hand them
to requests whose windows reach further back; so they are taken out of its prefix cache as soon as they are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvxfer.values import NULL, BlockTable, Group
from kvxfer_vllm.requests import RequestFacts

__all__ = ["RetainedBlocks"]

UNIT = 16
"""The tokens of the smallest block that a producer may have. Larger ones are multiples of it."""


class RetainedBlocks:
    """The blocks of requests that load. One thread."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._windows = [(g, group) for g, group in enumerate(groups) if group.kind == "window"]
        self._manager: Any = None

    def bind(self, manager: Any) -> None:
        """Use vLLM's manager of the KV cache."""
        self._manager = manager

    def loads(self, facts: RequestFacts, table: BlockTable, start: int, end: int) -> None:
        """Record that a request loads the tokens ``[start, end)`` into a table."""
        for g, group in self._windows:
            there = group.behind(end) // UNIT * UNIT  # from this token on, any producer has them
            facts.behind.update(table[g][start // group.block_tokens : group.blocks(there)].tolist())
        facts.behind.discard(NULL)

    def cached(self, facts: RequestFacts) -> None:
        """Take what a request's load has left unfilled out of the prefix cache, where it may be by now."""
        if facts.behind:
            self._manager.evict_blocks(facts.behind)
            facts.unfilled |= facts.behind
            facts.behind = set()
