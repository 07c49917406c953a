"""What vLLM's prefix cache holds of a prompt, and loads that begin behind it before the request has blocks.

vLLM looks up what it has of a prompt, then asks the connector, then takes the blocks it has found. Until then it would lend these to
the load itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvxfer.engine import BlockPins, SchedulerSide

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["LocalHits"]


class LocalHits:
    """The part of a prompt that is cached here. One thread."""

    def __init__(self, side: SchedulerSide, pins: BlockPins) -> None:
        self._side, self._pins = side, pins
        self._manager: Any = None

    def bind(self, manager: Any) -> None:
        """Use vLLM's manager of the KV cache, until which nothing is known."""
        self._manager = manager

    @property
    def known(self) -> bool:
        """Whether ``tokens`` can be asked."""
        return self._manager is not None

    def tokens(self, request: Request) -> int:
        """Return how many tokens of a request's prompt are cached."""
        return int(self._manager.get_computed_blocks(request)[1])

    def loadable(self, request: Request, computed: int) -> int | None:
        """Answer ``SchedulerSide.loadable``.

        What another engine has been found to hold behind the cached tokens is fetched at once, if that may be.
        """
        name = request.request_id
        asking = computed > 0 and self._side.asking(name)
        tokens = self._side.loadable(name, computed)
        if not tokens or not (asking and self.known):
            return tokens
        with self._kept(request):
            self._side.prefetch(name, computed)
        return self._side.loadable(name, computed)

    @contextmanager
    def _kept(self, request: Request) -> Iterator[None]:
        """Keep the blocks that vLLM has found and not taken yet from being lent."""
        rows = self._manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[0]
        self._pins.keep(self, (block.block_id for row in rows for block in row if not block.is_null))
        try:
            yield
        finally:
            self._pins.drop(self)
