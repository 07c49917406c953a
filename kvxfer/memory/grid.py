"""Division of one side of a pattern into grids of rows at even distances, for strided copies."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvxfer.geometry import CopyPattern
from kvxfer.memory.regions import Regions, Side

__all__ = ["Grid", "grids"]


@dataclass(frozen=True)
class Grid:
    """Consecutive rows of a pattern at even distances in one region."""

    region: int
    offset: int  # first byte, in the region
    shape: tuple[int, ...]  # rows along one or two axes of cells, then along the pattern's own axes
    strides: tuple[int, ...]  # bytes from row to row along each axis
    first: int  # number of the first row in the pattern's order


def grids(space: Regions, pattern: CopyPattern, side: Side) -> list[Grid]:
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
