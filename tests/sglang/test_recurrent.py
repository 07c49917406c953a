"""States of recurrent layers between engines of other numbers of ranks: whose channels are whose, byte by byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer import BlockTable, Ended, Fetch, Offer, Rank, TransferId
from kvxfer.testing.engine import AgentEngine
from kvxfer_sglang.cache import heads_of, pool_cache
from tests.sglang.test_units import LAYERS, PAGE, PAGES, UNIT, buffers

ROWS, KERNEL, DIGEST = 6, 4, b"digest"
PARTS = [8, 8, 32]
"""Channels of queries, keys and values in a convolution."""
HERE, THERE = 5, 2


def whole(kimi: bool) -> list[np.ndarray]:
    """What the items of all ranks hold together: channels of a convolution, heads of a state, and what each rank has."""
    draw = np.random.default_rng(7)
    conv = draw.integers(0, 1 << 15, (sum(PARTS), KERNEL - 1), np.uint16)
    return [conv.T if kimi else conv, draw.random((4, 6, 5), np.float32), draw.random(9, np.float32)]


def share(kimi: bool, rank: int, ranks: int) -> list[np.ndarray]:
    conv, temporal, everywhere = whole(kimi)
    parts = np.split(conv, np.cumsum(PARTS)[:-1], axis=1 if kimi else 0)
    own = [np.split(part, ranks, axis=1 if kimi else 0)[rank] for part in parts]
    return [np.concatenate(own, axis=1 if kimi else 0), np.split(temporal, ranks)[rank], everywhere]


class RecurrentEngine(AgentEngine):
    """An agent for each rank, over two recurrent layers and an attention layer's pages."""

    def __init__(self, kimi: bool, ranks: int) -> None:
        self.states = [[share(kimi, rank, ranks) for _ in "ab"] for rank in range(ranks)]
        self.tensors = [
            [np.zeros((ROWS, *item.shape), item.dtype) for items in zip(*layers, strict=True) for item in items]
            for layers in self.states
        ]
        self.pages = [
            [np.zeros((PAGES, PAGE * 4 // ranks * UNIT), np.uint8) for _ in range(2 * LAYERS)] for _ in self.states
        ]
        super().__init__(caches=[self.cache(kimi, rank, ranks) for rank in range(ranks)])

    def cache(self, kimi: bool, rank: int, ranks: int) -> Any:
        found, heads = self.tensors[rank], heads_of(rank, ranks, 4)
        dims = [sum(PARTS) // ranks] * 2 + [4 // ranks] * 2 + [0] * 2
        args = buffers(
            heads[1],
            kv_data_ptrs=[page.ctypes.data for page in self.pages[rank]],
            state_types=["mamba"],
            state_data_ptrs=[[tensor.ctypes.data for tensor in found]],
            state_data_lens=[[tensor.nbytes for tensor in found]],
            state_item_lens=[[tensor[0].nbytes for tensor in found]],
            state_layer_ids=[[5, 7] * 3],
            state_dim_per_tensor=[dims],
            state_slice_outer_counts=[[KERNEL - 1 if kimi else 1] * 2 + [1] * 4],
            state_conv_shard_groups=[[PARTS] * 2 + [None] * 4],
        )
        return pool_cache(args, heads, Rank(tp=rank), ranks, "cpu")

    def items(self, rank: int) -> list[np.ndarray]:
        """What each tensor is to hold."""
        return [item for items in zip(*self.states[rank], strict=True) for item in items]


@pytest.mark.parametrize("kimi", [False, True], ids=["gated delta net", "Kimi's order"])
@pytest.mark.parametrize(("producers", "consumers"), [(1, 2), (2, 1), (4, 2), (2, 2)])
def test_each_channel_goes_to_the_rank_that_has_it(kimi: bool, producers: int, consumers: int) -> None:
    with RecurrentEngine(kimi, producers) as p, RecurrentEngine(kimi, consumers) as d:
        transfer = TransferId.mint(p.directory.epoch, "r")
        for rank, agent in enumerate(p.agents):
            for tensor, item in zip(p.tensors[rank], p.items(rank), strict=True):
                tensor[HERE] = item
            agent.offer(Offer(transfer, DIGEST, 1, PAGE, BlockTable.of([[1], [HERE]]), True))
        for agent in d.agents:
            table = BlockTable.of([[3], [THERE]])
            agent.fetch(Fetch("r", transfer, DIGEST, p.source, table, 0, PAGE, d.source))
        for rank in range(consumers):
            (end,) = d.wait(Ended, rank, timeout=20.0)
            assert end.outcome.delivered, end.outcome
            for tensor, item in zip(d.tensors[rank], d.items(rank), strict=True):
                assert np.array_equal(tensor[THERE], item)
                assert not tensor[:THERE].any() and not tensor[THERE + 1 :].any()
