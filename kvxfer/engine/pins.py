"""References of our own to the blocks of an engine's pool.

An engine frees blocks when it likes: as a window moves on, on abort, as soon as a load is reported over. A block that has
a reference of ours is not handed out again before we drop that, so nothing else is computed into memory that a transfer
may still read or write.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from kvxfer import arguments

__all__ = ["BlockPins", "BlockPool", "ElasticPool", "LendingPool"]

log = logging.getLogger("kvxfer.engine")


@runtime_checkable
class BlockPool(Protocol):
    """An engine's pool of blocks that counts the references to each."""

    def touch(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these blocks, which are in use."""

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each; those that have none left may be handed out again, the first ones first."""

    def used(self) -> int:
        """Return how many blocks have a reference."""


@runtime_checkable
class LendingPool(BlockPool, Protocol):
    """A pool that lends blocks to loads within a step, where an engine wants these.

    A payload of the producer's does not come along with such a load; who needs it has a pool that does not lend.
    """

    def lend(self, blocks: int) -> list[int] | None:
        """Return unused blocks, each with one reference, which ``free`` takes back; None if the engine may need them."""


@runtime_checkable
class ElasticPool(BlockPool, Protocol):
    """A pool whose blocks have memory only while they are in use, so that fewer can be than there are."""

    def capacity(self) -> int:
        """Return how many blocks could be in use now, those included that are."""


class BlockPins:
    """References to blocks, by holder.

    Args:
        limit: How many blocks ``quarantine`` may hold at a time; a quarter of the pool, say. Of an elastic pool it may not hold
            more than a quarter of what can be in use.
        pool: The engine's pool; may be bound later, until which nothing is held.
    """

    def __init__(self, limit: int, pool: BlockPool | None = None) -> None:
        self._limit = arguments.integer("limit", limit, 0)
        self._pool: BlockPool | None = None
        if pool is not None:
            self.bind(pool)
        self._kept: dict[Hashable, list[int]] = {}
        self._quarantined: dict[Hashable, int] = {}

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's pool, once it is there.

        Raises:
            ArgumentError: It is no pool of blocks.
        """
        self._pool = arguments.instance("pool", pool, BlockPool)  # type: ignore[type-abstract]

    def keep(self, holder: Hashable, blocks: Iterable[int]) -> bool:
        """Pin these blocks for ``holder``, besides those that it has. They must be in use at the time.

        Return false if they are not held, for want of a pool.
        """
        if self._pool is None:
            return False
        found = list(blocks)
        self._pool.touch(found)
        self._kept.setdefault(holder, []).extend(found)
        return True

    def quarantine(self, holder: Hashable, blocks: Iterable[int]) -> bool:
        """Do the same for blocks of which no more use is made, within the limit; False if they are not held."""
        wanted = list(blocks)
        limit = self._limit if not isinstance(self._pool, ElasticPool) else min(self._limit, self._pool.capacity() // 4)
        if sum(self._quarantined.values()) + len(wanted) > limit or not self.keep(holder, wanted):
            log.warning("%s: %d blocks are given back while a transfer may still touch them", holder, len(wanted))
            return False
        self._quarantined[holder] = self._quarantined.get(holder, 0) + len(wanted)
        return True

    def drop(self, holder: Hashable) -> None:
        """Give up all references of ``holder``, if it has any."""
        kept = self._kept.pop(holder, None)
        self._quarantined.pop(holder, None)
        if kept and self._pool is not None:
            self._pool.free(kept[::-1])

    def borrow(self, holder: Hashable, blocks: int) -> list[int] | None:
        """Take so many unused blocks from a pool that lends some, within the limit; None if there are none to spare."""
        held = sum(map(len, self._kept.values()))
        if not isinstance(self._pool, LendingPool) or held + blocks > self._limit:
            return None
        found = self._pool.lend(blocks)
        if found is not None:
            self._kept.setdefault(holder, []).extend(found)
        return None if found is None else list(found)

    @property
    def pool_unused(self) -> bool:
        """Whether nobody uses a block of the pool, neither we nor a request."""
        return self._pool is None or not self._pool.used()

    def __len__(self) -> int:
        """Return how many references are held."""
        return sum(map(len, self._kept.values()))
