"""Bytes that a load leaves as they were in the blocks it fills: after the last token, and before a window.

An engine may have to clear them. A block may still hold the bytes of an earlier request, which can read as NaN if
they were written in another precision, and attention multiplies even what it masks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvxfer.geometry.cache import Cache
from kvxfer.geometry.segments import Rows
from kvxfer.geometry.turns import TokenTurns
from kvxfer.geometry.view import View
from kvxfer.values import Ints


@dataclass(frozen=True)
class UncoveredBytes:
    """A strided set of bytes: ``unit`` of them at every sum of a place and one step along each axis."""

    places: tuple[int, ...]
    axes: tuple[tuple[int, int], ...]
    unit: int


def uncovered(cache: Cache, blocks: Rows, start: int, tokens: int) -> list[UncoveredBytes]:
    """Return the bytes of these blocks that loading the tokens ``[start, tokens)`` does not write, or may not write.

    Clear them before the load begins, not later, because the load may write some of them. Tokens before ``start``, which
    the engine has already, are not among them, and groups of states have none.

    Args:
        cache: The cache that the blocks are in.
        blocks: The load's block table, which may go on past ``tokens``.
        start: First token that is loaded.
        tokens: The token after the last.
    """
    holes: list[UncoveredBytes] = []
    for g, (group, table) in enumerate(zip(cache.groups, blocks, strict=True)):
        if group.kind == "state":
            continue
        ids, end = np.asarray(table, np.int64), len(table) * group.block_tokens
        # A producer may have given up what no token attends to any more, in blocks that are smaller than these.
        ignored = max(start, group.behind(tokens))
        views = defaultdict[TokenTurns, list[View]](list)
        for v in cache.views:
            if v.group == g:
                views[v.held].append(v)
        for held, of in views.items():
            n = group.block_tokens // held.count
            for lo, hi in ((start, ignored), (tokens, end)):
                for first, count, a, z in _stretches(ids, n, held.before(lo), held.before(hi)):
                    holes += [_hole(v, first, count, a, z) for v in of if z - a == n or v.token_stride is not None]
    return holes


def _stretches(ids: Ints, n: int, lo: int, hi: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut the tokens ``[lo, hi)`` into stretches of blocks that follow each other in memory.

    Yields:
        First block, number of blocks, and the tokens ``[a, z)`` of each of these blocks.
    """
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
    """Cut block ids wherever one does not follow the last, leaving null blocks out."""
    held = ids[ids >= 0]
    return [run for run in np.split(held, np.flatnonzero(np.diff(held) != 1) + 1) if len(run)]


def _hole(v: View, first: int, count: int, a: int, z: int) -> UncoveredBytes:
    """Return the bytes of this rank's tokens ``[a, z)`` of ``count`` blocks in all layers of a view; of whole blocks if opaque."""
    axes = [(count, v.block_stride), *v.axes((z - a) * v.held.count)]
    at = first * v.block_stride + a * (v.token_stride or 0)
    return UncoveredBytes(tuple(o + at for o in v.offsets), tuple((n, s) for n, s in axes if n > 1), v.unit)
