"""Our own references to blocks of vLLM's pool.

vLLM frees blocks when it likes: as a window moves on, on abort, as soon as a load is reported over. A block that has a
reference of ours is not handed out again before we drop that, so nothing else is computed into memory that a transfer
may still read or write.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable
from typing import Any

__all__ = ["Holds"]

log = logging.getLogger("kvxfer.vllm")


class Holds:
    """Blocks by who holds them. Engine-core thread only. Without a pool (``bind``) nothing is held.

    ``limit``: how many blocks ``quarantine`` may hold at a time.
    """

    def __init__(self, limit: int) -> None:
        self._pool: Any = None
        self._limit = limit
        self._kept: dict[Hashable, list[Any]] = {}
        self._quarantined: dict[Hashable, int] = {}

    def bind(self, pool: Any) -> None:
        """``pool``: vLLM's ``BlockPool``."""
        self._pool = pool

    def keep(self, holder: Hashable, blocks: Iterable[int]) -> bool:
        """Reference these blocks, besides what ``holder`` has already. They must be in use at the time. False: they are
        not held, since there is no pool."""
        if self._pool is None:
            return False
        found = [self._pool.blocks[b] for b in blocks]
        self._pool.touch(found)
        self._kept.setdefault(holder, []).extend(found)
        return True

    def quarantine(self, holder: Hashable, blocks: Iterable[int]) -> bool:
        """The same for blocks of which no more use is made, within the limit. False: they are not held."""
        wanted = list(blocks)
        if sum(self._quarantined.values()) + len(wanted) > self._limit or not self.keep(holder, wanted):
            log.warning("%s: %d blocks are given back while a transfer may still touch them", holder, len(wanted))
            return False
        self._quarantined[holder] = self._quarantined.get(holder, 0) + len(wanted)
        return True

    def drop(self, holder: Hashable) -> None:
        """Give up all references of ``holder``, if it has any."""
        kept = self._kept.pop(holder, None)
        self._quarantined.pop(holder, None)
        if kept:
            self._pool.free_blocks(reversed(kept))

    @property
    def all_free(self) -> bool:
        """Whether nobody uses a block of the pool, neither we nor a request. (vLLM's null block is never free.)"""
        return self._pool is None or self._pool.get_num_free_blocks() == self._pool.num_gpu_blocks - 1

    def __len__(self) -> int:
        """References held."""
        return sum(map(len, self._kept.values()))
