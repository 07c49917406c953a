"""kvcached's block pool under kvxfer: it counts blocks that exist and blocks that have memory apart, and gives memory back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kvxfer.engine import BlockPins
from kvxfer_vllm.internals import VllmBlockPool
from tests.conftest import require
from tests.vllm import kvcached
from tests.vllm.cases import OFFER, both, check, crowd, decode, prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import ANSWER_S, BLOCK, FULL, HYBRID, PlayedEngine, prompt
from tests.vllm.wire import Load, Wire

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
    """What the pool says is free was so a moment ago; a load that finds none is async."""
    pins = BlockPins(BLOCKS // 4, VllmBlockPool(pool))
    assert (lent := pins.borrow("load", 4))
    pool.kv_cache_manager.said, pool.kv_cache_manager.limit = ROOM, len(lent)
    assert pins.borrow("another", 4) is None
    pins.drop("load")


def test_quarantine_is_a_quarter_of_what_can_have_memory(pool: Any) -> None:
    """And not of all 400 blocks, which would be more than all the memory that there is."""
    pins = BlockPins(BLOCKS // 4, VllmBlockPool(pool))
    ids = [block.block_id for block in pool.get_new_blocks(30)]
    assert pins.hold("one", ids[: ROOM // 4])
    assert not pins.hold("another", ids[ROOM // 4 : ROOM // 4 + 1])
    pins.drop("one")


# --- under vLLM's scheduler ---------------------------------------------------------------------------------------------


class World:
    """Engines that kvcached gives memory to, each to so many blocks at a time. A block that loses its memory loses its content."""

    def __init__(self, make: Make) -> None:
        self._make, self._room, self.pages = make, ROOM, list[kvcached.Pages]()

    def allocator(self, blocks: int) -> kvcached.Pages:
        self.pages.append(kvcached.Pages(blocks, self._room))
        return self.pages[-1]

    def engine(self, groups: Any = FULL, room: int = ROOM, **more: Any) -> PlayedEngine:
        self._room = room
        found = self._make(groups, blocks=BLOCKS, tensors=kvcached.tensors, **more)
        pages = self.pages[-1]
        assert found.pool.kv_cache_manager is pages and found.elastic and found.room == room

        def changed(block: int, mapped: bool) -> None:
            found.memory[block] = 0

        pages.changed = changed
        return found


@pytest.fixture
def world(make: Make) -> Iterator[World]:
    found = World(make)
    with kvcached.enabled(found.allocator):
        yield found


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_prompts_go_from_prefill_to_decode(world: World, groups: Any) -> None:
    p, d = world.engine(groups), world.engine(groups)
    for i in range(6):
        text = prompt(90, seed=i)
        decode(d, text, prefill(p, text), p)


def test_an_engine_with_more_requests_than_memory_preempts_and_offers_anew(world: World) -> None:
    """Blocks there are plenty of; what is short is memory, which kvcached says is there until it is not."""
    p, d = world.engine(room=16, budget=16, seqs=4, caching=False), world.engine(room=200)
    crowded = crowd(p)
    p.steps(16)
    text = prompt(90)
    name = p.add(text, OFFER, n=50)
    p.run(until=name)
    params = p.done[name].params
    assert params is not None and p.preempted
    decode(d, text, params, p)
    p.run(d)
    for i, other in enumerate(crowded):
        check(p, other, prompt(30, seed=50 + i), 60)


def begun(d: PlayedEngine, p: PlayedEngine, wire: Wire) -> Load:
    """The load of D that reads what P offers while it goes on."""
    p.steps(4)
    end = time.monotonic() + ANSWER_S
    while not wire.loads(d):
        assert time.monotonic() < end, "D does not ask"
        d.step()
        time.sleep(0.001)
    (load,) = wire.loads(d)
    while not wire.begin(load):
        p.step()
    return load


def read_by(load: Load) -> set[int]:
    assert load.offer is not None
    return set(load.offer.blocks.ids())


def test_what_is_read_keeps_its_memory_when_its_request_is_preempted(world: World, wire: Wire) -> None:
    p, d = world.engine(room=17, caching=False), world.engine(room=100)
    wire.paused = True
    crowd(p, of=60, others=2, n=60)
    p.steps(3)
    to_p, to_d = both(p, "job")
    text = prompt(60)  # a quarter of what there is memory for
    a, b = p.add(text, to_p, n=80), d.add(text, to_d)
    load = begun(d, p, wire)
    read = read_by(load)
    while a not in p.preempted:
        p.step()
        assert read <= world.pages[0].in_use, "its memory is gone while it is read"
    wire.read(load)
    assert not wire.settle(load)
    p.steps(2)
    assert not read <= world.pages[0].in_use, "nobody reads it, and the engine is short of memory"
    wire.paused = False
    d.run(p, until=b)
    check(d, b, text)


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_what_is_read_keeps_its_memory_when_its_request_is_aborted(world: World, wire: Wire, groups: Any) -> None:
    """A client goes away when P has decoded past the window, so that its end is held by nobody but us."""
    p, d = world.engine(groups, 100), world.engine(groups, 100)
    wire.paused = True
    text = prompt(70)
    to_p, to_d = both(p, "job")
    a, b = p.add(text, to_p, n=200), d.add(text, to_d)
    load = begun(d, p, wire)
    read = read_by(load)
    p.steps(60)
    p.abort(a)
    assert read <= world.pages[0].in_use
    p.steps(2)
    assert read <= world.pages[0].in_use
    wire.fail(load, "given up")
    p.steps(3)
    wire.paused = False
    d.run(p, until=b)
    check(d, b, text)


@pytest.mark.parametrize("most", [0, 3, 16])
def test_a_prefix_cache_with_a_bound(world: World, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """kvcached gives the memory of all other cached blocks back; offers and loads do not count on them."""
    monkeypatch.setattr("kvcached.utils.MAX_CACHED_TOKENS", most * BLOCK)
    p, d = world.engine(), world.engine()
    for i in range(4):
        text = prompt(60, seed=i % 2) + prompt(40, seed=10 + i)
        decode(d, text, prefill(p, text), p)
    p.run(d)
    assert all(len(pages.in_use) <= most for pages in world.pages)


def test_a_cache_that_others_may_still_read_is_cleared_once_they_no_longer_do(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM has preempted the requests by then, and raises; it can be asked again while they are paused."""
    p, d = world.engine(overlap=False), world.engine(overlap=False)
    text = prompt(90)
    name = p.add(text, OFFER, n=30)
    p.steps(3)
    p.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        p.scheduler.reset_prefix_cache(reset_running_requests=True)
    said = [r.getMessage() for r in caplog.records if r.name == "kvxfer.vllm"]
    assert len(said) == 1
    assert all("the cache cannot be cleared now" in line and "pause this engine and ask again" in line for line in said)
    for _ in range(10):
        assert not p.step().total_num_scheduled_tokens
    assert p.scheduler.reset_prefix_cache(reset_running_requests=True)
    p.scheduler.set_pause_state(PauseState.UNPAUSED)
    p.run(until=name)
    params = p.done[name].params
    assert params is not None
    decode(d, text, params, p)


def test_a_cache_whose_requests_are_aborted_is_cleared_once_nobody_reads_what_they_have_offered(world: World) -> None:
    p = world.engine(overlap=False)
    p.add(prompt(90), OFFER, n=30)
    p.steps(3)
    p.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    p.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(10):
        if not p.scheduler.has_requests():  # a pause is complete then
            break
        p.step()
    assert p.scheduler.reset_prefix_cache(reset_running_requests=True)
    p.scheduler.set_pause_state(PauseState.UNPAUSED)
