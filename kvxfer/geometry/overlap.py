"""Whether strided views share bytes: the check that makes "every byte is written once" true of any plan.

A description comes from a peer, and a few numbers in it may stand for millions of pieces, so pieces are not enumerated.
Content that repeats along an axis is *folded* instead: what lies side by side within one step of the innermost axis is
taken for one longer piece, without that axis. Once all axes are folded, blocks included, each layer is a stretch of
bytes, and comparing stretches is easy. This proves the layouts that engines use to be sound, at a cost that grows with
the number of layers alone.

Folding takes the gaps between pieces for content, so it may find no proof. Then the pieces are compared exactly, if
they are few enough: a piece at offset ``x`` within block 0 lies at ``x + b * stride`` for every block ``b``. Writing
offsets as ``quotient * stride + remainder`` turns the piece into a rectangle, its remainders by ``blocks`` quotients,
and pieces share bytes exactly when their rectangles do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from kvxfer.errors import ArgumentError
from kvxfer.geometry.pattern import CopyPattern, merge

_MAX_PIECES, _MAX_SLICES = 1 << 13, 1 << 16
"""The most pieces, and parts of their rectangles, that are compared exactly: some 10 ms and 10 MB of work."""

TOO_MANY = "the views of a group interleave in more ways than can be checked"

_Piece = tuple[int, int]
"""First byte, and the byte after the last."""
_Axes = tuple[tuple[int, int], ...]
"""(length, stride) each, the outermost first."""


@dataclass(frozen=True)
class Strided:
    """One view's bytes: ``unit`` of them at every sum of an offset, a step along each axis and a block."""

    offsets: Sequence[int]  # bytes, one for each layer
    axes: Sequence[tuple[int, int]]  # (length, stride in bytes) of each axis within a block
    unit: int  # contiguous bytes
    block_stride: int  # bytes from one block to the next
    blocks: int  # number of blocks
    extent: int  # bytes from an offset to the end of the last block's content


def first_overlap(families: Sequence[Sequence[Strided]]) -> tuple[int, int, int] | None:
    """Find two views of one family that share bytes. Views of different families may share them.

    Two layouts that no engine uses count as overlaps unless folding proves otherwise, even if they are none. They are views of
    different block strides whose stretches interleave, and a single block longer than the stride that it shares with
    views of several blocks.

    Returns:
        The family's index and the indices of two of its views (twice the same for one that overlaps itself), or
        ``None``.

    Raises:
        ArgumentError: Too many pieces would have to be compared exactly.
    """
    left = _MAX_PIECES
    for f, views in enumerate(families):
        if _apart(views):
            continue
        by_stride: dict[int, list[int]] = defaultdict(list)
        for i, v in enumerate(views):
            by_stride[v.block_stride].append(i)
        for step, members in by_stride.items():
            tiles = [(i, tile) for i in members for tile in _tiles(views[i])]
            left -= sum(len(tile) for _, tile in tiles)
            if left < 0:
                raise ArgumentError(TOO_MANY)
            found = _same_stride(views, tiles, step)
            if found is not None:
                return f, *found
        if len(by_stride) > 1:
            spans = sorted((o, o + v.extent, i) for i, v in enumerate(views) for o in v.offsets)
            for (_, end, i), (start, _, j) in zip(spans, spans[1:], strict=False):
                if start < end and views[i].block_stride != views[j].block_stride:
                    return f, i, j
    return None


def _tiles(v: Strided) -> list[CopyPattern]:
    """Return what one block of a view holds, with everything contiguous merged."""
    at = np.array(v.offsets, np.int64)
    return merge(at, at, v.unit, [(n, s, s) for n, s in v.axes])


def _apart(views: Sequence[Strided]) -> bool:
    """Return whether folding proves that no two pieces share bytes."""
    alike: dict[_Axes, list[_Piece]] = defaultdict(list)
    for v in views:
        longer = (axis for axis in (*v.axes, (v.blocks, v.block_stride)) if axis[0] > 1)
        alike[tuple(sorted(longer, key=lambda axis: -axis[1]))] += [(at, at + v.unit) for at in v.offsets]
    # The innermost axis of all is folded first, so that pieces that share an outer axis are folded along it together.
    inner = [(axes[-1][1], axes) for axes in alike if axes]
    heapify(inner)
    while inner:
        _, axes = heappop(inner)
        folded, outer = _fold(alike[axes], *axes[-1]), axes[:-1]
        if folded is None:
            return False
        if outer and outer not in alike:
            heappush(inner, (outer[-1][1], outer))
        alike[outer] += folded
    return _fold(alike[()], 1, 1 << 62) is not None


def _fold(pieces: Iterable[_Piece], n: int, stride: int) -> list[_Piece] | None:
    """Fold an axis: turn pieces that repeat ``n`` times at this stride into longer ones that do not repeat.

    Return ``None`` if repetitions may run into each other.
    """
    out: list[_Piece] = []
    first = end = -1
    for lo, hi in sorted(pieces):
        if hi - lo > stride or (out and lo < end):
            return None
        if not out or hi > first + stride:
            if out:
                out[-1] = first, end + (n - 1) * stride
            first = lo
            out.append((lo, hi))
        end = hi
    if out:
        out[-1] = first, end + (n - 1) * stride
    return out


def _same_stride(
    views: Sequence[Strided], tiles: Sequence[tuple[int, CopyPattern]], step: int
) -> tuple[int, int] | None:
    """Compare exactly the ``tiles`` of views that have this block stride, each with the index of its view.

    Return the indices of two views that share bytes, or ``None``.
    """
    if all(views[i].blocks == 1 for i, _ in tiles):
        step = 1 << 62  # no second block to run into
    parts = []
    for i, tile in tiles:
        if tile.unit > step:
            return i, i
        rows = tile.rows[0]
        parts.append((rows, *(np.full(len(rows), x, np.int64) for x in (tile.unit, views[i].blocks, i))))
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
    if int(count.sum()) > _MAX_SLICES:
        raise ArgumentError(TOO_MANY)
    piece = np.repeat(np.arange(len(a)), count)
    column = np.arange(len(piece)) - np.repeat(np.cumsum(count) - count, count) + a[piece]
    order = np.lexsort((low[piece], column))
    piece, column = piece[order], column[order]
    clash = (column[1:] == column[:-1]) & (low[piece[1:]] < low[piece[:-1]] + blocks[piece[:-1]])
    if not clash.any():
        return None
    first = int(np.argmax(clash))
    return int(owner[piece[first]]), int(owner[piece[first + 1]])
