"""Regions of one device as one flat offset space: where bytes lie, without a word on how they are touched."""

from __future__ import annotations

import bisect
from functools import cached_property
from typing import Any, Literal

import numpy as np

from kvxfer.block_table import Ints
from kvxfer.geometry import Region
from kvxfer.geometry.region import flat_starts

__all__ = ["Bytes", "Regions", "Side"]

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
