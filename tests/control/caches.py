"""The cache of a small engine. Apart from what needs pytest, since processes of their own need this alone."""

from __future__ import annotations

import numpy as np

from kvxfer.geometry import Cache, Group, Heads, Rank, Region, View

__all__ = ["HEADS", "LAYERS", "TOKENS", "UNIT", "make_cache"]

LAYERS = tuple(f"layer.{i}" for i in range(3))
TOKENS, HEADS, UNIT = 4, 4, 16


def make_cache(memory: np.ndarray, tp: int, rank: int, blocks: int) -> Cache:
    heads = HEADS // tp
    page = heads * TOKENS * UNIT
    view = View(
        "kv",
        0,
        LAYERS,
        tuple(i * blocks * page for i in range(len(LAYERS))),
        blocks,
        page,
        UNIT,
        "test",
        Heads(rank * heads, heads, HEADS, TOKENS * UNIT),
        UNIT,
    )
    return Cache((Region(memory.ctypes.data, memory.nbytes),), (Group(TOKENS),), (view,), Rank(0, rank))
