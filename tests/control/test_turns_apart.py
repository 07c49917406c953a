"""Engines of several processes whose ranks take turns with tokens (context parallelism): every byte of a load, over sockets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.geometry import Cache, Rank, TokenTurns
from kvxfer.identity import TransferId
from kvxfer.protocol.messages import RankDescriptor
from kvxfer.protocol.values import Ended
from kvxfer.testing.engine import AgentEngine
from kvxfer.testing.remote import Remote
from kvxfer.values import BlockTable, Fetch, Offer
from tests.geometry.layouts import dealt

LAYERS, UNIT, BLOCKS, TOKENS, WAIT_S = 2, 24, 16, 91, 30.0
TRANSFER = TransferId("own/1/prompt", 0)


def content(layer: int, token: int) -> np.ndarray:
    """What every engine computes for a token."""
    return np.random.default_rng([layer, token]).integers(1, 255, UNIT, dtype=np.uint8)


class TurnsRank:
    """One rank: it offers, or fetches, what its engine's other ranks do, and tells what its memory then holds."""

    def __init__(self, settings: dict[str, Any], at: int, ranks: int, span: int, block: int) -> None:
        self.memory, self.whole = np.zeros((LAYERS, BLOCKS, block, UNIT), np.uint8), block * ranks
        self.own = dealt(at % ranks, ranks, span)
        turns = TokenTurns(at % ranks, ranks, span) if ranks > 1 else None
        layers = {"latent": list(self.memory)}
        cache = Cache.of_tensors(layers, "block token unit", encoding="bytes", turns=turns, rank=Rank(0, at))
        self.agent = Agent(cache, Config.from_mapping(settings), "engine")
        self.close = self.agent.close

    def descriptor(self) -> RankDescriptor:
        return self.agent.descriptor

    def held(self, blocks: list[int], tokens: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield layer, token and bytes of what this rank holds."""
        block = self.memory.shape[2]
        for layer, token in itertools.product(range(LAYERS), range(tokens)):
            if token in self.own:
                yield layer, token, self.memory[layer, blocks[self.own[token] // block], self.own[token] % block]

    def offer(self, blocks: list[int], what: Offer) -> None:
        for layer, token, held in self.held(blocks, TOKENS):
            held[:] = content(layer, token)
        self.agent.offer(what)

    def fetch(self, blocks: list[int], what: Fetch) -> tuple[str, int, int]:
        self.agent.fetch(what)
        ends: list[Ended] = []
        while not ends:
            ends = [event for event in self.agent.events(WAIT_S) if isinstance(event, Ended)]
        wrong = 0
        for layer, token, held in self.held(blocks, self.whole * len(blocks)):
            wanted = content(layer, token) if what.start <= token < TOKENS else np.zeros(UNIT, np.uint8)
            wrong += not np.array_equal(held, wanted)
        others = [b for b in range(BLOCKS) if b not in blocks]
        return str(ends[0].outcome), wrong, int(self.memory[:, others].sum())


class SpawnedEngine:
    """All ranks of an engine, each in a process, and its directory in this one."""

    def __init__(self, settings: dict[str, Any], ranks: int, span: int, block: int, replicas: int = 1) -> None:
        self.ranks = [Remote("rank", TurnsRank, settings, at, ranks, span, block) for at in range(ranks * replicas)]
        found = [rank("descriptor") for rank in self.ranks]
        self.directory = Directory(Config.from_mapping(settings), "engine", epoch=found[0].epoch)
        self.directory.publish(tuple(found))
        self.source, order = self.directory.source, np.random.default_rng(ranks).permutation(BLOCKS - 1)
        self.blocks = (1 + order)[: -(-TOKENS // (block * ranks))].tolist()

    def all(self, method: str, what: Any) -> list[Any]:
        """Have all ranks do something at once."""
        for rank in self.ranks:
            rank.send(method, self.blocks, what)
        return [rank.get() for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.directory.close()


@pytest.mark.keep(2)  # each of several processes; the law of tests/geometry has them all
@pytest.mark.parametrize(
    ("p", "d", "start"),
    [((1, 1, 16), (2, 1, 8), 0), ((2, 1, 8), (1, 1, 16), 16), ((2, 2, 16), (3, 1, 8), 24), ((3, 8, 8), (2, 1, 12), 0)],
)
def test_every_byte_arrives(p: tuple[int, int, int], d: tuple[int, int, int], start: int) -> None:
    """Between engines of other numbers of ranks that take turns, of other turns and blocks; checked on both sides."""
    settings = {"backend": "tcp", "integrity": "full", "transfer_timeout": WAIT_S, "lease": WAIT_S}
    with (
        closing(SpawnedEngine(settings, *p)) as one,
        closing(SpawnedEngine(settings, *d, replicas=1 + (d[0] == 1))) as two,
    ):
        one.all("offer", Offer(TRANSFER, b"digest", 1, TOKENS, BlockTable.of([one.blocks]), True))
        table = BlockTable.of([two.blocks])
        what = Fetch("load", TRANSFER, b"digest", one.source, table, start, TOKENS, own=two.source)
        for told in two.all("fetch", what):
            assert told == ("delivered", 0, 0), f"bytes differ, or others were written: {told}"


def test_one_of_several_ranks_does_not_load_alone() -> None:
    """The producer would free its blocks after the first of them."""
    config = Config.from_mapping({"backend": "kvxfer.testing.fake:FakeTransport", "transfer_timeout": 5.0})

    def cache(turns: TokenTurns | None, block: int) -> Cache:
        layers = list(np.zeros((LAYERS, BLOCKS, block, UNIT), np.uint8))
        return Cache.of_tensors({"latent": layers}, "block token unit", encoding="bytes", turns=turns)

    with (
        AgentEngine(config, caches=[cache(None, 16)]) as p,
        AgentEngine(config, caches=[cache(TokenTurns(0, 2, 1), 8)]) as d,
    ):
        table = BlockTable.of([list(range(6))])
        p.agents[0].offer(Offer(TRANSFER, b"digest", 1, TOKENS, table, True))
        d.agents[0].fetch(Fetch("load", TRANSFER, b"digest", p.source, table, 0, TOKENS))
        (end,) = d.wait(Ended, timeout=WAIT_S)
        failure = end.outcome.failure
        assert failure is not None and "only some of the tokens" in failure.detail, failure
