"""Patterns: the pieces of a block that are copied as a grid, with everything contiguous on both sides merged.

A pattern is a list of cells (one for each layer and plane, before merging) times up to two strided axes (heads,
tokens) times a unit of contiguous bytes. ``merge`` shortens it: an axis whose stride equals the unit on both
sides becomes part of the unit, and so do cells that follow each other on both sides. It looks only at strides and cells,
never at the rows, so the cost does not grow with heads, tokens or blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from kvxfer.values import Ints

Axis = tuple[int, int, int]
"""Length, stride in the source, stride in the destination (bytes)."""


@dataclass(frozen=True, eq=False)
class CopyPattern:
    """Cells times axes, ``unit`` contiguous bytes each. Offsets are in bytes, relative to a segment's place."""

    src_cells: Ints  # offset of each cell in the source, int64 ``[cells]``
    dst_cells: Ints  # offset of each cell in the destination, int64 ``[cells]``
    axes: tuple[Axis, ...]  # outermost first, each longer than one
    unit: int  # bytes of a row

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _length(self) -> int:
        return len(self.src_cells) * prod(n for n, _, _ in self.axes)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return len(self) * self.unit

    @cached_property
    def rows(self) -> tuple[Ints, Ints]:
        """Source and destination offset of every row, int64 ``[rows]``, in the order of cells, then axes."""
        src, dst = self.src_cells, self.dst_cells
        for n, s, d in self.axes:
            step = np.arange(n, dtype=np.int64)
            src = (src[:, None] + step * s).ravel()
            dst = (dst[:, None] + step * d).ravel()
        return src, dst


def merge(src: Ints, dst: Ints, unit: int, axes: Sequence[Axis]) -> list[CopyPattern]:
    """Cover pairs of cells times ``axes`` times ``unit`` bytes with patterns of as few rows as possible.

    Returns:
        More than one pattern if cells merge unevenly (some layers adjacent, others not). Cells are in the order of
        ``dst``.
    """
    order = np.argsort(dst, kind="stable")
    left = sorted((a for a in axes if a[0] > 1), key=lambda a: -a[2])
    return _merge(src[order], dst[order], unit, left)


def _merge(src: Ints, dst: Ints, unit: int, axes: list[Axis]) -> list[CopyPattern]:
    while True:
        inner = next((a for a in axes if a[1] == a[2] == unit), None)
        if inner is not None:
            unit *= inner[0]
            axes = [a for a in axes if a is not inner]
            continue
        joint = (src[1:] - src[:-1] == unit) & (dst[1:] - dst[:-1] == unit)
        if not joint.any():
            return [CopyPattern(src, dst, tuple(axes), unit)]
        first = np.flatnonzero(np.concatenate(([True], ~joint)))
        size = np.diff(first, append=len(src))
        sizes = sorted(set(size.tolist()))
        if len(sizes) > 1:
            pick = [first[size == n] for n in sizes]
            return [t for n, at in zip(sizes, pick, strict=True) for t in _merge(src[at], dst[at], unit * n, axes)]
        src, dst, unit = src[first], dst[first], unit * sizes[0]
