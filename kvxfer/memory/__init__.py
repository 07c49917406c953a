"""Memory of any kind behind one interface: allocate, pack, unpack, checksum, fence. Loads torch only for devices.

``space(regions)`` is a rank's own registered cache, ``allocate`` makes more memory. Both are a ``Space``: flat offsets
over regions of one device. A packed plan is the concatenation of its copies' streams (``StridedCopy.stream``). It is
the same on both sides of a transfer: what one side packs the other can unpack, whatever their layouts and devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvxfer import arguments
from kvxfer.errors import ArgumentError, ConfigError
from kvxfer.fence import Fence
from kvxfer.geometry import HOST, Region
from kvxfer.memory.blame import SpaceError, checked_allocation, checked_fence, space_error
from kvxfer.memory.checksum import Checksum, sample
from kvxfer.memory.fence import Done
from kvxfer.memory.regions import Side
from kvxfer.memory.registry import space_for
from kvxfer.memory.space import Space

__all__ = [
    "HOST",
    "Checksum",
    "Done",
    "Fence",
    "Side",
    "Space",
    "SpaceError",
    "allocate",
    "devices_of",
    "fence",
    "sample",
    "space",
    "with_elastic",
]


def space(regions: Sequence[Region]) -> Space:
    """Return a space over memory that this process has already, which the caller keeps alive.

    Raises:
        ArgumentError: The regions are of more than one device, or of an unknown kind of device, or no memory.
        ConfigError: The space for that kind cannot be loaded.
        KvxferError: The space cannot be made.
    """
    kinds = {r.device for r in regions} or {HOST}  # a rank may hold nothing
    if len(kinds) > 1:
        raise ArgumentError(f"regions must be of one device, not of {' and '.join(sorted(kinds))}")
    (device,) = kinds
    for r in regions:
        if min(r.address, r.nbytes) <= 0:
            raise ArgumentError(f"regions must be pieces of memory: {r.nbytes} bytes at {r.address} are none")
    cls = _class(device)
    try:
        made = cls(tuple(regions), device)
    except Exception as e:
        raise space_error(cls, device, "its constructor", e) from e
    if not hasattr(made, "starts"):
        raise SpaceError(cls, device, "does not call Space.__init__ in its constructor")
    return made


def allocate(nbytes: int, device: str = HOST, *, beside: str = HOST) -> Space:
    """Allocate memory of one region, which lives as long as the space.

    Args:
        nbytes: Size in bytes.
        device: ``"cpu"``, or a kind of device and a number, as ``"cuda:0"``.
        beside: The device whose memory is packed into this one if it is the host's: such a space may want it page-locked.

    Raises:
        ArgumentError: The size is not a positive integer, or the kind of device unknown.
        ConfigError: The space for that kind cannot be loaded.
        KvxferError: The system or the device does not give that much memory, or page-locked memory cannot be had.
    """
    nbytes = arguments.integer("nbytes", nbytes, 1)
    owner = beside if device == HOST else device
    cls, call = _class(owner), "allocate_host" if device == HOST else "allocate"
    try:
        made = cls.allocate_host(nbytes) if device == HOST else cls.allocate(nbytes, device)
    except Exception as e:
        raise space_error(cls, owner, call, e) from e
    return checked_allocation(cls, owner, call, nbytes, made)


def fence(device: str) -> Fence:
    """Return a fence for what the calling thread has started on a device so far; see ``Space.fence``.

    Raises:
        KvxferError: The space cannot tell.
    """
    cls = _class(device)
    try:
        found = cls.fence(device)
    except Exception as e:
        raise space_error(cls, device, "fence", e) from e
    return checked_fence(cls, device, "fence", found)


def devices_of(kind: str) -> Sequence[str]:
    """Return the devices of a kind that this process can use; none if the kind is unknown, or its space cannot be loaded."""
    try:
        return space_for(kind).devices(kind)
    except (ArgumentError, ConfigError):
        return ()


def with_elastic(regions: Sequence[Region], declared: bool | None = None) -> tuple[Region, ...]:
    """Return regions that say whether they are elastic.

    Args:
        regions: Of this process. One that says so already stays elastic, unless ``declared`` is ``False``.
        declared: What the operator says of all; ``None``: found out where the device shows it (``Space.remaps``). Host memory does not.
    """
    return tuple(_marked(r, _found(r) if declared is None else declared) for r in regions)


def _marked(region: Region, elastic: bool) -> Region:
    """Return a region that says so; it keeps alive what the given one does (``Region.of``)."""
    if region.elastic == elastic:
        return region
    marked = replace(region, elastic=elastic)
    marked.__dict__.update(region.__dict__)
    return marked


def _found(region: Region) -> bool:
    if region.elastic:
        return True
    cls = _class(region.device)
    try:
        found = cls.remaps(region)
    except Exception as e:
        raise space_error(cls, region.device, "remaps", e) from e
    if not isinstance(found, bool):
        raise SpaceError(cls, region.device, f"returned {found!r} from remaps, which must be True or False")
    return found


def _class(device: str) -> type[Space]:
    return space_for(device.partition(":")[0])
