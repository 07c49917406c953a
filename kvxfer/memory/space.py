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

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import numpy as np

from kvxfer.block_table import Ints
from kvxfer.errors import KvxferError
from kvxfer.fence import Fence
from kvxfer.geometry import HOST, CopyPlan, LogicalCopy, Region, StridedCopy
from kvxfer.memory.checksum import Checksum, Sum, fine, logical_copies, spans, sum_of_packed
from kvxfer.memory.fence import Done
from kvxfer.memory.regions import Bytes, Regions, Side, row_moves

__all__ = ["SPACE_CONTRACTS", "HostSpace", "Space", "require_passed"]

SPACE_CONTRACTS = frozenset({1})
"""The contracts that a space may declare (``Space.contract``), checked when it is loaded."""

_CHUNK = 16 << 20
"""Bytes that a checksum brings to the host at once."""

_ALIGNMENT = 4096


class Space(Regions, ABC):
    """Regions of one device, and how their bytes are moved.

    Args:
        regions: The memory, of ``device``.
        device: A kind of device and its number, as ``"vault:0"``.
    """

    contract: ClassVar[int]
    """The contract that the class was written for: ``1``."""
    by_itself: bool = False
    """Whether the device computes checksums while the calling thread goes on."""

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
        return HostSpace.allocate(nbytes)

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
        require_passed(after)
        if isinstance(out, HostSpace):
            self._gather(plan, "source", out.bytes(at, plan.nbytes))
        else:
            region, offset = self._place(out, at, plan.nbytes)
            stream = np.empty(plan.nbytes, np.uint8)
            self._gather(plan, "source", stream)
            if plan.nbytes:
                out.scatter(region, np.array([offset]), stream[None])
        return Done()

    def unpack(self, plan: CopyPlan, staged: Space, at: int = 0, after: Fence | None = None) -> Fence:
        """Scatter what was packed into ``staged`` at offset ``at`` over the plan's destination side, which is here.

        Raises:
            ValueError: As ``pack`` does.
        """
        require_passed(after)
        if isinstance(staged, HostSpace):
            stream = staged.bytes(at, plan.nbytes)
        else:
            region, offset = self._place(staged, at, plan.nbytes)
            stream = np.empty(plan.nbytes, np.uint8)
            if plan.nbytes:
                staged.gather(region, np.array([offset]), stream[None])
        for move in list(row_moves(self, plan.copies, "destination")):
            if move.adjacent:
                rows = _adjacent(stream, move.packed, move.nbytes)
            else:
                rows = _windows(stream, move.nbytes)[move.packed]
            self.scatter(move.region, move.at, rows)
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
        parts = logical_copies(plan)

        def begin(after: Fence | None) -> Checksum:
            require_passed(after)
            return Sum(sum(self._sum(part, side) for part in parts) % (1 << 64))

        return begin

    def checksum(self, plan: CopyPlan, side: Side, after: Fence | None = None) -> Checksum:
        """Compute the checksum of what the plan moves, starting at once."""
        return self.prepare_checksum(plan, side)(after)

    def _gather(self, plan: CopyPlan, side: Side, stream: Bytes) -> None:
        for move in list(row_moves(self, plan.copies, side)):
            if move.adjacent:
                self.gather(move.region, move.at, _adjacent(stream, move.packed, move.nbytes))
            else:
                rows = np.empty((len(move.at), move.nbytes), np.uint8)
                self.gather(move.region, move.at, rows)
                _windows(stream, move.nbytes)[move.packed] = rows

    def _place(self, packed: Space, at: int, nbytes: int) -> tuple[int, int]:
        if packed.device != self.device:
            raise ValueError(f"memory of {self.device} is packed into the same device or into host memory only")
        return packed.locate(at, nbytes)

    def _sum(self, part: LogicalCopy, side: Side) -> int:
        """Return the sum of the values of a logical copy's units, which are brought to the host some megabytes at a time."""
        total = 0
        for tokens, at, first in spans(part, side):
            units = fine(part.view_group, tokens)
            step = max(1, _CHUNK // units.nbytes)
            for lo in range(0, len(at), step):
                here = at[lo : lo + step]
                rows = StridedCopy(units, here, here, np.ones(len(here), np.int64))
                stream = np.empty(rows.nbytes, np.uint8)
                self._gather(CopyPlan((rows,)), side, stream)
                total += sum_of_packed(stream, part.view_group, tokens, first[lo : lo + step])
        return total


class HostSpace(Space):
    """Host memory, which this process addresses: what every kind of memory can be packed into.

    Attributes:
        pinned: Whether it is page-locked, so that a device may address it as it is.
    """

    contract = 1

    def __init__(self, regions: tuple[Region, ...], device: str = HOST, *, pinned: bool = False) -> None:
        super().__init__(regions, device)
        self.pinned = pinned
        self._bytes = [np.ctypeslib.as_array((ctypes.c_uint8 * r.nbytes).from_address(r.address)) for r in regions]

    @classmethod
    def devices(cls, kind: str) -> Sequence[str]:
        return (HOST,)

    @classmethod
    def allocate(cls, nbytes: int, device: str = HOST) -> Self:
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
        out[...] = _windows(self._bytes[region], out.shape[1])[at]

    def scatter(self, region: int, at: Ints, rows: Bytes) -> None:
        _windows(self._bytes[region], rows.shape[1])[at] = rows

    def memory(self, region: int) -> Bytes:
        """Return all of a region as a writable array."""
        return self._bytes[region]

    def bytes(self, at: int, nbytes: int) -> Bytes:
        """Return these bytes as a writable array, without a copy.

        Raises:
            ValueError: They lie in no region.
        """
        region, offset = self.locate(at, nbytes)
        return self._bytes[region][offset : offset + nbytes]


def _adjacent(stream: Bytes, packed: Ints, nbytes: int) -> Bytes:
    """Return rows that follow each other in the stream, as a view of it."""
    begin = int(packed[0])
    return stream[begin : begin + len(packed) * nbytes].reshape(-1, nbytes)


def _windows(memory: Bytes, nbytes: int) -> Bytes:
    """Return all rows of ``nbytes`` that begin anywhere, as an overlapping view."""
    return np.lib.stride_tricks.sliding_window_view(memory, nbytes, writeable=True)


def require_passed(after: Fence | None) -> None:
    """Refuse to read or write memory before a fence has passed, where nothing can wait for it.

    Raises:
        ValueError: It has not passed.
    """
    if after is not None and not after.passed():
        raise ValueError("this memory cannot wait for a fence; call again once it has passed")
