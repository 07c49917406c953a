"""The ledger of blocks: which are read and which are filled, so that none is given two lives.

What an agent, or a scheduler, has let others read or write is a *claim* on blocks. This table says which claims go together:

| a block is | it may be read | it may be filled |
| --- | --- | --- |
| unclaimed | yes | yes |
| read: offered, or copied | yes | no |
| filled: a load writes to it, or may still do so after it has failed | no | no |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Set

import msgspec

from kvxfer.block_table import BlockTable
from kvxfer.identity import FIRST, LAST, Generation

__all__ = ["BlockLedger", "Blocks"]

Blocks = Mapping[int, Set[int]]
"""Blocks by block space: groups that share their blocks are one space."""


class _Claim(msgspec.Struct, frozen=True, gc=False):
    fills: bool
    blocks: Blocks
    by: object
    generation: Generation


class BlockLedger:
    """All claims on the blocks of one cache. Not thread-safe.

    The cost of each method goes by the blocks that it is given, whatever else is claimed.

    Args:
        spaces: The block space of each group. Groups that it lacks share one.

    Attributes:
        filling: Whether any block is being filled.
    """

    def __init__(self, spaces: Mapping[int, int] | None = None) -> None:
        self._spaces = dict(spaces or {})
        self.filling = False
        self._claims: dict[Hashable, tuple[_Claim, ...]] = {}
        self._filled: defaultdict[int, set[int]] = defaultdict(set)
        self._read: defaultdict[int, set[int]] = defaultdict(set)
        # By how many claims beyond the first a block is read.
        self._more: defaultdict[int, dict[int, int]] = defaultdict(dict)

    def learn(self, spaces: Mapping[int, int]) -> None:
        """Record the block spaces of some groups, for later claims."""
        self._spaces.update(spaces)

    def blocks(self, table: BlockTable, spans: Iterable[tuple[int, tuple[int, int]]]) -> Blocks:
        """Return the blocks that a table has for some groups at their positions ``[first, past)``."""
        out: dict[int, set[int]] = {}
        for g, (first, past) in spans:
            if first < past and (ids := table.blocks(g, first, past)):
                space = self._spaces.get(g, 0)
                out[space] = out[space] | ids if space in out else ids
        return out

    def all(self, table: BlockTable) -> Blocks:
        return self.blocks(table, ((g, (0, table.count(g))) for g in range(len(table))))

    def overlap(self, blocks: Blocks, *, fills: bool) -> tuple[int, object] | None:
        """Return the first of these blocks that must not be read, or filled, now, and which transfer claims it; ``None`` if all may be."""
        for space, ids in blocks.items():
            if not self._filled[space].isdisjoint(ids) or (fills and not self._read[space].isdisjoint(ids)):
                return self._first(space, ids, fills)
        return None

    def claim(
        self, holder: Hashable, blocks: Blocks, by: object, *, fills: bool, generation: Generation = FIRST
    ) -> None:
        """Add a claim for ``holder``; there must be no ``overlap``. ``by`` is whom errors name."""
        for space, ids in blocks.items():
            if fills:
                self._filled[space] |= ids
                self.filling |= bool(ids)
            else:
                self._reads(space, ids)
        self._claims[holder] = (*self._claims.get(holder, ()), _Claim(fills, blocks, by, generation))

    def drop(self, holder: Hashable, generation: Generation = LAST) -> None:
        """Drop the claims of ``holder`` up to a generation, if it has any."""
        claims = self._claims.pop(holder, None)
        if claims is None:
            return
        for claim in claims:
            if claim.generation > generation:
                self._claims[holder] = (*self._claims.get(holder, ()), claim)
                continue
            for space, ids in claim.blocks.items():
                if claim.fills:
                    self._filled[space] -= ids
                else:
                    self._read_no_more(space, ids)
        self.filling = self.filling and any(self._filled.values())

    def __contains__(self, holder: Hashable) -> bool:
        return holder in self._claims

    def __len__(self) -> int:
        """Return how many holders have claims."""
        return len(self._claims)

    def _reads(self, space: int, ids: Set[int]) -> None:
        read, more = self._read[space], self._more[space]
        for block in read & ids:
            more[block] = more.get(block, 0) + 1
        read |= ids

    def _read_no_more(self, space: int, ids: Set[int]) -> None:
        read, more = self._read[space], self._more[space]
        shared = {block for block in ids if block in more} if more else set()
        for block in shared:
            more[block] -= 1
            if not more[block]:
                del more[block]
        read -= ids - shared

    def _first(self, space: int, ids: Set[int], fills: bool) -> tuple[int, object]:
        claims = [claim for claims in self._claims.values() for claim in claims if fills or claim.fills]
        found = [(min(both), claim.by) for claim in claims if (both := ids & claim.blocks.get(space, set()))]
        return min(found, key=lambda one: one[0])
