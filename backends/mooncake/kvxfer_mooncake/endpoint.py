"""What a peer gets to know of us for one link: our engine, the link's cell, and where our memory lies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated

from msgspec import Meta

from kvxfer.backend import EndpointBase, Memories
from kvxfer.backend.endpoint import Token
from kvxfer.geometry.region import Region
from kvxfer.settings import bare

__all__ = ["Endpoint", "exported", "reaches_again"]

Address = Annotated[int, Meta(ge=1, lt=1 << 62)]
Nbytes = Annotated[int, Meta(ge=1, le=1 << 48)]
Regions = tuple[tuple[Address, Nbytes], ...]


class Endpoint(EndpointBase, frozen=True):
    """``engine``: where Mooncake's engine is reached.

    ``cell``: address of a token there, which says how the link is doing (see ``cells``). ``token``: of this end.
    ``memories``: regions by number, ``None`` for one that is gone or not for this peer.
    """

    backend = "mooncake"
    format = 1
    trusted = frozenset({"engine", "cell", "memories"})

    protocol: Annotated[str, Meta(max_length=16)]
    engine: Annotated[str, Meta(max_length=270)]
    cell: Address
    token: Token
    memories: tuple[Regions | None, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        return (bare(self.engine.rpartition(":")[0]),)

    def space(self) -> Memories:
        """Return the memories at the addresses that they have at the peer."""
        memories = Memories()
        for regions in self.memories:
            number = memories.add([Region(address, nbytes) for address, nbytes in regions or ()])
            if regions is None:
                memories.remove(number)
        return memories


def exported(memories: Memories, lent: Collection[int]) -> tuple[Regions | None, ...]:
    """Return the regions by number of what is lent to a peer."""
    known = [number for number in memories if number in lent]
    return tuple(
        tuple((r.address, r.nbytes) for r in memories.regions(number)) if number in known else None
        for number in range(max(known, default=-1) + 1)
    )


def reaches_again(lent: tuple[Regions | None, ...], registered: Mapping[int, Collection[Region]]) -> bool:
    """Return whether a peer reaches memory that it was not lent, by regions that it was lent and that are no longer registered."""
    gone = [region for number, regions in enumerate(lent) if number not in registered for region in regions or ()]
    return bool(gone) and any(
        address < r.address + r.nbytes and r.address < address + nbytes
        for address, nbytes in gone
        for number, regions in registered.items()
        if number >= len(lent) or lent[number] is None
        for r in regions
    )
