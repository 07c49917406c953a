"""What can be done with memory of any kind: flat offsets over regions of one device, and operations on them."""

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
    """A checksum that is being computed.

    Attributes:
        fence: Passes when the value is known.
    """

    fence: Fence

    @property
    @abstractmethod
    def value(self) -> int:
        """The checksum, unsigned, 64 bits. Blocks until ``fence`` has passed."""


class Space(ABC):
    """Regions of one device as one flat offset space, as in ``Cache.starts``. For one thread at a time.

    A method that touches memory may return before it is done; its fence passes when it is. Until then the caller keeps
    all memory involved alive and unchanged. ``after`` is waited for on the device; on a CPU, where nothing waits, it
    must have passed.

    Attributes:
        regions: The memory.
        device: ``"cpu"`` or ``"cuda:N"``.
        starts: Flat offset at which each region begins.
        by_itself: Whether the device reads and writes while the calling thread goes on.
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
        """Bytes of all regions."""
        return sum(r.nbytes for r in self.regions)

    @abstractmethod
    def pack(self, plan: CopyPlan, out: Space, at: int = 0, after: Fence | None = None) -> Fence:
        """Gather the plan's source side from here into ``out`` at offset ``at``, in stream order."""

    @abstractmethod
    def unpack(self, plan: CopyPlan, staged: Space, at: int = 0, after: Fence | None = None) -> Fence:
        """Scatter what was packed into ``staged`` at offset ``at`` over the plan's destination side, which is here."""

    def prepare_unpack(self, plan: CopyPlan, staged: Space) -> Callable[[int], Fence]:
        """Do as much of ``unpack`` as can be done before the offset is known.

        Returns:
            A function of ``at`` that does the rest, which is little. Call it at most once.

        Raises:
            ValueError: As ``unpack`` does.
        """
        return lambda at: self.unpack(plan, staged, at)

    @abstractmethod
    def prepare_checksum(self, plan: CopyPlan, side: Side) -> Callable[[Fence | None], Checksum]:
        """Prepare the checksum of what the plan moves, read here on the given side; see ``kvxfer.memory.checksum``.

        Returns:
            A function that starts reading, after the fence that it is given.

        Raises:
            ValueError: The plan has no logical copies, since it is a piece or came over the wire.
        """

    def checksum(self, plan: CopyPlan, side: Side, after: Fence | None = None) -> Checksum:
        """Compute the checksum of what the plan moves, starting at once."""
        return self.prepare_checksum(plan, side)(after)

    def locate(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return the number of the region that holds these bytes, and their offset in it.

        Raises:
            ValueError: No region holds them all.
        """
        i = bisect.bisect_right(self.starts, offset) - 1
        if i < 0 or nbytes < 0 or offset - self.starts[i] + nbytes > self.regions[i].nbytes:
            raise ValueError(f"bytes [{offset}, {offset + nbytes}) lie in no region of the space")
        return i, offset - self.starts[i]

    def of_cells(self, cells: Ints) -> Ints:
        """Return the region of each of a pattern's cells: the one that holds block 0, and with it the whole view."""
        return np.asarray(np.searchsorted(self._starts, cells, side="right") - 1)

    @cached_property
    def _starts(self) -> Ints:
        return np.array(self.starts, np.int64)


@dataclass(frozen=True)
class Grid:
    """Consecutive rows of a pattern at even distances in one region.

    Attributes:
        region: Its number.
        offset: First byte, in the region.
        shape: Rows along one or two axes of cells, then along the pattern's own axes.
        strides: Bytes from row to row along each axis.
        first: Number of the first row in the pattern's order.
    """

    region: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int


def grids(space: Space, pattern: CopyPattern, side: Side) -> list[Grid]:
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
        out.append(Grid(regions[lo], begin, (hi - lo, *axes[0]), (step, *axes[1]), lo * rows))
        lo = hi
    return _grouped(out)


def _grouped(alone: list[Grid]) -> list[Grid]:
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
