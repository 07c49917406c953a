"""A prompt is streamed by chunk also where one block holds all of it, as far as the cache can be cut by token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvxfer import Agent, BlockTable, Cache, Config, Group, TransferId
from kvxfer.engine import SchedulerSide, Update, WorkerSide

FACTS = {"model": "small"}
BLOCK, CHUNK, PROMPT, HEADS, UNIT = 64, 10, 50, 4, 4
MINE = 3
SIZES = {"layer": 2, "block": 16, "head": HEADS, "unit": UNIT}

WAYS = {"read": ["read"], "written": ["write"], "sent": ["send", "recv"]}
DIRECT, STAGED = 1, 1 << 20
"""Bytes of a row below which what is moved is packed, for a back end to which all rows are long, and one to which none is."""


class Engine:
    """One worker, whose cache has these axes and blocks of so many tokens, which may be kept together."""

    def __init__(self, options: dict[str, Any], dims: str, block: int, whole: bool = False) -> None:
        config = Config(
            backend="kvxfer.testing.fake:FakeTransport",
            backend_options=options,
            transfer_timeout=60.0,
            peer_timeout=60.0,
        )
        sizes = {**SIZES, "token": block}
        self.memory = np.zeros([sizes[axis] for axis in dims.split()], np.uint8)
        self.logical = [dims.split().index(axis) for axis in ("layer", "block", "token", "head", "unit")]
        described = dims.replace("token", "unit").replace("head", "unit") if whole else dims
        cache = Cache.of_tensors(self.memory, described, encoding="e", group=Group(block))
        self.scheduler = SchedulerSide(config, "e", cache.groups, 1, FACTS)
        self.worker = WorkerSide(Agent(cache, config, "e", FACTS))

    @property
    def content(self) -> np.ndarray:
        """Its memory as [layer, block, token, head, unit]."""
        return self.memory.transpose(self.logical)

    def turn(self) -> Update:
        step = self.scheduler.step()
        self.worker.begin(step)
        self.worker.load(step)
        self.worker.after_forward(step)
        return self.scheduler.report(self.worker.collect(0.002))

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


@contextmanager
def engines(options: dict[str, Any], *both: tuple[Any, ...]) -> Iterator[tuple[Engine, Engine]]:
    p, d = (Engine(options, *each) for each in both)
    try:
        p.turn(), d.turn()
        yield p, d
    finally:
        p.close()
        d.close()


def stream(p: Engine, d: Engine, theirs: list[int], by_token: bool) -> np.ndarray:
    """Have a prompt computed by chunk, the next one once this one is there if ``by_token``; return what was computed."""
    content = np.random.default_rng(0).integers(1, 255, p.content[:, MINE].shape, np.uint8)
    assert p.scheduler.offer("p", TransferId.mint(p.scheduler.source.epoch, "p"), b"d", PROMPT)
    ticket = p.scheduler.ticket("p")
    assert ticket is not None
    assert d.scheduler.load("d", ticket.transfer, ticket.digest, ticket.source, PROMPT, progress=1)
    seen, loaded, until = 0, False, time.monotonic() + 30

    def listen() -> None:
        nonlocal seen, loaded
        if d.scheduler.loadable("d", 0) == PROMPT:
            d.scheduler.allocated("d", BlockTable.of([theirs]), PROMPT)
        update = d.turn()
        assert not update.failed, update.failed
        seen, loaded = update.arrived.get("d", seen), loaded or "d" in update.loaded

    for start in range(0, PROMPT, CHUNK):
        chunk = slice(start, start + CHUNK)
        p.content[:, MINE, chunk] = content[:, chunk]
        p.scheduler.runs("p", start, CHUNK, BlockTable.of([[MINE]]))
        p.turn()
        while by_token and seen < start + CHUNK and not loaded and time.monotonic() < until:
            listen()
            p.turn()
        assert seen >= start + CHUNK or loaded or not by_token
    while not loaded and time.monotonic() < until:
        listen()
        p.turn()
    assert loaded
    return content


@pytest.mark.parametrize("verbs", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("row", [DIRECT, STAGED], ids=["direct", "staged"])
@pytest.mark.parametrize("block", [BLOCK, 16, 7], ids=["into_one_block", "into_blocks_of_16", "into_blocks_of_7"])
@pytest.mark.parametrize("theirs", ["layer block head token unit", "layer block token head unit"])
def test_a_block_for_each_request_comes_by_chunk(verbs: list[str], row: int, block: int, theirs: str) -> None:
    """Whoever moves the bytes, packed or not, from rows by head into rows by head or by token."""
    with engines({"verbs": verbs, "run_bytes": row}, ("layer block head token unit", BLOCK), (theirs, block)) as (p, d):
        blocks = list(range(5, 5 + -(-PROMPT // block)))
        content = stream(p, d, blocks, by_token=True)
        moved = d.content[:, blocks].reshape(2, -1, HEADS, UNIT)
        assert np.array_equal(moved[:, :PROMPT], content[:, :PROMPT])
        assert not moved[:, PROMPT:].any(), "tokens beyond the prompt were touched"
        packed = sum(engine.worker.agent.stats().staged for engine in (p, d))
        assert (packed > 0) == (row == STAGED)


@pytest.mark.parametrize("verbs", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("row", [DIRECT, STAGED], ids=["direct", "staged"])
def test_a_block_whose_tokens_lie_in_its_unit_comes_once_it_is_full(verbs: list[str], row: int) -> None:
    of = "layer block token head unit", BLOCK, True
    with engines({"verbs": verbs, "run_bytes": row}, of, of) as (p, d):
        content = stream(p, d, [5], by_token=False)
        assert np.array_equal(d.content[:, 5, :PROMPT], content[:, :PROMPT])
