"""A scheduler with a pool for each group: it numbers the blocks of one behind those of another, and workers number them back."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvxfer import Agent, ArgumentError, BlockTable, Cache, Config, Group, TransferId
from kvxfer.engine import SchedulerSide, WorkerSide

TOKENS, FACTS = 4, {"model": "small"}
BLOCKS = (6, 3)  # full, window
CONFIG = Config(backend="kvxfer.testing.fake:FakeTransport", transfer_timeout=4.0)


def own(table: BlockTable) -> BlockTable:
    return BlockTable.of([table[0], np.where(table[1] < 0, -1, table[1] - BLOCKS[0])])


class Engine:
    def __init__(self) -> None:
        self.full, self.window = (np.zeros((n, TOKENS, 16), np.uint8) for n in BLOCKS)
        cache = Cache.of_tensors(self.full, "block token unit", layers=["full"])
        cache += Cache.of_tensors(self.window, "block token unit", layers=["window"], group=Group(TOKENS, "window", 5))
        self.scheduler = SchedulerSide(CONFIG, "e", cache.groups, 1, FACTS)
        self.worker = WorkerSide(Agent(cache, CONFIG, "e", FACTS), table=own)
        self.scheduler.report(self.worker.collect())

    def turn(self) -> frozenset[str]:
        step = self.scheduler.step()
        self.worker.begin(step)
        self.worker.load(step)
        self.worker.after_forward(step)
        update = self.scheduler.report(self.worker.collect(timeout=0.01))
        assert not update.failed
        return update.loaded

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


def test_each_group_has_its_own_blocks() -> None:
    p, d = Engine(), Engine()
    try:
        here, there = BlockTable.of([[1, 2, 5], [-1, 8, 6]]), BlockTable.of([[3, 0, 4], [-1, 6, 7]])
        p.full[:], p.window[:] = np.arange(6)[:, None, None], 10 + np.arange(3)[:, None, None]
        transfer = TransferId.mint(p.scheduler.source.epoch, "r")
        p.scheduler.offer("r", transfer, b"d", 3 * TOKENS)
        p.scheduler.runs("r", 0, 3 * TOKENS, here)
        d.scheduler.load("r", transfer, b"d", p.scheduler.source, 3 * TOKENS)
        d.scheduler.allocated("r", there, d.scheduler.loadable("r", 0) or 0)
        p.turn()
        assert p.scheduler.finished("r", here, complete=True)
        p.turn()
        end = time.monotonic() + 20
        while "r" not in d.turn():
            assert time.monotonic() < end
        assert d.full[[3, 0, 4], 0, 0].tolist() == [1, 2, 5]
        assert d.window[[0, 1], 0, 0].tolist() == [12, 10]
    finally:
        p.close()
        d.close()


def test_a_block_beyond_all_groups_is_refused_by_the_call() -> None:
    p = Engine()
    try:
        p.scheduler.offer("r", TransferId.mint(p.scheduler.source.epoch, "r"), b"d", TOKENS)
        with pytest.raises(ArgumentError, match=r"table\[1\] must be ids below 9, the cache's blocks, not 9"):
            p.scheduler.runs("r", 0, TOKENS, BlockTable.of([[1], [9]]))
    finally:
        p.close()
