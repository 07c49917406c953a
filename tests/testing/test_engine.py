"""The simulated engine finds each byte that is wrong, whoever wrote it, and knows whose blocks are whose."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvxfer.failures import FailureKind
from kvxfer.protocol.values import Ended
from kvxfer.testing.engine import AgentEngine, PagedEngine, PagedMemory, until
from kvxfer.values import BlockTable, Fetch


@pytest.mark.parametrize("dims", ["layer block head token unit", "block token layer head unit"])
@pytest.mark.parametrize("ranks", [(1, 2), (4, 2), (1, 1)], ids=str)
def test_prompts_are_moved_between_engines_of_any_layout(ranks: tuple[int, int], dims: str) -> None:
    theirs = PagedMemory(ranks=ranks[1], tokens=3, dims=dims, seed=1)
    with PagedEngine(memory=PagedMemory(ranks=ranks[0])) as p, PagedEngine(memory=theirs) as d:
        for name, tokens in (("a", 13), ("b", 4), ("c", 1)):
            d.load(name, p.offer(name, tokens, chunk=5), tokens)
        until(lambda: (p.step(), d.step()) and d.loaded >= {"a", "b", "c"}, 30.0)
        d.verify()
        p.verify()
        assert (d.memory.read(d.tables["a"][:1])[:, 0].swapaxes(0, 1) == p.memory.content(b"a", 3)).all()


def test_the_kv_can_be_what_another_engine_computes() -> None:
    def content(digest: bytes, tokens: int) -> np.ndarray:
        return np.broadcast_to(np.arange(tokens, dtype=np.uint8)[:, None, None, None], (tokens, 3, 4, 16))

    with PagedEngine(memory=PagedMemory(content=content)) as p, PagedEngine(memory=PagedMemory(content=content)) as d:
        d.load("r", p.offer("r", 9), 9)
        d.until("r")
        d.verify()
        assert d.memory.read(d.tables["r"])[0, :, :, 0, 0].ravel()[:9].tolist() == list(range(9))


def wrong(memory: PagedMemory, row: list[int]) -> None:
    memory.arrays[0][1, row[0], 2, 1, 5] ^= 1


def behind(memory: PagedMemory, row: list[int]) -> None:
    """A token of the last block that the prompt does not have."""
    memory.arrays[0][0, row[-1], 0, 3, 0] ^= 1


def beside(memory: PagedMemory, row: list[int]) -> None:
    other = next(block for block in range(memory.blocks) if block not in row)
    memory.arrays[0][2, other, 0, 0, 0] ^= 1


@pytest.mark.parametrize("spoil", [wrong, behind, beside])
def test_one_bit_is_found(spoil: Callable[[PagedMemory, list[int]], None]) -> None:
    with PagedEngine() as p, PagedEngine(memory=PagedMemory(seed=3)) as d:
        d.load("r", p.offer("r", 10), 10)
        d.until("r")
        d.verify()
        spoil(d.memory, d.tables["r"])
        with pytest.raises(AssertionError, match="1 bytes are wrong, the first of them in layer"):
            d.verify()


def test_a_failed_load_leaves_blocks_that_must_not_change_any_more() -> None:
    with PagedEngine() as p, PagedEngine(facts={"model": "another"}) as d:
        d.load("r", p.offer("r", 8), 8)
        assert d.until("r").failed["r"].kind is FailureKind.INCOMPATIBLE
        d.verify()
        d.memory.arrays[0][:, d.tables["r"]] = 1
        with pytest.raises(AssertionError):
            d.verify()


def test_blocks_go_back_to_the_pool_once_nobody_may_touch_them() -> None:
    with PagedEngine() as p, PagedEngine() as d:
        for i in range(12):
            name = f"r{i}"
            d.load(name, p.offer(name, 20), 20)
            assert name in d.until(name).loaded
            d.verify()
            d.finish(name)
            assert name in p.until(name).free
        assert not p.tables and not d.tables


def test_an_engine_on_bare_agents_loads_from_one_with_a_scheduler() -> None:
    p, d = PagedEngine(), AgentEngine(facts={"model": "simulated"})
    try:
        ticket = p.offer("r", 8)
        d.agents[0].fetch(Fetch("r", ticket.transfer, ticket.digest, ticket.source, BlockTable.of([[5, 2]]), 0, 8))
        until(lambda: p.step() and any(isinstance(event, Ended) for event in d.events()))
        assert d.over("r").outcome.delivered
        d.memory.expect(ticket.digest, [5, 2], 0, 8)
        d.memory.verify()
    finally:
        p.close(), d.close()
