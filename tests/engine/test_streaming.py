"""A prompt is streamed by chunk also where one block holds all of it, as far as the cache can be cut by token."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvxfer import Agent, BlockTable, Cache, Config, Group, TransferId
from kvxfer.engine import SchedulerSide, Update, WorkerSide

FACTS = {"model": "small"}
CONFIG = Config(backend="kvxfer.testing.fake:FakeTransport", transfer_timeout=60.0)
BLOCK, CHUNK, PROMPT = 64, 10, 50
MINE, THEIRS = 3, 5


class Engine:
    def __init__(self, dims: str) -> None:
        self.memory = np.zeros((2, 8, BLOCK, 16), np.uint8)
        cache = Cache.of_tensors(self.memory, dims, encoding="e", group=Group(BLOCK))
        self.scheduler = SchedulerSide(CONFIG, "e", cache.groups, 1, FACTS)
        self.worker = WorkerSide(Agent(cache, CONFIG, "e", FACTS))

    def turn(self) -> Update:
        step = self.scheduler.step()
        self.worker.begin(step)
        self.worker.load(step)
        self.worker.after_forward(step)
        return self.scheduler.report(self.worker.collect(0.002))

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


@pytest.mark.parametrize("dims", ["layer block token unit", "layer block unit unit"])
def test_a_block_for_each_request_comes_by_chunk(dims: str) -> None:
    by_token = "token" in dims
    p, d = Engine(dims), Engine(dims)
    try:
        p.turn(), d.turn()
        content = np.random.default_rng(0).integers(1, 255, p.memory[:, MINE].shape, np.uint8)
        assert p.scheduler.offer("p", TransferId.mint(p.scheduler.source.epoch, "p"), b"d", PROMPT)
        ticket = p.scheduler.ticket("p")
        assert ticket is not None
        assert d.scheduler.load("d", ticket.transfer, ticket.digest, ticket.source, PROMPT, progress=1)
        seen, loaded, until = 0, False, time.monotonic() + 30

        def listen() -> None:
            nonlocal seen, loaded
            if d.scheduler.loadable("d", 0) == PROMPT:
                d.scheduler.allocated("d", BlockTable.of([[THEIRS]]), PROMPT)
            update = d.turn()
            assert not update.failed, update.failed
            seen, loaded = update.arrived.get("d", seen), loaded or "d" in update.loaded

        for start in range(0, PROMPT, CHUNK):
            p.memory[:, MINE, start : start + CHUNK] = content[:, start : start + CHUNK]
            p.scheduler.runs("p", start, CHUNK, BlockTable.of([[MINE]]))
            p.turn()
            while by_token and seen < start + CHUNK and not loaded and time.monotonic() < until:
                listen()  # the next chunk is computed once this one is here
            assert seen >= start + CHUNK or loaded or not by_token
        while not loaded and time.monotonic() < until:
            listen()
            p.turn()
        assert loaded
        moved = d.memory[:, THEIRS]
        assert np.array_equal(moved[:, :PROMPT], content[:, :PROMPT])
        assert not by_token or not moved[:, PROMPT:].any(), "tokens beyond the prompt were touched"
    finally:
        p.close()
        d.close()
