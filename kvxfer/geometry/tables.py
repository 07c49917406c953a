"""Check block tables against the groups that an engine has and the blocks that its caches have.

A wrong table would otherwise be noticed only after the whole timeout and on the other host, as tables that do not join.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvxfer import arguments
from kvxfer.errors import ArgumentError
from kvxfer.geometry.cache import Cache
from kvxfer.values import NULL, BlockTable, Group, Ints

MAX_TABLE = 3 << 20
"""The most bytes of a block table's ids: 780,000 blocks, with which a message is still short enough for a peer."""


class TableCheck:
    """Checks an engine's block tables. Any thread.

    Args:
        groups: The KV-cache groups, in the order of the tables' rows.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        self._blocks = [1 << 31] * len(self.groups)

    def learn(self, cache: Cache) -> None:
        """Record that a rank has this cache, whose blocks may be a fraction of the tables' (``Group.block_tokens``)."""
        if len(cache.groups) != len(self.groups):
            return  # the worker turns these tables into others
        for view in cache.views:
            blocks = view.blocks * cache.groups[view.group].block_tokens // self.groups[view.group].block_tokens
            self._blocks[view.group] = min(blocks, self._blocks[view.group])

    def relearn(self, caches: Iterable[Cache]) -> None:
        """Record that these are the caches of all ranks, in place of those that were known.

        A scheduler with a pool for each group may number the blocks of one pool after the blocks of another, and its workers
        translate them back. So an id need only be below the number of blocks of all groups together.
        """
        self._blocks = [1 << 31] * len(self.groups)
        for cache in caches:
            self.learn(cache)
        self._blocks = [sum(self._blocks)] * len(self.groups)

    def check(self, name: str, table: BlockTable) -> bool:
        """Refuse a table that does not fit these groups and blocks; return whether it lists any block.

        Raises:
            ArgumentError: It does not fit; the message begins with the argument's name.
        """
        if not isinstance(table, BlockTable):
            arguments.instance(name, table, BlockTable)
        rows = table.rows
        if len(rows) != len(self.groups):
            raise ArgumentError(
                f"{name} must have one row for each of the cache's {len(self.groups)} groups, not {len(rows)}"
            )
        if table.nbytes > MAX_TABLE:
            raise ArgumentError(f"{name} must be at most {MAX_TABLE} bytes of ids, not {table.nbytes}")
        any_block = False
        for g, limit in enumerate(self._blocks):
            most = table.greatest(g)
            if most >= limit:
                raise ArgumentError(f"{name}[{g}] must be ids below {limit}, the cache's blocks, not {most}")
            any_block |= most != NULL
        return any_block

    def lists(self, name: str, table: BlockTable, g: int, first: int, tokens: int) -> None:
        """Refuse a row that lacks a block at a position from ``first`` on, up to that of the last of ``tokens`` tokens.

        Raises:
            ArgumentError: The row is too short, lacks a block, or has one twice.
        """
        past = self.groups[g].blocks(tokens)
        if table.count(g) < past:
            size = self.groups[g].block_tokens
            raise ArgumentError(
                f"{name}[{g}] must list {past} blocks of {size} tokens for {tokens} tokens, not {table.count(g)}"
            )
        if table.distinct(g, first, past):
            return
        ids: Ints = table[g][:past]
        lacking = np.flatnonzero(ids[first:] == NULL)
        if len(lacking):
            raise ArgumentError(f"{name}[{g}] must have a block at position {first + int(lacking[0])}, not {NULL}")
        there = np.sort(ids[ids != NULL])
        twice = there[np.flatnonzero(there[1:] == there[:-1])[0]]
        raise ArgumentError(f"{name}[{g}] must list each block once, and block {twice} is there twice")
