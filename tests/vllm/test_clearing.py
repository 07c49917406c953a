"""Blocks that vLLM does not clear since they are loaded: what the load does not write in them must be cleared all the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    SlidingWindowSpec,
)

from kvxfer.config import Config
from kvxfer.engine import Step
from kvxfer.geometry import Cache, Group, Heads, Rank, Region, View
from kvxfer.identity import Source, TransferId
from kvxfer.schedule import StepCommands
from kvxfer.values import NULL, BlockTable, Fetch
from kvxfer_vllm import copying
from kvxfer_vllm import worker as half
from kvxfer_vllm.copying import Clearing, memory_of
from kvxfer_vllm.layout import Layout
from kvxfer_vllm.metadata import StepMetadata
from tests.vllm.conftest import Make
from tests.vllm.engine import BLOCK, STATEFUL, prompt
from tests.vllm.sides import OnGpu

BLOCKS, TOKENS, HEADS, SIZE = 8, 16, 2, 8
FULL, WINDOW = ("full.0", "full.1"), ("window.0",)
SPAN = 24


def kv_config(mixed: bool = True) -> KVCacheConfig:
    """A group with full attention and one with a window, of one precision or of two."""
    shape: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": SIZE}
    full = FullAttentionSpec(**shape, dtype=torch.bfloat16)
    precise = {"dtype": torch.float32} if mixed else {"dtype": torch.bfloat16}
    window = SlidingWindowSpec(**shape, **precise, sliding_window=SPAN, kv_quant_mode=KVQuantMode.NONE)
    return KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(list(FULL), full), KVCacheGroupSpec(list(WINDOW), window)])


def stale(kv: KVCacheConfig) -> dict[str, torch.Tensor]:
    """Caches ``[blocks, heads, tokens, content]`` that hold what others left, token-major."""
    return {
        name: torch.full(
            (BLOCKS, TOKENS, group.kv_cache_spec.num_kv_heads, 2 * SIZE), math.nan, dtype=group.kv_cache_spec.dtype
        ).transpose(1, 2)
        for group in kv.kv_cache_groups
        for name in group.layer_names
    }


def described(tensors: dict[str, torch.Tensor], kv: KVCacheConfig) -> Layout:
    """As on a GPU, where tokens lie in rows; on a CPU vLLM packs them."""
    regions, views = [], []
    for g, group in enumerate(kv.kv_cache_groups):
        for name in group.layer_names:
            t = tensors[name]
            start = Cache((*regions, Region(t.data_ptr(), 1)), (), ()).starts[-1]
            regions.append(Region(t.data_ptr(), t.untyped_storage().nbytes()))
            block, head, token = (s * t.element_size() for s in t.stride()[:3])
            unit = t.shape[3] * t.element_size()
            views.append(
                View("kv", g, (name,), (start,), BLOCKS, block, unit, "x", Heads(0, HEADS, HEADS, head), token)
            )
    groups = (Group(TOKENS), Group(TOKENS, "window", SPAN))
    return Layout(Cache(tuple(regions), groups, tuple(views), Rank()), (1, 1))


class Fetched:
    """The agent, and what was in memory when it was asked to fetch."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.descriptor, self.seen = tensors, None, {}  # type: ignore[var-annotated]
        self.tail: bool | None = None  # whether the load may write behind its last token
        self.cache = Cache((Region(4096, 4096),), (), ())

    def listen(self, heard: Any) -> None:
        pass

    def fetch(self, fetch: Fetch) -> None:
        self.tail = fetch.tail
        self.seen = {name: t.clone() for name, t in self.tensors.items()}


def load(
    monkeypatch: pytest.MonkeyPatch, kv: KVCacheConfig, blocks: Any, start: int, tokens: int
) -> dict[str, torch.Tensor]:
    """What the worker side leaves in memory before the bytes of a load may come."""
    tensors = stale(kv)
    agent = Fetched(tensors)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(half, "Agent", lambda *args: agent)
    monkeypatch.setattr(Layout, "of", lambda *args: described(tensors, kv))
    vllm: Any = SimpleNamespace(
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(use_ubatching=False, pipeline_parallel_size=1, tensor_parallel_size=1),
    )
    worker = half.WorkerHooks(Config(layout_check=False), vllm, kv)
    worker.register(tensors)
    source = Source("127.0.0.1", 1, 1)
    fetch = Fetch("request", TransferId("x", 0), b"d", source, BlockTable.of(blocks), start, tokens, tail=True)
    worker.load(StepMetadata(Step(StepCommands(fetches=(fetch,)))))
    assert agent.seen, "nothing was fetched"
    assert agent.tail is not kv.needs_kv_cache_zeroing, "what was cleared stays so"
    return agent.seen


def clear(t: torch.Tensor, block: int) -> list[int]:
    """The tokens of a block that are zero, all of which is."""
    return [n for n in range(TOKENS) if not t[block, :, n].isnan().any() and not t[block, :, n].any()]


def test_vllm_asks_for_it_where_precisions_are_mixed() -> None:
    assert kv_config().needs_kv_cache_zeroing and not kv_config(mixed=False).needs_kv_cache_zeroing


def test_what_a_load_does_not_write_is_cleared_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """37 tokens, of which the engine has 16."""
    seen = load(monkeypatch, kv_config(), ((NULL, 4, 2), (NULL, 5, 6)), 16, 37)
    for name in FULL:
        assert [clear(seen[name], b) for b in (4, 2)] == [[], list(range(5, TOKENS))]
    # Token 13 is the first that token 37 attends to.
    assert [clear(seen["window.0"], b) for b in (5, 6)] == [[], list(range(5, TOKENS))]
    for name, t in seen.items():
        mine = (4, 2) if name in FULL else (5, 6)
        assert all(t[b].isnan().all() for b in range(BLOCKS) if b not in mine), "a block of somebody else was touched"


def test_what_the_engine_has_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = load(monkeypatch, kv_config(), ((3,), (1,)), 5, 12)
    assert all(clear(seen[name], 3) == list(range(12, TOKENS)) for name in FULL)


def test_a_window_s_beginning_that_may_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = load(monkeypatch, kv_config(), ((0, 1, 2), (7, 5, 6)), 0, 37)
    assert [clear(seen["window.0"], b) for b in (7, 5, 6)] == [list(range(14)), [], list(range(5, TOKENS))]


def test_nothing_is_cleared_where_vllm_clears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = load(monkeypatch, kv_config(mixed=False), ((4, 2), (5, 6)), 0, 20)
    assert all(t.isnan().all() for t in seen.values())


def test_layers_that_lie_in_one_storage_are_cleared_at_once_and_alike() -> None:
    memory = torch.full((3, BLOCKS, TOKENS, 4), 7, dtype=torch.uint8)
    views = tuple(
        View("kv", 0, names, tuple(o * BLOCKS * TOKENS * 4 for o in at), BLOCKS, TOKENS * 4, 4, "x", None, 4)
        for names, at in ((("a", "c"), (0, 2)), (("b",), (1,)))
    )
    cache = Cache((Region(memory.data_ptr(), memory.nbytes),), (Group(TOKENS),), views)
    Clearing([memory[1]], cache).before([[6, 3]], 0, TOKENS + 10)  # type: ignore[list-item]
    expected = torch.full_like(memory, 7)
    expected[:, 3, 10:] = 0
    assert torch.equal(memory, expected)


def test_a_device_clears_on_a_stream_of_its_own_and_is_done_when_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that come over another stream would else be cleared after they have come."""
    memory, done = torch.full((BLOCKS, TOKENS, 4), 7, dtype=torch.uint8), list[str]()
    view = View("kv", 0, ("a",), (0,), BLOCKS, TOKENS * 4, 4, "x", None, 4)
    cache = Cache((Region(memory.data_ptr(), memory.nbytes),), (Group(TOKENS),), (view,))

    @contextmanager
    def stream(of: Any) -> Iterator[None]:
        done.append("begun")
        assert (memory == 7).all()
        yield
        assert (memory[3, 10:] == 0).all() and (memory[3, :10] == 7).all()

    monkeypatch.setattr(copying, "memory_of", lambda *args: [OnGpu(t) for t in memory_of(*args)])
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda at: SimpleNamespace(synchronize=lambda: done.append(f"{at} waited for"))
    )
    monkeypatch.setattr(torch.cuda, "stream", stream)
    Clearing([memory], cache).before(BlockTable.of([[3]]), 0, 10)
    assert done == ["begun", "cuda:0 waited for"]


def test_vllm_leaves_a_load_s_blocks_to_us_and_clears_the_others(make: Make) -> None:
    """Which is why: its own scheduler, with a recurrent state beside full attention."""
    p, d = make(STATEFUL), make(STATEFUL)
    a = p.add(prompt(3 * BLOCK), {"do_remote_decode": True}, n=1)
    p.run(until=a)
    d.wire.paused = True
    b = d.add(prompt(3 * BLOCK), p.done[a].params, n=BLOCK + 4)
    cleared: set[int] = set()
    while not d.wire.loads(d):
        cleared |= set(d.step().new_block_ids_to_zero or ())
    (loading,) = d.wire.loads(d)
    mine = {int(block) for block in loading.fetch.blocks[0] if block >= 0}
    d.wire.paused = False
    while b not in d.done:
        cleared |= set(d.step().new_block_ids_to_zero or ())
        p.step()
    assert len(mine) == 3 and not mine & cleared
    assert cleared, "it clears those that the answer grows into"
