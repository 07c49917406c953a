"""The contract of a kind of memory: what kvxfer does with the memory of a device.

It says nothing of requests, peers or transports. A kind of memory is a class derived from ``Space``, found through the
entry point group ``kvxfer.spaces`` under the name of the kind (``vault`` for devices ``vault:0``, ``vault:1`` ...), and
tested by ``kvxfer conformance --space NAME``.

**What you must write** is four methods: ``devices``, ``allocate``, ``gather`` and ``scatter``. All others have defaults
made of these, which pass through host memory. Override what your device does better.

**Addresses.** Nothing but your class uses ``Region.address``, except transports that declare your kind of memory. It may be a
handle: any positive integer by which you find the memory again. ``Region.owner`` has the tensor that a region was made of.

**Threads.** An object is used by one thread at a time, but several objects may be made over the same memory, and used by
different threads at once. Class methods may be called by any thread.

**Time.** A method that touches memory may return before it is done; its fence passes when it is. Until then the caller
keeps all memory involved alive and unchanged. ``after`` is waited for on the device. Where nothing can wait there, it must have
passed, or the method raises ``ValueError``.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from kvxfer.fence import Fence
from kvxfer.geometry import CopyPlan, Region
from kvxfer.geometry.pattern import Ints
from kvxfer.geometry.region import flat_starts
from kvxfer.memory.fence import Done

__all__ = ["SPACE_CONTRACTS", "Bytes", "Checksum", "Side", "Space"]

SPACE_CONTRACTS = frozenset({1})
"""The contracts that a space may declare (``Space.contract``), checked when it is loaded."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

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
    """Regions of one device as one flat offset space, as in ``Cache.starts``.

    Args:
        regions: The memory, of ``device``.
        device: A kind of device and its number, as ``"vault:0"``.

    Attributes:
        regions: The memory.
        device: Its device.
        starts: Flat offset at which each region begins.
    """

    contract: ClassVar[int]
    """The contract that the class was written for: ``1``."""
    by_itself: bool = False
    """Whether the device computes checksums while the calling thread goes on."""

    def __init__(self, regions: tuple[Region, ...], device: str) -> None:
        self.regions, self.device = regions, device
        self.starts = flat_starts(regions)

    @classmethod
    @abstractmethod
    def devices(cls, kind: str) -> Sequence[str]:
        """Return the devices of this kind that this process can use, such as ``["vault:0"]``. Never raises."""

    @classmethod
    @abstractmethod
    def allocate(cls, nbytes: int, device: str) -> Space:
        """Allocate zeroed memory of one region, which lives as long as that region (``Region.kept_by``).

        Raises:
            KvxferError: The device does not give that much memory.
        """

    @abstractmethod
    def gather(self, region: int, at: Ints, out: Bytes) -> None:
        """Copy rows of equal length from a region into host memory, and return when that is done.

        Args:
            region: Its number.
            at: Offset of each row in the region, int64 ``[n]``. Rows may overlap.
            out: Where row i goes, ``[n, bytes of a row]``, contiguous.
        """

    @abstractmethod
    def scatter(self, region: int, at: Ints, rows: Bytes) -> None:
        """Copy rows of equal length from host memory into a region, and return when that is done.

        Args:
            region: Its number.
            at: Offset of each row in the region, int64 ``[n]``. Rows do not overlap.
            rows: The rows, ``[n, bytes of a row]``, contiguous. The caller may overwrite them as soon as this returns.
        """

    @classmethod
    def allocate_host(cls, nbytes: int) -> Space:
        """Allocate host memory into which this kind is packed: page-locked, say. By default any.

        Raises:
            KvxferError: The system does not give that much memory.
        """
        from kvxfer.memory.cpu import CpuSpace

        return CpuSpace.allocate(nbytes)

    @classmethod
    def fence(cls, device: str) -> Fence:
        """Return a fence for what the calling thread has started on a device so far. By default it has passed already."""
        return Done()

    @classmethod
    def remaps(cls, region: Region) -> bool:
        """Return whether the pages of a region may be unmapped, and others mapped in their place, while it is in use."""
        return False

    def pack(self, plan: CopyPlan, out: Space, at: int = 0, after: Fence | None = None) -> Fence:
        """Gather the plan's source side from here into ``out`` at offset ``at``, in stream order.

        ``out`` is what ``allocate`` or ``allocate_host`` of this class has made.

        Raises:
            ValueError: A row would leave its region, or the stream ``out``.
        """
        from kvxfer.memory.by_rows import pack_rows

        _require(after)
        pack_rows(self, plan, out, at)
        return Done()

    def unpack(self, plan: CopyPlan, staged: Space, at: int = 0, after: Fence | None = None) -> Fence:
        """Scatter what was packed into ``staged`` at offset ``at`` over the plan's destination side, which is here.

        Raises:
            ValueError: As ``pack`` does.
        """
        from kvxfer.memory.by_rows import unpack_rows

        _require(after)
        unpack_rows(self, plan, staged, at)
        return Done()

    def prepare_unpack(self, plan: CopyPlan, staged: Space) -> Callable[[int], Fence]:
        """Do as much of ``unpack`` as can be done before the offset is known.

        Returns:
            A function of ``at`` that does the rest, which is little. Call it at most once.

        Raises:
            ValueError: As ``unpack`` does.
        """
        return lambda at: self.unpack(plan, staged, at)

    def prepare_checksum(self, plan: CopyPlan, side: Side) -> Callable[[Fence | None], Checksum]:
        """Prepare the checksum of what the plan moves, read here on the given side; see ``kvxfer.memory.checksum``.

        Returns:
            A function that starts reading, after the fence that it is given.

        Raises:
            ValueError: The plan has no logical copies, because it is a piece.
        """
        from kvxfer.memory.by_rows import checksum_of
        from kvxfer.memory.checksum import logical_copies

        logical_copies(plan)

        def begin(after: Fence | None) -> Checksum:
            _require(after)
            return checksum_of(self, plan, side)

        return begin

    def checksum(self, plan: CopyPlan, side: Side, after: Fence | None = None) -> Checksum:
        """Compute the checksum of what the plan moves, starting at once."""
        return self.prepare_checksum(plan, side)(after)

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


def _require(after: Fence | None) -> None:
    if after is not None and not after.passed():
        raise ValueError("this memory cannot wait for a fence; call again once it has passed")
