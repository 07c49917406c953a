"""Adapter for vLLM's block pool, in which kvxfer pins blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["VllmBlockPool"]


class VllmBlockPool:
    """A ``kvxfer.engine.BlockPool`` over vLLM's ``BlockPool``."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def touch(self, blocks: Sequence[int]) -> None:
        """See ``kvxfer.engine.BlockPool``."""
        self._pool.touch([self._pool.blocks[b] for b in blocks])

    def free(self, blocks: Sequence[int]) -> None:
        """See ``kvxfer.engine.BlockPool``."""
        self._pool.free_blocks([self._pool.blocks[b] for b in blocks])

    def lend(self, blocks: int) -> list[int] | None:
        """See ``kvxfer.engine.LendingPool``. Lends at most a quarter of the free blocks, because vLLM allocates as many again."""
        if blocks > self._pool.get_num_free_blocks() // 4:
            return None
        try:
            return [block.block_id for block in self._pool.get_new_blocks(blocks)]
        except ValueError:  # free a moment ago: kvcached shares memory with other engines
            return None

    def capacity(self) -> int:
        """See ``kvxfer.engine.ElasticPool``. Of kvcached's blocks only those in use have memory; free ones can be given some."""
        if not hasattr(self._pool, "kv_cache_manager"):  # vLLM's own pool, all of whose blocks have memory
            return int(self._pool.num_gpu_blocks) - 1
        return self.used() + int(self._pool.get_num_free_blocks())

    def used(self) -> int:
        """See ``kvxfer.engine.BlockPool``. Excludes vLLM's null block; counts references: kvcached's list of free blocks is incomplete."""
        return sum(block.ref_cnt > 0 for block in self._pool.blocks if not block.is_null)
