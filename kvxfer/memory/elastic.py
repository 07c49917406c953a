"""Elastic memory: whose pages may be unmapped, and others mapped in their place, while it is in use."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvxfer.geometry import Region
from kvxfer.memory.blame import SpaceError, space_error
from kvxfer.memory.registry import space_for

__all__ = ["with_elastic"]


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
    cls = space_for(region.kind)
    try:
        found = cls.remaps(region)
    except Exception as e:
        raise space_error(cls, region.device, "remaps", e) from e
    if not isinstance(found, bool):
        raise SpaceError(cls, region.device, f"returned {found!r} from remaps, which must be True or False")
    return found
