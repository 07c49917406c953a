"""A scheduler with a pool for each group: it numbers the blocks of one behind those of another, and workers number them back."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer import ArgumentError, BlockTable, Cache, Group, Ticket, TransferId
from kvxfer.testing.engine import PagedEngine, PagedMemory

TOKENS = 4
BLOCKS = (6, 3)  # full, window


def own(table: BlockTable) -> BlockTable:
    return BlockTable.of([table[0], np.where(table[1] < 0, -1, table[1] - BLOCKS[0])])


class Pools(PagedMemory):
    """A pool for each of two groups."""

    def __init__(self) -> None:
        super().__init__(tokens=TOKENS)
        self.full, self.window = (np.zeros((n, TOKENS, 16), np.uint8) for n in BLOCKS)
        full = Cache.of_tensors(self.full, "block token unit", layers=["full"])
        group = Group(TOKENS, "window", 5)
        self.caches = [full + Cache.of_tensors(self.window, "block token unit", layers=["window"], group=group)]


def test_each_group_has_its_own_blocks() -> None:
    mine, theirs = Pools(), Pools()
    with PagedEngine(memory=mine, table=own) as p, PagedEngine(memory=theirs, table=own) as d:
        p.step(), d.step()
        here, there = BlockTable.of([[1, 2, 5], [-1, 8, 6]]), BlockTable.of([[3, 0, 4], [-1, 6, 7]])
        mine.full[:], mine.window[:] = np.arange(6)[:, None, None], 10 + np.arange(3)[:, None, None]
        ticket: Ticket = p.ask("r", 3 * TOKENS)
        p.scheduler.runs("r", 0, 3 * TOKENS, here)
        d.scheduler.load("r", ticket.transfer, ticket.digest, ticket.source, 3 * TOKENS)
        d.scheduler.allocated("r", there, d.scheduler.loadable("r", 0) or 0)
        p.step()
        assert p.scheduler.finished("r", here, complete=True)
        p.step()
        assert d.until("r").loaded == {"r"}
        assert theirs.full[[3, 0, 4], 0, 0].tolist() == [1, 2, 5]
        assert theirs.window[[0, 1], 0, 0].tolist() == [12, 10]


def test_a_block_beyond_all_groups_is_refused_by_the_call() -> None:
    with PagedEngine(memory=Pools(), table=own) as p:
        p.step()
        p.scheduler.offer("r", TransferId.mint(p.scheduler.source.epoch, "r"), b"d", TOKENS)
        with pytest.raises(ArgumentError, match=r"table\[1\] must be ids below 9, the cache's blocks, not 9"):
            p.scheduler.runs("r", 0, TOKENS, BlockTable.of([[1], [9]]))
