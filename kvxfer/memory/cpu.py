"""Host memory, with numpy: strided copies of a segment at a time, or of many where blocks follow each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kvxfer.fence import Fence
from kvxfer.geometry import HOST, CopyPattern, CopyPlan, LogicalCopy, Region, StridedCopy
from kvxfer.memory.checksum import Checksum, Sum, constants, fine, logical_copies, row_keys, spans
from kvxfer.memory.fence import Done
from kvxfer.memory.pool import in_parallel
from kvxfer.memory.regions import Bytes, Regions, Side
from kvxfer.memory.rows import Rows, best, sum_rows
from kvxfer.memory.space import HostSpace, Space, require_passed

_SHORT = 1024
_MANY = 500
"""Many rows below ``_SHORT`` bytes are copied as items of their size, others as rows of bytes: numpy moves an item faster
than it starts a row, but lets other threads run only while it moves more than 500 items."""


@dataclass(frozen=True)
class _Grid:
    """Consecutive rows of a pattern at even distances in one region."""

    region: int
    offset: int  # first byte, in the region
    shape: tuple[int, ...]  # rows along one or two axes of cells, then along the pattern's own axes
    strides: tuple[int, ...]  # bytes from row to row along each axis
    first: int  # number of the first row in the pattern's order


class CpuSpace(HostSpace):
    """Host memory. Everything is done when a method returns."""

    def __init__(self, regions: tuple[Region, ...], device: str = HOST, *, pinned: bool = False) -> None:
        super().__init__(regions, device, pinned=pinned)
        self._grids: WeakKeyDictionary[CopyPattern, dict[Side, list[_Grid]]] = WeakKeyDictionary()

    @classmethod
    def allocate_host(cls, nbytes: int) -> CpuSpace:
        return CpuSpace.allocate(nbytes)

    def pack(self, plan: CopyPlan, out: Space, at: int = 0, after: Fence | None = None) -> Fence:
        require_passed(after)
        self._move(plan, "source", out, at)
        return Done()

    def unpack(self, plan: CopyPlan, staged: Space, at: int = 0, after: Fence | None = None) -> Fence:
        require_passed(after)
        self._move(plan, "destination", staged, at)
        return Done()

    def prepare_checksum(self, plan: CopyPlan, side: Side) -> Callable[[Fence | None], Checksum]:
        parts = logical_copies(plan)

        def begin(after: Fence | None) -> Checksum:
            require_passed(after)
            best()  # even if nothing here is aligned: callers get ready by a short plan
            return Sum(sum(self._sum_in_place(part, side) for part in parts) % (1 << 64))

        return begin

    def _sum_in_place(self, part: LogicalCopy, side: Side) -> int:
        """Return the sum of the values of a logical copy's units, which are read where they lie.

        The calling thread does it alone: more threads would take cores from what moves bytes meanwhile, and would spend
        much of their time waiting for the interpreter.
        """
        (factors, length), total = constants(part.view_group), 0
        for tokens, at, first in spans(part, side):
            units, keys = fine(part.view_group, tokens), row_keys(part.view_group, tokens)
            for g in grids(self, units, side):
                # Read in the order of memory, where rows follow each other (K and V too).
                order = tuple(sorted(range(len(g.shape)), key=lambda axis: -g.strides[axis]))
                here = keys[g.first : g.first + prod(g.shape)].reshape(g.shape).transpose(order)
                strides = tuple(g.strides[axis] for axis in order)
                rows = Rows(self.memory(g.region), units.unit, at + g.offset, here.shape, strides, here, first)
                total += sum_rows(rows, factors, length)
        return total

    def grids(self, pattern: CopyPattern, side: Side) -> list[_Grid]:
        """Return ``grids`` of this space, remembered as long as the pattern lives."""
        sides = self._grids.setdefault(pattern, {})
        if side not in sides:
            sides[side] = grids(self, pattern, side)
        return sides[side]

    def _move(self, plan: CopyPlan, side: Side, packed: Space, at: int) -> None:
        if not isinstance(packed, HostSpace):
            raise ValueError("host memory is packed into host memory only")
        stream = packed.bytes(at, plan.nbytes)
        for strided in plan.copies:
            self.grids(strided.pattern, side)  # made here: the threads that share the copying only look them up
        in_parallel(plan.nbytes, lambda i, n: self._share(_shares(plan.copies, i, n), side, stream))

    def _share(self, copies: Iterator[tuple[StridedCopy, int]], side: Side, stream: Bytes) -> None:
        """Move these copies, each with the offset at which its stream begins."""
        for strided, begin in copies:
            base, pitch = (x.tolist() for x in strided.stream())
            places = (strided.src_at if side == "source" else strided.dst_at).tolist()
            forms: dict[int, list[_Form]] = {}
            for lo, hi, step in even(places, pitch):
                size = pitch[lo]
                if size not in forms:
                    forms[size] = [_form(g, strided.pattern, size) for g in self.grids(strided.pattern, side)]
                for f in forms[size]:
                    shape = (hi - lo, *f.shape)
                    here = np.ndarray(shape, f.item, self.memory(f.region), f.offset + places[lo], (step, *f.strides))
                    there = np.ndarray(shape, f.item, stream, begin + base[lo] + f.first, (f.segment, *f.packed))
                    if side == "source":
                        there[...] = here
                    else:
                        here[...] = there


def _shares(copies: Sequence[StridedCopy], i: int, n: int) -> Iterator[tuple[StridedCopy, int]]:
    """Yield the ``i``-th of ``n`` shares of the copies, by segments, with the offset of each in the stream."""
    done = 0
    for k, s in enumerate(copies):
        if len(s.counts) >= n:
            lo, hi = (len(s.counts) * j // n for j in (i, i + 1))
            before = int(s.counts[:lo].sum()) * s.pattern.unit * len(s.pattern)
            yield StridedCopy(s.pattern, s.src_at[lo:hi], s.dst_at[lo:hi], s.counts[lo:hi]), done + before
        elif k % n == i:
            yield s, done
        done += s.nbytes


@dataclass(frozen=True)
class _Form:
    """A grid with rows of a certain size: what both arrays of a copy are made of, except for the segment's place."""

    item: np.dtype[Any]
    region: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    segment: int
    packed: tuple[int, ...]


def _form(g: _Grid, pattern: CopyPattern, size: int) -> _Form:
    packed = tuple(size * prod(g.shape[i + 1 :]) for i in range(len(g.shape)))
    segment, first = size * len(pattern), size * g.first
    if size < _SHORT and prod(g.shape) > _MANY:
        return _Form(np.dtype(f"V{size}"), g.region, g.offset, g.shape, g.strides, first, segment, packed)
    shape, strides, packed = (*g.shape, size), (*g.strides, 1), (*packed, 1)
    return _Form(np.dtype(np.uint8), g.region, g.offset, shape, strides, first, segment, packed)


def even(places: list[int], counts: list[int]) -> Iterator[tuple[int, int, int]]:
    """Divide segments into ranges of equal counts at one distance.

    That distance is the smallest there is, as between blocks that follow each other. Other segments come alone.

    Yields:
        The range ``[lo, hi)`` of segments, and their distance in bytes.
    """
    steps = [b - a for a, b in pairwise(places)]
    step = min((s for s in steps if s > 0), default=0)
    lo = 0
    for hi in range(1, len(places) + 1):
        if hi == len(places) or steps[hi - 1] != step or counts[hi] != counts[lo]:
            yield lo, hi, step
            lo = hi


def grids(space: Regions, pattern: CopyPattern, side: Side) -> list[_Grid]:
    """Divide one side of a pattern into few grids.

    Cells at even distances make a grid, and so do groups of such cells at even distances (layers of K and V).
    """
    source = side == "source"
    cells = pattern.src_cells if source else pattern.dst_cells
    axes = tuple(n for n, _, _ in pattern.axes), tuple((s if source else d) for _, s, d in pattern.axes)
    rows = len(pattern) // len(cells)
    regions, at = space.of_cells(cells).tolist(), cells.tolist()
    out, lo = [], 0
    while lo < len(at):
        hi = lo + 1
        step = at[hi] - at[lo] if hi < len(at) else 0
        while hi < len(at) and regions[hi] == regions[lo] and at[hi] - at[hi - 1] == step:
            hi += 1
        begin = at[lo] - space.starts[regions[lo]]
        out.append(_Grid(regions[lo], begin, (hi - lo, *axes[0]), (step, *axes[1]), lo * rows))
        lo = hi
    return _grouped(out)


def _grouped(alone: list[_Grid]) -> list[_Grid]:
    """Join equal grids at even distances into grids with one axis more."""
    out, lo = [], 0
    while lo < len(alone):
        g, hi = alone[lo], lo + 1
        step = alone[hi].offset - g.offset if hi < len(alone) else 0
        while hi < len(alone) and (
            replace(alone[hi], offset=0, first=0) == replace(g, offset=0, first=0)
            and alone[hi].offset - alone[hi - 1].offset == step
        ):
            hi += 1
        out.append(replace(g, shape=(hi - lo, *g.shape), strides=(step, *g.strides)) if hi > lo + 1 else g)
        lo = hi
    return out
