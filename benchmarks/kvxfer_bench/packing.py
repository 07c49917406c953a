"""Measures how fast scattered blocks are packed into one long message and unpacked from it, compared with a plain torch copy.

Shape: Llama-3-8B in bf16, 32 layers, blocks of 16 tokens, 8 KV heads of 128; block ids are scattered on both sides. ``layouts``
explains the names of layouts. Each figure is the median of ``repeat`` rounds in GB/s (1e9 bytes of KV), and its ratio to a torch
copy of the same bytes that takes turns with it. What was unpacked is compared with what was packed. On a CPU the second of two
consecutive calls is timed; on a GPU times are the device's own, taken while the host is ahead of it, and ``submit_us`` is what a
call costs the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from kvxfer import memory
from kvxfer.geometry import CopyPlan, Planner, Region, ShardAssignment
from kvxfer_bench.layouts import HEAD_BYTES, HEADS, layout_cache

LAYERS, TOKENS = 32, 16
PAGE = TOKENS * HEADS * 2 * HEAD_BYTES

PAIRS = [
    ("LBNHC", "LBNHC", HEADS),
    ("BLNHC", "BLNHC", HEADS),
    ("LBNHC", "LBHNC", HEADS),
    ("LBHNC", "LBNHC", HEADS),
    ("2BNHD", "LBNHC", HEADS),
    ("LBNHC", "2BNHD", HEADS),
    ("2BNHD", "LBHNC", HEADS),
    ("LBNHC", "LBNHC", HEADS // 2),
    ("LBHNC", "LBHNC", HEADS // 2),
]


class RoundTimer:
    """Times calls in turns, and returns medians in seconds: of the work, and of the calling thread."""

    def __init__(self, device: str, repeat: int) -> None:
        self._device, self._repeat = device, repeat

    def __call__(self, calls: dict[str, Callable[[memory.Fence], Any]]) -> dict[str, tuple[float, float]]:
        for call in calls.values():
            self._once(call)
        rounds = [{name: self._once(call) for name, call in calls.items()} for _ in range(self._repeat)]
        return {n: tuple(statistics.median(r[n][i] for r in rounds) for i in (0, 1)) for n in calls}  # type: ignore[misc]

    def _once(self, call: Callable[[memory.Fence], Any]) -> tuple[float, float]:
        if self._device == "cpu":
            call(memory.Done())  # on a virtual machine a core that has slept takes milliseconds to wake up
            start = time.perf_counter()
            call(memory.Done())
            return (time.perf_counter() - start,) * 2
        stream = torch.cuda.current_stream(self._device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)  # about a millisecond, for the host to get ahead
        begin.record(stream)
        after = memory.fence(self._device)
        start = time.perf_counter()
        fence = call(after)
        submitted = time.perf_counter() - start
        if fence is not None and fence.event is not None:  # else it is done already
            stream.wait_event(fence.event)
        end.record(stream)
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3, submitted


def measure(device: str, mib: int, one: str, other: str, heads: int, repeat: int) -> dict[str, Any]:
    """Measure one pair of layouts, moving ``heads`` heads; return figures with their unit in the key."""
    count = (mib << 20) // (LAYERS * PAGE * heads // HEADS)
    blocks = count * 5 // 4 + 1
    rng = np.random.default_rng(0)
    sizes = [LAYERS * blocks * PAGE, LAYERS * blocks * PAGE * heads // HEADS]
    held = [torch.randint(0, 256, (n,), dtype=torch.uint8, device=device) for n in sizes]
    src, dst = (
        layout_cache(layout, LAYERS, blocks, TOKENS, Region.of(t), (0, h))
        for layout, h, t in ((one, HEADS, held[0]), (other, heads, held[1]))
    )
    assignments = [ShardAssignment(i, i, v.layers, 0, heads) for i, v in enumerate(dst.views)]
    tables = [[rng.permutation(blocks)[:count].astype(np.int64)] for _ in "sd"]
    plan: CopyPlan = Planner(src, dst, assignments).plan(tables[0], tables[1], 0, count * TOKENS)
    source, sink, staged = memory.space(src.regions), memory.space(dst.regions), memory.allocate(plan.nbytes, device)
    flat = [torch.empty(plan.nbytes, dtype=torch.uint8, device=device).fill_(i) for i in (1, 2)]
    calls: dict[str, Callable[[memory.Fence], Any]] = {
        "copy": lambda _: _nothing(flat[0].copy_(flat[1])),
        "pack": lambda after: source.pack(plan, staged, 0, after),
        "unpack": lambda after: sink.unpack(plan, staged, 0, after),
        "checksum": lambda after: source.checksum(plan, "source", after).fence,
    }
    if device != "cpu":
        pinned = memory.allocate(plan.nbytes, beside=device)
        calls["pack_to_host"] = lambda after: source.pack(plan, pinned, 0, after)
        calls["unpack_from_host"] = lambda after: sink.unpack(plan, pinned, 0, after)
    took = RoundTimer(device, repeat)(calls)
    sent, received = source.checksum(plan, "source").value, sink.checksum(plan, "destination").value
    out: dict[str, Any] = {
        "producer": one,
        "consumer": other,
        "heads": heads,
        "mib": plan.nbytes >> 20,
        "row_bytes": plan.nbytes // plan.rows,
        "bytes_identical": sent == received,
    }
    for name, (seconds, submit) in took.items():
        out[f"{name}_GB_per_s"] = round(plan.nbytes / seconds / 1e9, 2)
        if name != "copy":
            out[f"{name}_of_copy"] = round(took["copy"][0] / seconds, 3)
            if device != "cpu":
                out[f"{name}_submit_us"] = round(submit * 1e6, 1)
    return out


def _nothing(_: object) -> None:
    return None


def rows(device: str, mib: list[int], repeat: int) -> Iterator[dict[str, Any]]:
    """Yield a row of figures for each size and pair of layouts as soon as it is measured."""
    for size in mib:
        for one, other, heads in PAIRS:
            yield measure(device, size, one, other, heads, repeat)
