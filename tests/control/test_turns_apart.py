"""Engines whose ranks take turns with tokens (context parallelism): every byte of a load, over sockets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer.config import Config
from kvxfer.geometry import Cache, Rank, TokenTurns
from kvxfer.identity import TransferId
from kvxfer.protocol.values import Ended
from kvxfer.testing.engine import AgentEngine
from kvxfer.values import BlockTable, Fetch, Offer
from tests.geometry.layouts import dealt

LAYERS, UNIT, BLOCKS, TOKENS, WAIT_S = 2, 24, 16, 91, 30.0
TRANSFER = TransferId("own/1/prompt", 0)


def content(layer: int, token: int) -> np.ndarray:
    """What every engine computes for a token."""
    return np.random.default_rng([layer, token]).integers(1, 255, UNIT, dtype=np.uint8)


class TurnsEngine(AgentEngine):
    """Ranks that hold turns of tokens; each of ``replicas`` has all of them."""

    def __init__(self, ranks: int, span: int, block: int, replicas: int = 1) -> None:
        self.hands = [dealt(at % ranks, ranks, span) for at in range(ranks * replicas)]
        self.kv = [np.zeros((LAYERS, BLOCKS, block, UNIT), np.uint8) for _ in self.hands]
        order = np.random.default_rng(ranks).permutation(BLOCKS - 1)
        self.blocks = (1 + order)[: -(-TOKENS // (block * ranks))].tolist()
        caches = []
        for at, kv in enumerate(self.kv):
            turns = TokenTurns(at % ranks, ranks, span) if ranks > 1 else None
            layers, rank = {"latent": list(kv)}, Rank(0, at)
            caches.append(Cache.of_tensors(layers, "block token unit", encoding="bytes", turns=turns, rank=rank))
        config = {"backend": "tcp", "integrity": "full", "transfer_timeout": WAIT_S, "lease": WAIT_S}
        super().__init__(config, caches=caches)

    def held(self, rank: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield layer, token and bytes of what a rank has room for."""
        block = self.kv[rank].shape[2]
        for layer, (token, at) in itertools.product(range(LAYERS), self.hands[rank].items()):
            if at < block * len(self.blocks):
                yield layer, token, self.kv[rank][layer, self.blocks[at // block], at % block]


@pytest.mark.parametrize(
    ("p", "d", "start"),
    [((1, 1, 16), (2, 1, 8), 0), ((2, 1, 8), (1, 1, 16), 16), ((2, 2, 16), (3, 1, 8), 24), ((3, 8, 8), (2, 1, 12), 0)],
)
def test_every_byte_arrives(p: tuple[int, int, int], d: tuple[int, int, int], start: int) -> None:
    """Between engines of other numbers of ranks that take turns, of other turns and blocks."""
    with TurnsEngine(*p) as one, TurnsEngine(*d, replicas=1 + (d[0] == 1)) as two:
        for rank, agent in enumerate(one.agents):
            for layer, token, kv in one.held(rank):
                kv[:] = content(layer, token)
            agent.offer(Offer(TRANSFER, b"digest", 1, TOKENS, BlockTable.of([one.blocks]), True))
        what = Fetch(
            "load", TRANSFER, b"digest", one.source, BlockTable.of([two.blocks]), start, TOKENS, own=two.source
        )
        for agent in two.agents:
            agent.fetch(what)
        for rank, kv in enumerate(two.kv):
            assert two.over("load", rank=rank).outcome.delivered
            for layer, token, found in two.held(rank):
                wanted = content(layer, token) if start <= token < TOKENS else np.zeros(UNIT, np.uint8)
                assert np.array_equal(found, wanted), (rank, layer, token)
            assert not np.delete(kv, two.blocks, axis=1).any(), "others were written"


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
