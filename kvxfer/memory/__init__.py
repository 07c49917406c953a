"""Memory of any kind behind one interface: allocate, pack, unpack, checksum, fence. Loads torch only for CUDA.

``space(regions)`` is a rank's own registered cache, ``allocate`` makes more memory. Both are a ``Space``: flat offsets
over regions of one device. A packed plan is the concatenation of its copies' streams (``StridedCopy.stream``). It is
the same on both sides of a transfer: what one side packs the other can unpack, whatever their layouts and devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.errors import ArgumentError
from kvxfer.fence import Fence
from kvxfer.geometry import Region
from kvxfer.memory.checksum import sample
from kvxfer.memory.elastic import with_elastic
from kvxfer.memory.fence import Done, fence
from kvxfer.memory.space import Checksum, Side, Space

__all__ = ["Checksum", "Done", "Fence", "Side", "Space", "allocate", "fence", "sample", "space", "with_elastic"]


def space(regions: Sequence[Region]) -> Space:
    """Return a space over memory that this process has already, which the caller keeps alive.

    Raises:
        ArgumentError: The regions are of more than one device, or of an unknown kind of device.
    """
    kinds = {r.device for r in regions} or {"cpu"}  # a rank may hold nothing
    if len(kinds) > 1:
        raise ArgumentError(f"regions must be of one device, not of {' and '.join(sorted(kinds))}")
    (device,) = kinds
    if device == "cpu":
        from kvxfer.memory.cpu import CpuSpace

        return CpuSpace(tuple(regions))
    if device.partition(":")[0] == "cuda":
        from kvxfer.memory.cuda import CudaSpace

        return CudaSpace(tuple(regions), device)
    raise ArgumentError(f"device {device!r} is not known; known are 'cpu' and 'cuda:N'")


def allocate(nbytes: int, device: str = "cpu", *, pinned: bool = False) -> Space:
    """Allocate memory of one region, which lives as long as the space.

    Args:
        nbytes: Size in bytes.
        device: ``"cpu"`` or ``"cuda:N"``.
        pinned: Whether host memory is page-locked, so that CUDA memory can be packed into it.

    Raises:
        ArgumentError: The size is not positive, or the device unknown.
        KvxferError: The system or the device does not give so much, or pinned memory cannot be had.
    """
    if nbytes <= 0:
        raise ArgumentError(f"cannot allocate {nbytes} bytes")
    if device == "cpu" and not pinned:
        from kvxfer.memory.cpu import allocate as on_cpu

        return on_cpu(nbytes)
    if device == "cpu" or device.partition(":")[0] == "cuda":
        from kvxfer.memory.cuda import allocate as with_cuda

        return with_cuda(nbytes, device)
    raise ArgumentError(f"device {device!r} is not known; known are 'cpu' and 'cuda:N'")
