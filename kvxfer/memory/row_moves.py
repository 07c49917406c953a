"""A plan as rows to gather or scatter: for each length of rows and each region, where they begin on both sides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvxfer.block_table import Ints
from kvxfer.geometry import StridedCopy
from kvxfer.memory.regions import Regions, Side


@dataclass(frozen=True)
class RowMove:
    """Rows of one length in one region."""

    region: int  # its number
    nbytes: int  # bytes of each row
    at: Ints  # where each row begins in the region, int64 ``[n]``
    packed: Ints  # where each row begins in the packed stream, rising, int64 ``[n]``

    @property
    def adjacent(self) -> bool:
        """Whether the rows follow each other in the packed stream."""
        return int(self.packed[-1] - self.packed[0]) == (len(self.packed) - 1) * self.nbytes


def row_moves(space: Regions, copies: Iterable[StridedCopy], side: Side) -> Iterator[RowMove]:
    """Yield all rows of some copies on one side, which is in ``space``.

    Raises:
        ValueError: A row would leave its region.
    """
    begin = 0
    for strided in copies:
        rows, places = (strided.src_rows, strided.src_at) if side == "source" else (strided.dst_rows, strided.dst_at)
        base, size = strided.stream()
        regions = space.of_cells(rows)
        for length in np.unique(size).tolist():
            alike = size == length
            for region in np.unique(regions).tolist():
                here = regions == region
                at = (places[alike][:, None] + (rows[here] - space.starts[region])[None, :]).ravel()
                if at.min() < 0 or at.max() + length > space.regions[region].nbytes:
                    raise ValueError("the plan leaves the regions of this space")
                packed = (base[alike][:, None] + (np.flatnonzero(here) * length)[None, :]).ravel()
                yield RowMove(region, length, at, begin + packed)
        begin += strided.nbytes
