"""kvcached's block pool under kvxfer: it counts blocks that exist and blocks that have memory apart, and gives memory back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvxfer.engine import BlockPins
from kvxfer_vllm.pool import VllmBlockPool
from tests.conftest import require
from tests.vllm import kvcached

require("kvcached")
BLOCKS, ROOM = 400, 40


@pytest.fixture(params=[True, False], ids=["cached", "uncached"])
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    """kvcached's pool of 400 blocks, 40 of which can have memory at a time."""
    with kvcached.enabled(lambda blocks: kvcached.Pages(blocks, ROOM)):
        from vllm.v1.core.block_pool import ElasticBlockPool

        yield ElasticBlockPool(BLOCKS, 16, 256, 2, request.param, num_kv_buffers=1, hash_block_size=16)


def test_a_pinned_block_keeps_its_memory(pool: Any) -> None:
    pins = BlockPins(BLOCKS // 4, VllmBlockPool(pool))
    blocks = pool.get_new_blocks(4)
    pins.keep("holder", [b.block_id for b in blocks])
    pool.free_blocks(blocks)
    assert pool.kv_cache_manager.in_use == {b.block_id for b in blocks}
    pins.drop("holder")
    assert not pool.kv_cache_manager.in_use


def test_a_pool_in_which_few_blocks_have_memory_gets_unused(pool: Any) -> None:
    """Or a change of weights would wait for ever for the others to be freed."""
    pins = BlockPins(BLOCKS // 4, VllmBlockPool(pool))
    assert pins.pool_unused
    blocks = pool.get_new_blocks(1)
    assert not pins.pool_unused
    pool.free_blocks(blocks)
    assert pins.pool_unused


def test_memory_that_another_engine_has_taken_is_not_lent(pool: Any) -> None:
    """What the pool says is free was so a moment ago; a load that finds none is one for beside the steps."""
    pins = BlockPins(BLOCKS // 4, VllmBlockPool(pool))
    assert (lent := pins.borrow("load", 4))
    pool.kv_cache_manager.said, pool.kv_cache_manager.limit = ROOM, len(lent)
    assert pins.borrow("another", 4) is None
    pins.drop("load")
