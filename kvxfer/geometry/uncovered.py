"""What a load does not write of the blocks that it fills: the end of the last one, and in a window its beginning.

An engine may have to clear that: a block that was another request's holds its bytes, which under another precision may be
NaN, and attention multiplies even what it masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvxfer.geometry.cache import Cache, View
from kvxfer.geometry.segments import Rows
from kvxfer.values import Ints

__all__ = ["UncoveredBytes", "uncovered"]


@dataclass(frozen=True)
class UncoveredBytes:
    """``unit`` bytes at every sum of one of ``places``, flat offsets, and one step of each of ``axes`` (length, stride)."""

    places: tuple[int, ...]
    axes: tuple[tuple[int, int], ...]
    unit: int


def uncovered(cache: Cache, blocks: Rows, start: int, tokens: int) -> list[UncoveredBytes]:
    """The bytes of these blocks that loading the tokens ``[start, tokens)`` leaves as they are, or may: nothing must be
    cleared there once the load has begun. Tokens before ``start``, which the engine has already, are not among them, nor is
    anything in groups of states.

    Args:
        blocks: the load's block table, which may go on past ``tokens``.
    """
    holes: list[UncoveredBytes] = []
    for g, (group, table) in enumerate(zip(cache.groups, blocks, strict=True)):
        if group.kind == "state":
            continue
        ids, n = np.asarray(table, np.int64), group.block_tokens
        # A producer may have given up what no token attends to any more, in blocks that are smaller than ours.
        ignored = max(start, tokens - group.window + 1) if group.window else start
        views = [v for v in cache.views if v.group == g]
        for lo, hi in ((start, ignored), (tokens, len(ids) * n)):
            for first, count, a, z in _stretches(ids, n, lo, hi):
                holes += [_hole(v, first, count, a, z) for v in views if z - a == n or v.token_stride is not None]
    return holes


def _stretches(ids: Ints, n: int, lo: int, hi: int) -> Iterator[tuple[int, int, int, int]]:
    """The tokens ``[lo, hi)`` as (first block, number of blocks that follow each other in memory, tokens ``[a, z)`` of each)."""
    if lo >= hi:
        return
    whole = range(-(-lo // n), hi // n)
    if lo % n:
        position = lo // n
        yield from _partial(ids, position, lo % n, min(n, hi - position * n))
    for run in _runs(ids[whole.start : whole.stop]):
        yield int(run[0]), len(run), 0, n
    if hi % n and hi // n >= whole.start:
        yield from _partial(ids, hi // n, 0, hi % n)


def _partial(ids: Ints, position: int, a: int, z: int) -> Iterator[tuple[int, int, int, int]]:
    if ids[position] >= 0:
        yield int(ids[position]), 1, a, z


def _runs(ids: Ints) -> list[Ints]:
    """Block ids cut wherever one does not follow the last; null blocks left out."""
    held = ids[ids >= 0]
    return [run for run in np.split(held, np.flatnonzero(np.diff(held) != 1) + 1) if len(run)]


def _hole(v: View, first: int, count: int, a: int, z: int) -> UncoveredBytes:
    """Tokens ``[a, z)`` of ``count`` blocks in all layers of a view; of a view whose tokens are opaque the whole blocks."""
    axes = [(count, v.block_stride), *v.axes(z - a)]
    at = first * v.block_stride + a * (v.token_stride or 0)
    return UncoveredBytes(tuple(o + at for o in v.offsets), tuple((n, s) for n, s in axes if n > 1), v.unit)
