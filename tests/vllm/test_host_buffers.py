"""``kv_buffer_device: cpu``: the cache is reached by the copy operation that vLLM's platform hands over, and by nothing else.

The device is played: its regions are said to lie on ``xpu:0``. vLLM's own ``copy_kv_blocks`` copies, with the methods of vLLM's
platform for XPU, whose kernels are not installed and not needed.
"""

from __future__ import annotations

import importlib
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector import utils

from kvxfer import Config, Directory, TransferId
from kvxfer.engine.exchange import Step
from kvxfer.geometry import Cache, Region
from kvxfer.memory import space
from kvxfer.schedule.commands import StepCommands
from kvxfer.values import BlockTable, Fetch, Offer
from kvxfer_vllm import worker
from kvxfer_vllm.host_buffers import HostBuffers
from kvxfer_vllm.layout import Layout
from kvxfer_vllm.metadata import StepMetadata
from tests.engine.small import over

SIZES = {"L": 3, "B": 9, "H": 2, "N": 4, "C": 6}
ORDERS = ("LBHNC", "BLHNC", "BHLNC", "LHBNC", "LNBHC", "HLBNC")
"""The axes of the memory, outermost first: a layer's blocks side by side; a block's layers; heads or tokens that lie apart."""


def tensors_in(order: str) -> dict[str, torch.Tensor]:
    """Each layer's tensor, ``[blocks, heads, tokens, content]``, in memory of this order with random content."""
    whole = torch.from_numpy(np.random.default_rng(7).integers(0, 1 << 15, [SIZES[axis] for axis in order], np.int16))
    view = whole.permute([order.index(axis) for axis in "LBHNC"])
    return {f"layer.{i}": view[i] for i in range(SIZES["L"])}


def cache_of(tensors: dict[str, torch.Tensor], device: str) -> Cache:
    """Describe the tensors as parts of one region, which is their storage."""
    cache = Cache.of_tensors([*tensors.values()], "block head token unit", layers=[*tensors])
    storage = next(iter(tensors.values())).untyped_storage()
    views = tuple(
        msgspec.structs.replace(
            view, offsets=tuple(tensors[layer].data_ptr() - storage.data_ptr() for layer in view.layers)
        )
        for view in cache.views
    )
    region = Region(storage.data_ptr(), storage.nbytes(), device).kept_by(tensors)
    return msgspec.structs.replace(cache, regions=(region,), views=views)


class Copies:
    """vLLM's operation, and what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = []
        for name in ("vllm_xpu_kernels", "vllm_xpu_kernels._C", "vllm_xpu_kernels._moe_C", "vllm_xpu_kernels._xpu_C"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(utils, "current_platform", importlib.import_module("vllm.platforms.xpu").XPUPlatform)

    def __call__(self, source: Any, destination: Any, here: list[int], there: list[int], way: Any) -> None:
        self.asked.append((way, tuple(source), tuple(here)))
        utils.copy_kv_blocks(source, destination, here, there, way)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_of_any_length_are_read_and_written(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, copies = tensors_in(order), Copies(monkeypatch)
    buffers = HostBuffers(tensors)
    buffers.use(copies)
    covered = space(buffers.cover(cache_of(tensors, "xpu:0")).regions)
    storage = next(iter(tensors.values())).untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    mine, random = memory.copy(), np.random.default_rng(1)
    for _ in range(200):
        region = int(random.integers(len(covered.regions)))
        base = covered.regions[region].address - storage.data_ptr()
        size = covered.regions[region].nbytes
        nbytes = int(random.integers(1, size // 4))
        at = np.sort(random.choice(size // nbytes, int(random.integers(1, 4)), replace=False)).astype(np.int64) * nbytes
        if random.integers(2):
            rows = random.integers(0, 255, (len(at), nbytes), np.uint8)
            covered.scatter(region, at, rows)
            for offset, row in zip(at + base, rows, strict=True):
                mine[offset : offset + nbytes] = row
            assert np.array_equal(memory, mine)
        else:
            rows = np.zeros((len(at), nbytes), np.uint8)
            covered.gather(region, at, rows)
            assert np.array_equal(rows, np.stack([mine[o : o + nbytes] for o in at + base]))


def test_only_the_layers_and_blocks_concerned_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, copies = tensors_in("LBHNC"), Copies(monkeypatch)
    buffers = HostBuffers(tensors)
    buffers.use(copies)
    covered = space(buffers.cover(cache_of(tensors, "xpu:0")).regions)
    block = SIZES["H"] * SIZES["N"] * SIZES["C"] * 2
    layer = block * SIZES["B"]
    covered.gather(0, np.array([layer + 3 * block + 1, layer + 5 * block]), np.zeros((2, 8), np.uint8))
    assert copies.asked == [("d2h", ("layer.1",), (3, 5))]
    copies.asked.clear()
    covered.scatter(0, np.array([block]), np.zeros((1, 2 * block), np.uint8))
    assert copies.asked == [("h2d", ("layer.0",), (1, 2))], "whole blocks are not read first"
    copies.asked.clear()
    covered.scatter(0, np.array([block]), np.zeros((1, block + 1), np.uint8))
    assert copies.asked == [("d2h", ("layer.0",), (1, 2)), ("h2d", ("layer.0",), (1, 2))]


class Worker:
    """A worker's hooks over such a cache, with an agent that moves its bytes."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, backend: str, order: str, copies: Copies | None, device: str = "xpu:0"
    ) -> None:
        self.tensors = tensors_in(order)
        cache = cache_of(self.tensors, device)
        config = Config(
            backend=backend, transfer_timeout=20.0, peer_timeout=20.0, staging_bytes=1 << 20, layout_check=False
        )
        vllm: Any = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(engine_id="buffered", kv_buffer_device="cpu"),
            parallel_config=SimpleNamespace(use_ubatching=False, pipeline_parallel_size=1, tensor_parallel_size=1),
        )
        monkeypatch.setattr("vllm.distributed.parallel_state.get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
        monkeypatch.setattr("vllm.distributed.parallel_state.get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(Layout, "of", lambda *args: Layout(cache, (1,)))
        self.hooks = worker.WorkerHooks(config, vllm, SimpleNamespace(num_blocks=SIZES["B"]))  # type: ignore[arg-type]
        self.hooks.register(self.tensors)
        if copies is not None:
            self.hooks.copy_with(copies)
        self.directory = Directory(config, "buffered")
        handshake = self.hooks.handshake()
        assert handshake is not None
        self.directory.publish((handshake.descriptor,))

    def close(self) -> None:
        self.hooks.close()
        self.directory.close()


def end_of(p: Worker, d: Worker, transfer: TransferId) -> set[str]:
    """Have D load blocks 2, 5 and 1 of P into its blocks 1, 2 and 7; return the requests that failed."""
    offer = Offer(transfer, b"d", 0, 3 * SIZES["N"], BlockTable.of([[2, 5, 1]]), True)
    p.hooks.after_forward(StepMetadata(Step(StepCommands(offers=(offer,)))))
    fetch = Fetch("r", transfer, b"d", p.directory.source, BlockTable.of([[1, 2, 7]]), 0, 3 * SIZES["N"])
    d.hooks.load(StepMetadata(Step(StepCommands(fetches=(fetch,)))))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for each in (p, d):
            each.hooks.collect(StepMetadata())
        if (found := d.hooks.report()) is not None and (ends := over(found.report)):
            return {name for name, failure in ends.items() if failure is not None}
        time.sleep(0.005)
    raise AssertionError("the load did not end")


@pytest.mark.parametrize("orders", [("LBHNC", "BLHNC"), ("BLHNC", "LHBNC"), ("LBHNC", "LBHNC")])
@pytest.mark.parametrize("backend", ["tcp", "nixl"])
def test_a_load_goes_through_buffers_on_both_sides(
    backend: str, orders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = [Copies(monkeypatch), Copies(monkeypatch)]
    p, d = (Worker(monkeypatch, backend, order, copy) for order, copy in zip(orders, copies, strict=True))
    try:
        others = {name: t[[0, 3, 4, 5, 6, 8]].clone() for name, t in d.tensors.items()}
        p.tensors["layer.1"] += 1
        assert not end_of(p, d, TransferId("own/1/buffered", 1))
        for name, t in d.tensors.items():
            assert torch.equal(t[[1, 2, 7]], p.tensors[name][[2, 5, 1]])
            assert torch.equal(t[[0, 3, 4, 5, 6, 8]], others[name])
        ways = [{way for way, _, _ in copy.asked} for copy in copies]
        assert ways[0] == {"d2h"} and "h2d" in ways[1]
    finally:
        p.close()
        d.close()


def test_a_cache_in_host_memory_needs_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    p, d = Worker(monkeypatch, "tcp", "LBHNC", copies), Worker(monkeypatch, "tcp", "LBHNC", copies, "cpu")
    try:
        assert not end_of(p, d, TransferId("own/1/buffered", 2))
        assert torch.equal(d.tensors["layer.2"][[1, 2, 7]], p.tensors["layer.2"][[2, 5, 1]])
        assert {way for way, _, _ in copies.asked} == {"d2h"}
    finally:
        p.close()
        d.close()


def test_without_the_operation_a_load_fails_with_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = Worker(monkeypatch, "tcp", "LBHNC", None), Worker(monkeypatch, "tcp", "LBHNC", None)
    try:
        assert end_of(p, d, TransferId("own/1/buffered", 3)) == {"r"}
        assert "kv_buffer_device" in caplog.text
    finally:
        p.close()
        d.close()
