"""The face of memory: flat offsets over regions of one device, and what can be done with the bytes there."""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from kvxfer.fence import Fence
from kvxfer.geometry import CopyPattern, CopyPlan, Region
from kvxfer.geometry.cache import flat_starts
from kvxfer.geometry.pattern import Ints

__all__ = ["Checksum", "Grid", "Side", "Space", "grids"]

Side = Literal["source", "destination"]


class Checksum(ABC):
    """A checksum that is being computed. ``value`` may be asked for once ``fence`` has passed; before, it blocks."""

    fence: Fence

    @property
    @abstractmethod
    def value(self) -> int:
        """Unsigned, 64 bits."""


class Space(ABC):
    """Regions of one device as one flat offset space, as in ``Cache.starts``.

    ``by_itself``: the device reads and writes while the calling thread goes on.

    One thread at a time. Every method that touches memory may return before it has; its fence tells when it has, and
    until then the caller keeps all memory involved alive and unchanged. ``after`` is waited for on the device; on a
    CPU, where nothing waits, it must have passed.
    """

    by_itself = False

    def __init__(self, regions: tuple[Region, ...], device: str) -> None:
        self.regions, self.device = regions, device
        self.starts = flat_starts(regions)

    @property
    def region(self) -> Region:
        """The only region, of memory that ``allocate`` made."""
        (only,) = self.regions
        return only

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes for r in self.regions)

    @abstractmethod
    def pack(self, plan: CopyPlan, out: Space, at: int = 0, after: Fence | None = None) -> Fence:
        """Gather the plan's source side from here into ``out`` at ``at``, in stream order."""

    @abstractmethod
    def unpack(self, plan: CopyPlan, staged: Space, at: int = 0, after: Fence | None = None) -> Fence:
        """Scatter what was packed into ``staged`` at ``at`` over the plan's destination side, which is here."""

    def prepare_unpack(self, plan: CopyPlan, staged: Space) -> Callable[[int], Fence]:
        """``unpack`` in two steps: what is returned takes ``at``, is called at most once, and has little left to do.
        Raises ``ValueError`` as ``unpack`` does."""
        return lambda at: self.unpack(plan, staged, at)

    @abstractmethod
    def prepare_checksum(self, plan: CopyPlan, side: Side) -> Callable[[Fence | None], Checksum]:
        """Position-keyed hash of what the plan moves, read here, on the given side; see ``kvxfer.memory.checksum``. What is returned
        begins to read, ``after`` a fence; all that can be done before that is done. Raises ``ValueError`` for a plan without
        its parts (a piece, or one from the wire)."""

    def checksum(self, plan: CopyPlan, side: Side, after: Fence | None = None) -> Checksum:
        """``prepare_checksum``, and begin at once."""
        return self.prepare_checksum(plan, side)(after)

    def locate(self, offset: int, nbytes: int) -> tuple[int, int]:
        """(number of the region that holds these bytes, offset in it). Raises ``ValueError`` when none does."""
        i = bisect.bisect_right(self.starts, offset) - 1
        if i < 0 or nbytes < 0 or offset - self.starts[i] + nbytes > self.regions[i].nbytes:
            raise ValueError(f"bytes [{offset}, {offset + nbytes}) lie in no region of the space")
        return i, offset - self.starts[i]

    def of_cells(self, cells: Ints) -> Ints:
        """The region of each of a pattern's cells: the one that holds block 0, and with it the whole view."""
        return np.asarray(np.searchsorted(self._starts, cells, side="right") - 1)

    @cached_property
    def _starts(self) -> Ints:
        return np.array(self.starts, np.int64)


@dataclass(frozen=True)
class Grid:
    """Consecutive rows of a pattern at even distances: ``shape`` and ``strides`` (bytes) of one or two axes of cells,
    then the pattern's own, from ``offset`` in one region. ``first``: its first row in the pattern's order."""

    region: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int


def grids(space: Space, pattern: CopyPattern, side: Side) -> list[Grid]:
    """Few grids that make up one side of a pattern: cells at even distances, and groups of such cells likewise (layers
    of K and V)."""
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
        out.append(Grid(regions[lo], begin, (hi - lo, *axes[0]), (step, *axes[1]), lo * rows))
        lo = hi
    return _grouped(out)


def _grouped(alone: list[Grid]) -> list[Grid]:
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
