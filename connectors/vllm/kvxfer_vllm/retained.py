"""Blocks that lie behind a window, and that vLLM keeps all the same: drafts of several modules look back further than the model.

No producer has them, so a load leaves them as they are. vLLM takes them for loaded, and would hand them to requests whose windows
reach further back; so they are taken out of its prefix cache as soon as they are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvxfer.values import NULL, BlockTable, Group

__all__ = ["RetainedBlocks"]


class RetainedBlocks:
    """Those of requests that load. One thread."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._windows = [(g, group) for g, group in enumerate(groups) if group.kind == "window"]
        self._manager: Any = None
        self._unfilled: dict[str, set[int]] = {}

    def bind(self, manager: Any) -> None:
        """Use vLLM's manager of the KV cache."""
        self._manager = manager

    def loads(self, request: str, table: BlockTable, start: int, end: int) -> None:
        """Record that a request loads the tokens ``[start, end)`` into a table."""
        found: set[int] = set()
        for g, group in self._windows:
            found.update(table[g][start // group.block_tokens : group.behind(end) // group.block_tokens].tolist())
        if found - {NULL}:
            self._unfilled[request] = found - {NULL}

    def cached(self, request: str) -> None:
        """Take what a request's load has left unfilled out of the prefix cache, where it may be by now."""
        if request in self._unfilled:
            self._manager.evict_blocks(self._unfilled.pop(request))

    def __len__(self) -> int:
        """Return how many requests have some."""
        return len(self._unfilled)
