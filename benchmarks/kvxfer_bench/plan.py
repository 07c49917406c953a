"""``kvxfer bench plan``: what planning costs for pairs of layouts, block sizes and tensor-parallel sizes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from kvxfer.geometry import Cache, CopyPlan, Group, Heads, Planner, Region, ShardAssignment, View
from kvxfer.geometry.strided_copy import materialise
from kvxfer.values import BlockTable
from kvxfer_bench.options import Json
from kvxfer_bench.table import tables

HEADS, HEAD_BYTES = 8, 256
"""KV heads of a model, and the bytes of one of K, or of V: 128 values."""
LAYERS = 80

_MAX_RUNS = 4 << 20
"""Most runs made when timing ``runs()``: 100 MB of arrays, enough for page faults to show."""


@dataclass(frozen=True)
class RankLayout:
    """The cache of one rank: the name of its layout, its tokens per block, and the heads that it holds."""

    layout: str
    block_tokens: int = 16
    heads: tuple[int, int] = (0, HEADS)

    def cache(self, tokens: int) -> Cache:
        """Describe the cache in one region, with a fifth more blocks than the request needs."""
        (lo, hi), n = self.heads, self.block_tokens
        blocks = -(-tokens // n) * 6 // 5 + 1
        sizes = {"L": LAYERS, "B": blocks, "N": n, "H": hi - lo, "2": 2}
        axes = self.layout.replace("C", "2").removesuffix("D")
        step, nbytes = dict[str, int](), HEAD_BYTES  # from one to the next along each axis
        for axis in reversed(axes if "L" in axes else f"L{axes}"):
            step[axis], nbytes = nbytes, nbytes * sizes[axis]
        names, heads = tuple(f"layer.{i}" for i in range(LAYERS)), Heads(lo, hi - lo, HEADS, step["H"])

        def view(plane: str, at: int) -> View:
            offsets = tuple(i * step["L"] + at for i in range(LAYERS))
            return View(plane, 0, names, offsets, blocks, step["B"], HEAD_BYTES, "bf16", heads, step["N"])

        return Cache((Region(0, nbytes),), (Group(n),), (view("k", 0), view("v", step["2"])))

    def __str__(self) -> str:
        lo, hi = self.heads
        return f"{self.layout}/{self.block_tokens}" + ("" if hi - lo == HEADS else f" heads {lo}-{hi - 1}")


PAIRS = (
    (RankLayout("LBNHC"), RankLayout("LBNHC")),
    (RankLayout("BLHNC"), RankLayout("BLHNC")),
    (RankLayout("LBNHC"), RankLayout("LBHNC")),
    (RankLayout("LBHNC"), RankLayout("LBNHC")),
    (RankLayout("2BNHD"), RankLayout("B2NHD")),
    (RankLayout("2BNHD"), RankLayout("LBHNC")),
    (RankLayout("BLNHC"), RankLayout("LBHNC")),
    (RankLayout("LBNHC"), RankLayout("LBNHC", 64)),
    (RankLayout("LBNHC", 64), RankLayout("LBHNC")),
    (RankLayout("LBHNC"), RankLayout("LBHNC", 32)),
    (RankLayout("LBNHC", 48), RankLayout("LBHNC", 64)),
    (RankLayout("LBNHC", 16), RankLayout("LBHNC", 17)),
    (RankLayout("LBNHC"), RankLayout("LBNHC", heads=(0, 4))),
    (RankLayout("LBNHC", heads=(4, 8)), RankLayout("LBNHC")),
    (RankLayout("LBHNC"), RankLayout("LBHNC", heads=(3, 4))),
    (RankLayout("2BNHD", heads=(2, 4)), RankLayout("BLHNC", 32)),
)


def measure(tokens: int, repeat: int) -> dict[str, Any]:
    """Time every pair of layouts; return figures with their unit in the key.

    Times are CPU time of the one thread that works, so that other load on the machine changes them little.
    """
    pairs = [_pair(a, b, tokens, repeat) for a, b in PAIRS]
    timed = [p["runs_ns_per_run"] for p in pairs if p["runs_ns_per_run"] is not None]
    return {
        "tokens": tokens,
        "layers": LAYERS,
        "kv_heads": HEADS,
        "worst_cold_ms": max(p["cold_ms"] for p in pairs),
        "worst_warm_ms": max(p["warm_ms"] for p in pairs),
        "worst_runs_ns_per_run": max(timed),
        "pairs": pairs,
    }


def _pair(one: RankLayout, other: RankLayout, tokens: int, repeat: int) -> dict[str, Any]:
    src, dst = one.cache(tokens), other.cache(tokens)
    rng = np.random.default_rng(0)

    def table(c: Cache) -> BlockTable:
        return BlockTable.of([rng.permutation(c.views[0].blocks)[: c.groups[0].blocks(tokens)]])

    lo, hi = max(one.heads[0], other.heads[0]), min(one.heads[1], other.heads[1])
    assignments = [ShardAssignment(i, i, v.layers, lo, hi) for i, v in enumerate(dst.views)]
    asked = [(table(src), table(dst), 0, tokens - i) for i in range(repeat)]
    cold = [_timed(lambda a=a: Planner(src, dst, assignments).plan(*a)) for a in asked]  # type: ignore[misc]
    planner = Planner(src, dst, assignments)
    made = planner.plan(*asked[0])
    warm = [_timed(lambda a=a: planner.plan(*a)) for a in asked]  # type: ignore[misc]
    few = min(tokens, max(one.block_tokens, other.block_tokens, tokens * _MAX_RUNS // made.rows))
    part = planner.plan(*asked[0][:3], few)
    runs, ns = (
        len(part.runs()),
        statistics.median(_timed(lambda: materialise(part.copies)) for _ in range(repeat)) * 1e9,
    )
    return {
        "producer": str(one),
        "consumer": str(other),
        "cold_ms": round(statistics.median(cold) * 1e3, 3),
        "warm_ms": round(statistics.median(warm) * 1e3, 3),
        "runs_ns_per_run": round(ns / runs, 2) if runs > 10_000 else None,
        "runs_timed": runs,
        "rows": made.rows,
        "copies": len(made.copies),
        "plan_bytes": _size(made),
        "kv_bytes": made.nbytes,
    }


def _timed(call: Callable[[], Any]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def _size(made: CopyPlan) -> int:
    """Return the bytes of the plan in its factored form: its segments, and its patterns with their rows."""
    return sum(3 * s.counts.nbytes + 2 * s.src_rows.nbytes for s in made.copies)


def plan(
    tokens: Annotated[int, typer.Option(min=16, help="Length of the request, in tokens.")] = 131072,
    repeat: Annotated[int, typer.Option(min=1, help="Number of rounds; the median counts.")] = 9,
    as_json: Json = False,
) -> None:
    """Time the copy plan of a long request, cold and warm, and the expansion of the plan into runs.

    Cold means a pair of caches not seen before, warm the same pair with new block ids. A layout's name lists its axes from the
    outermost in: L layer, B block, N token, H head; C stands for K and V side by side, D for one of them, and 2 for the axis that
    separates them. The number after the slash is the tokens per block.
    """
    found = measure(tokens, repeat)
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(
        f"{tables(found['pairs'])}\n\nworst pair: {found['worst_cold_ms']:.2f} ms cold, {found['worst_warm_ms']:.2f} ms warm, "
        f"{found['worst_runs_ns_per_run']:.1f} ns per run"
    )
