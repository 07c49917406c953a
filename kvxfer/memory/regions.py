"""Regions of one device as one flat offset space, and a plan as rows in it: where bytes lie, without a word on how they are touched."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from kvxfer.block_table import Ints
from kvxfer.geometry import Region, StridedCopy
from kvxfer.geometry.region import flat_starts

__all__ = ["Bytes", "Regions", "RowMove", "Side", "row_moves"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

Side = Literal["source", "destination"]


class Regions:
    """Regions of one device as one flat offset space, as in ``Cache.starts``.

    Attributes:
        regions: The memory.
        device: Its device.
        starts: Flat offset at which each region begins.
    """

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
