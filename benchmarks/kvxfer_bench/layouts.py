"""Caches by the names of their layouts, with K and V as separate planes, in bf16.

A name lists the axes from the outermost in: L layer, B block, N token, H head; C stands for K and V side by side, D for one of them,
and 2 for the axis that separates them.
"""

from __future__ import annotations

from kvxfer.geometry import Cache, Group, Heads, Region, View

HEADS, HEAD_BYTES = 8, 256
"""KV heads of a model, and the bytes of one of K, or of V: 128 values."""


def layout_cache(
    layout: str, layers: int, blocks: int, tokens: int, region: Region, heads: tuple[int, int] = (0, HEADS)
) -> Cache:
    """Describe a cache of ``blocks`` blocks of ``tokens`` tokens in one region, with the KV heads ``[lo, hi)``."""
    (lo, hi), d = heads, HEAD_BYTES
    h = hi - lo
    page = tokens * h * 2 * d
    # Bytes from one block to the next, one layer to the next, K to V, one head to the next, one token to the next.
    block, layer, v, head, token = {
        "LBNHC": (page, blocks * page, d, 2 * d, h * 2 * d),
        "LBHNC": (page, blocks * page, d, tokens * 2 * d, 2 * d),
        "BLNHC": (layers * page, page, d, 2 * d, h * 2 * d),
        "BLHNC": (layers * page, page, d, tokens * 2 * d, 2 * d),
        "2BNHD": (page // 2, blocks * page, blocks * page // 2, d, h * d),
        "B2NHD": (page, blocks * page, page // 2, d, h * d),
    }[layout]
    names = tuple(f"layer.{i}" for i in range(layers))

    def view(plane: str, at: int) -> View:
        offsets = tuple(i * layer + at for i in range(layers))
        return View(plane, 0, names, offsets, blocks, block, d, "bf16", Heads(lo, h, HEADS, head), token)

    return Cache((region,), (Group(tokens),), (view("k", 0), view("v", v)))
