"""Whether strided views share bytes: the check that makes "every byte is written once" true of any plan.

A piece of content at offset ``x`` within block 0 lies at ``x + b * stride`` for every block ``b``. Writing offsets as
``quotient * stride + remainder`` turns the piece into a rectangle, its remainders by ``blocks`` quotients, and pieces
share bytes exactly when their rectangles do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvxfer.geometry.template import merge

__all__ = ["Strided", "first_overlap"]

_MOST_SLICES = 1 << 24


@dataclass(frozen=True)
class Strided:
    """``unit`` bytes at every sum of one of ``offsets``, one step of each axis (length, stride) and a block."""

    offsets: Sequence[int]
    axes: Sequence[tuple[int, int]]
    unit: int
    block_stride: int
    blocks: int
    extent: int


def first_overlap(views: Sequence[Strided]) -> tuple[int, int] | None:
    """Two views that share bytes (or one, twice, that overlaps itself); ``None`` if there are none.

    Two things that no engine does count as overlapping though they need not: views of different block strides whose
    stretches interleave, and a single block longer than the stride that it shares with views of several blocks.
    """
    by_stride: dict[int, list[int]] = defaultdict(list)
    for i, v in enumerate(views):
        by_stride[v.block_stride].append(i)
    for step, members in by_stride.items():
        found = _same_stride([views[i] for i in members], step)
        if found is not None:
            return members[found[0]], members[found[1]]
    if len(by_stride) > 1:
        spans = sorted((o, o + v.extent, i) for i, v in enumerate(views) for o in v.offsets)
        for (_, end, i), (start, _, j) in zip(spans, spans[1:], strict=False):
            if start < end and views[i].block_stride != views[j].block_stride:
                return i, j
    return None


def _same_stride(views: Sequence[Strided], step: int) -> tuple[int, int] | None:
    if all(v.blocks == 1 for v in views):
        step = 1 << 62  # no second block to run into
    parts = []
    for i, v in enumerate(views):
        at = np.array(v.offsets, np.int64)
        for tile in merge(at, at, v.unit, [(n, s, s) for n, s in v.axes]):
            if tile.unit > step:
                return i, i
            rows = tile.rows[0]
            parts.append((rows, *(np.full(len(rows), x, np.int64) for x in (tile.unit, v.blocks, i))))
    offset, unit, blocks, owner = (np.concatenate(p) for p in zip(*parts, strict=True))
    low, high = offset // step, offset % step
    # A piece that crosses a multiple of the stride becomes two rectangles, one quotient apart.
    over = high + unit - step
    wrap = over > 0
    owner, blocks = np.append(owner, owner[wrap]), np.append(blocks, blocks[wrap])
    low = np.append(low, low[wrap] + 1)
    left, right = np.append(high, np.zeros(wrap.sum(), np.int64)), np.append(np.minimum(high + unit, step), over[wrap])
    edges = np.unique(np.append(left, right))
    a, b = np.searchsorted(edges, left), np.searchsorted(edges, right)
    count = b - a
    if int(count.sum()) > _MOST_SLICES:
        raise ValueError("the views of a group interleave in more ways than can be checked")
    piece = np.repeat(np.arange(len(a)), count)
    column = np.arange(len(piece)) - np.repeat(np.cumsum(count) - count, count) + a[piece]
    order = np.lexsort((low[piece], column))
    piece, column = piece[order], column[order]
    clash = (column[1:] == column[:-1]) & (low[piece[1:]] < low[piece[:-1]] + blocks[piece[:-1]])
    if not clash.any():
        return None
    first = int(np.argmax(clash))
    return int(owner[piece[first]]), int(owner[piece[first + 1]])
