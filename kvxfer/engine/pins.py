"""References that kvxfer itself holds to blocks of an engine's pool.

An engine frees blocks when it likes: as a window moves on, on abort, as soon as a load is reported over. While kvxfer holds a
reference too, the pool does not hand the block out again, so nothing else is computed into memory that a transfer may still
read or write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvxfer import arguments


@runtime_checkable
class BlockPool(Protocol):
    """An engine's pool of blocks, which counts the references to each block."""

    def touch(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these blocks, which are in use."""

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each. Blocks without references may be handed out again, in this order."""

    def used(self) -> int:
        """Return how many blocks have a reference."""


@runtime_checkable
class LendingPool(BlockPool, Protocol):
    """A pool that lends unused blocks for prefetches (``SchedulerSide.prefetch``); an engine that wants none has no such pool."""

    def lend(self, blocks: int) -> list[int] | None:
        """Return this many unused blocks, each with one reference, to be dropped by ``free``; None if the engine may need them."""


@runtime_checkable
class ElasticPool(BlockPool, Protocol):
    """A pool whose blocks have memory only while in use, so that not all of them can be in use at once."""

    def capacity(self) -> int:
        """Return how many blocks could be in use now, including those that are."""


@dataclass(slots=True)
class _Pinned:
    """What a holder has pinned, and how many of these blocks no request stands for."""

    blocks: list[int] = field(default_factory=list)
    held: int = 0


class BlockPins:
    """References to blocks, by holder.

    Args:
        limit: The most blocks that ``hold`` may hold at a time: a quarter of the pool, say. In an elastic pool it never
            holds more than a quarter of the blocks that can be in use.
        pool: The engine's pool. It may be bound later; until then nothing is held.
    """

    def __init__(self, limit: int, pool: BlockPool | None = None) -> None:
        self.limit = arguments.integer("limit", limit, 0)
        self._pool: BlockPool | None = None
        self._lending: LendingPool | None = None
        if pool is not None:
            self.bind(pool)
        self._pinned: defaultdict[Hashable, _Pinned] = defaultdict(_Pinned)
        self._held = self._references = 0

    def bind(self, pool: BlockPool) -> None:
        """Use this pool from now on.

        Raises:
            ArgumentError: ``pool`` is not a ``BlockPool``.
        """
        self._pool = arguments.instance("pool", pool, BlockPool)  # type: ignore[type-abstract]
        self._lending = pool if isinstance(pool, LendingPool) else None  # once: it takes 30 us, and each load asks

    def keep(self, holder: Hashable, blocks: Iterable[int]) -> bool:
        """Pin these blocks for ``holder``, in addition to those that it holds. They must be in use at the time.

        Returns:
            False if there is no pool yet, and so nothing is held.
        """
        if self._pool is None:
            return False
        found = list(blocks)
        self._pool.touch(found)
        self._pinned[holder].blocks += found
        self._references += len(found)
        return True

    def hold(self, holder: Hashable, blocks: Iterable[int]) -> bool:
        """Pin blocks that no request stands for, within the limit; return False if that is reached or there is no pool."""
        wanted = list(blocks)
        limit = self.limit if not isinstance(self._pool, ElasticPool) else min(self.limit, self._pool.capacity() // 4)
        if self._held + len(wanted) > limit or not self.keep(holder, wanted):
            return False
        self._pinned[holder].held += len(wanted)
        self._held += len(wanted)
        return True

    @property
    def holding(self) -> bool:
        """Whether blocks are held for which no request of the engine stands."""
        return bool(self._held)

    def drop(self, holder: Hashable) -> None:
        """Give up all references of ``holder``, if it has any."""
        pinned = self._pinned.pop(holder, None)
        if pinned is not None:
            self._held -= pinned.held
            self._references -= len(pinned.blocks)
            if pinned.blocks and self._pool is not None:
                self._pool.free(pinned.blocks[::-1])

    def borrow(self, holder: Hashable, blocks: int) -> list[int] | None:
        """Take this many unused blocks from a ``LendingPool``, within the limit; None if there are none to spare."""
        if self._lending is None or len(self) + blocks > self.limit:
            return None
        found = self._lending.lend(blocks)
        if found is not None:
            self._pinned[holder].blocks += found
            self._references += len(found)
        return None if found is None else list(found)

    @property
    def pool_unused(self) -> bool:
        """Whether no block of the pool is in use, by a request or by kvxfer."""
        return self._pool is None or not self._pool.used()

    def __len__(self) -> int:
        """Return how many references are held."""
        return self._references
