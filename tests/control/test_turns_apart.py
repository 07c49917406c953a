"""Engines of several processes whose ranks take turns with tokens (context parallelism): every byte of a load, over sockets."""

from __future__ import annotations

import itertools
import multiprocessing as mp
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.geometry import Cache, Rank, TokenTurns
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.values import Ended
from kvxfer.values import BlockTable, Fetch, Offer
from tests.geometry.layouts import dealt

LAYERS, UNIT, BLOCKS, TOKENS, WAIT_S = 2, 24, 16, 91, 30.0
TRANSFER = TransferId("own/1/prompt", 0)

spawn = mp.get_context("spawn")


def content(layer: int, token: int) -> np.ndarray:
    """What every engine computes for a token."""
    return np.random.default_rng([layer, token]).integers(1, 255, UNIT, dtype=np.uint8)


def rank(pipe: Connection, settings: dict[str, Any], at: int, ranks: int, span: int, block: int, filled: bool) -> None:
    """One rank: it offers, or fetches, what its engine's other ranks do, and tells what its memory then holds."""
    memory = np.zeros((LAYERS, BLOCKS, block, UNIT), np.uint8)
    own = dealt(at % ranks, ranks, span)
    turns = TokenTurns(at % ranks, ranks, span) if ranks > 1 else None
    cache = Cache.of_tensors(
        {"latent": list(memory)}, "block token unit", encoding="bytes", turns=turns, rank=Rank(0, at)
    )
    with Agent(cache, Config.from_mapping(settings), "engine") as agent:
        pipe.send((agent.descriptor, agent.epoch))
        blocks, what = pipe.recv()
        if filled:
            for layer, token in itertools.product(range(LAYERS), range(TOKENS)):
                if token in own:
                    memory[layer, blocks[own[token] // block], own[token] % block] = content(layer, token)
            agent.offer(what)
            pipe.send(None)
        else:
            agent.fetch(what)
            ends: list[Ended] = []
            while not ends:
                ends = [event for event in agent.events(WAIT_S) if isinstance(event, Ended)]
            wrong = 0
            for layer, token in itertools.product(range(LAYERS), range(block * ranks * len(blocks))):
                if token in own:
                    there = memory[layer, blocks[own[token] // block], own[token] % block]
                    wanted = content(layer, token) if what.start <= token < TOKENS else np.zeros(UNIT, np.uint8)
                    wrong += not np.array_equal(there, wanted)
            others = [b for b in range(BLOCKS) if b not in blocks]
            pipe.send((str(ends[0].outcome), wrong, int(memory[:, others].sum())))
        pipe.recv()


class SpawnedEngine:
    """All ranks of an engine, each in a process, and its directory in this one."""

    def __init__(
        self, settings: dict[str, Any], ranks: int, span: int, block: int, *, replicas: int = 1, filled: bool
    ) -> None:
        pairs = [spawn.Pipe() for _ in range(ranks * replicas)]
        self.pipes = [ours for ours, _ in pairs]
        self._processes = [
            spawn.Process(target=rank, args=(theirs, settings, i, ranks, span, block, filled), daemon=True)
            for i, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        found = [self.receive(pipe) for pipe in self.pipes]
        self.directory = Directory(Config.from_mapping(settings), "engine", epoch=found[0][1])
        self.directory.publish(tuple(descriptor for descriptor, _ in found))
        self.blocks = (1 + np.random.default_rng(ranks).permutation(BLOCKS - 1))[
            : -(-TOKENS // (block * ranks))
        ].tolist()

    @property
    def source(self) -> Source:
        return self.directory.source

    def send(self, what: Any) -> None:
        for pipe in self.pipes:
            pipe.send((self.blocks, what))

    @staticmethod
    def receive(pipe: Connection) -> Any:
        assert pipe.poll(WAIT_S)
        return pipe.recv()

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(WAIT_S)
        self.directory.close()


@pytest.mark.parametrize(
    ("p", "d", "start"),
    [((1, 1, 16), (2, 1, 8), 0), ((2, 1, 8), (1, 1, 16), 16), ((2, 2, 16), (3, 1, 8), 24), ((3, 8, 8), (2, 1, 12), 0)],
)
def test_every_byte_arrives(p: tuple[int, int, int], d: tuple[int, int, int], start: int) -> None:
    """Between engines of other numbers of ranks that take turns, of other turns and blocks; checked on both sides."""
    settings = {"backend": "tcp", "integrity": "full", "transfer_timeout": WAIT_S, "lease": WAIT_S}
    one = SpawnedEngine(settings, *p, filled=True)
    two = SpawnedEngine(settings, *d, filled=False, replicas=1 + (d[0] == 1))
    try:
        one.send(Offer(TRANSFER, b"digest", 1, TOKENS, BlockTable.of([one.blocks]), True))
        assert [one.receive(pipe) for pipe in one.pipes] == [None] * len(one.pipes)
        table = BlockTable.of([two.blocks])
        two.send(Fetch("load", TRANSFER, b"digest", one.source, table, start, TOKENS, own=two.source))
        for told in [two.receive(pipe) for pipe in two.pipes]:
            assert told == ("delivered", 0, 0), f"bytes differ, or others were written: {told}"
    finally:
        one.close()
        two.close()


def test_one_of_several_ranks_does_not_load_alone() -> None:
    """The producer would free its blocks after the first of them."""
    config = Config.from_mapping({"backend": "kvxfer.testing.fake:FakeTransport", "transfer_timeout": 5.0})

    def cache(turns: TokenTurns | None, block: int) -> Cache:
        layers = list(np.zeros((LAYERS, BLOCKS, block, UNIT), np.uint8))
        return Cache.of_tensors({"latent": layers}, "block token unit", encoding="bytes", turns=turns)

    with Agent(cache(None, 16), config, "p") as p, Agent(cache(TokenTurns(0, 2, 1), 8), config, "d") as d:
        with Directory(config, "p", epoch=p.epoch) as directory:
            directory.publish((p.descriptor,))
            p.offer(Offer(TRANSFER, b"digest", 1, TOKENS, BlockTable.of([list(range(6))]), True))
            d.fetch(Fetch("load", TRANSFER, b"digest", directory.source, BlockTable.of([list(range(6))]), 0, TOKENS))
            ends: list[Ended] = []
            while not ends:
                ends = [event for event in d.events(WAIT_S) if isinstance(event, Ended)]
            failure = ends[0].outcome.failure
            assert failure is not None and "only some of the tokens" in failure.detail, failure
