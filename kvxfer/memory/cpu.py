"""Host memory, with numpy: strided copies of a segment at a time, or of many where blocks follow each other."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kvxfer.errors import KvxferError
from kvxfer.fence import Fence
from kvxfer.geometry import HOST, CopyPattern, CopyPlan, Region, StridedCopy
from kvxfer.geometry.pattern import Ints
from kvxfer.memory.checksum import Sum, logical_copies, sum_of
from kvxfer.memory.fence import Done
from kvxfer.memory.grid import Grid, grids
from kvxfer.memory.pool import in_parallel
from kvxfer.memory.space import Bytes, Checksum, Side, Space

__all__ = ["CpuSpace"]

_ALIGNMENT = 4096
_SHORT = 1024
_MANY = 500
"""Many rows below ``_SHORT`` bytes are copied as items of their size, others as rows of bytes: numpy moves an item faster
than it starts a row, but lets other threads run only while it moves more than 500 items."""


class CpuSpace(Space):
    """Host memory. Everything is done when a method returns.

    Attributes:
        pinned: Whether it is page-locked, so that a device may address it as it is.
    """

    contract = 1

    def __init__(self, regions: tuple[Region, ...], device: str = HOST, *, pinned: bool = False) -> None:
        super().__init__(regions, device)
        self.pinned = pinned
        self._bytes = [_view(r) for r in regions]
        self._grids: WeakKeyDictionary[CopyPattern, dict[Side, list[Grid]]] = WeakKeyDictionary()

    @classmethod
    def devices(cls, kind: str) -> Sequence[str]:
        return (HOST,)

    @classmethod
    def allocate(cls, nbytes: int, device: str = HOST) -> CpuSpace:
        """Allocate zeroed pages, which the system finds when each is first touched: what is never used takes no memory.

        Raises:
            KvxferError: The system does not give that much memory.
        """
        try:
            raw = np.zeros(nbytes + _ALIGNMENT, np.uint8)
        except (MemoryError, ValueError) as e:
            raise KvxferError(f"cannot allocate {nbytes} bytes of staging for {device}: {e}") from e
        skip = -raw.ctypes.data % _ALIGNMENT
        return cls((Region(raw.ctypes.data + skip, nbytes).kept_by(raw),), device)

    def gather(self, region: int, at: Ints, out: Bytes) -> None:
        out[...] = self._rows(region, out.shape[1])[at]

    def scatter(self, region: int, at: Ints, rows: Bytes) -> None:
        self._rows(region, rows.shape[1])[at] = rows

    def _rows(self, region: int, nbytes: int) -> Bytes:
        return np.lib.stride_tricks.sliding_window_view(self._bytes[region], nbytes, writeable=True)

    def pack(self, plan: CopyPlan, out: Space, at: int = 0, after: Fence | None = None) -> Fence:
        _require(after)
        self._move(plan, "source", out, at)
        return Done()

    def unpack(self, plan: CopyPlan, staged: Space, at: int = 0, after: Fence | None = None) -> Fence:
        _require(after)
        self._move(plan, "destination", staged, at)
        return Done()

    def prepare_checksum(self, plan: CopyPlan, side: Side) -> Callable[[Fence | None], Checksum]:
        logical_copies(plan)

        def begin(after: Fence | None) -> Checksum:
            _require(after)
            return Sum(sum_of(self, plan, side))

        return begin

    def bytes(self, at: int, nbytes: int) -> Bytes:
        """Return these bytes as a writable array, without a copy.

        Raises:
            ValueError: They lie in no region.
        """
        region, offset = self.locate(at, nbytes)
        return self._bytes[region][offset : offset + nbytes]

    def grids(self, pattern: CopyPattern, side: Side) -> list[Grid]:
        """Return ``grids`` of this space, remembered as long as the pattern lives."""
        sides = self._grids.setdefault(pattern, {})
        if side not in sides:
            sides[side] = grids(self, pattern, side)
        return sides[side]

    def memory(self, region: int) -> Bytes:
        """Return all of a region as a writable array."""
        return self._bytes[region]

    def _move(self, plan: CopyPlan, side: Side, packed: Space, at: int) -> None:
        if not isinstance(packed, CpuSpace):
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
                    here = np.ndarray(shape, f.item, self._bytes[f.region], f.offset + places[lo], (step, *f.strides))
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


def _form(g: Grid, pattern: CopyPattern, size: int) -> _Form:
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


def _view(r: Region) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * r.nbytes).from_address(r.address))


def _require(after: Fence | None) -> None:
    if after is not None and not after.passed():
        raise ValueError("host memory cannot wait for a fence; call again once it has passed")
