"""What one side tells the other so that it can be reached, and how a process knows where it runs."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvxfer.backend.endpoint import EndpointBase
from kvxfer.geometry.cache import Region

__all__ = ["LINK_BYTES", "Endpoint", "Exported"]

LINK_BYTES = 16

Address = Annotated[int, Meta(gt=0, lt=1 << 62)]
Key = Annotated[bytes, Meta(min_length=16, max_length=16)]


class Exported(msgspec.Struct, frozen=True, array_like=True):
    """One memory: its number, where its key stands and what it is, address and size of each region."""

    number: Annotated[int, Meta(ge=0, lt=4096)]
    key_address: Address
    key: Key
    pieces: tuple[tuple[Address, Address], ...]

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(Region(address, nbytes) for address, nbytes in self.pieces)


class Endpoint(EndpointBase, frozen=True):
    """``host`` and ``pid_namespace`` are as in ``kvxfer.backend.host``.

    ``link`` is random: it names this end of a link and proves the right to use it. ``socket`` is the abstract Unix
    socket for copies through shared memory, or empty.
    """

    backend = "cma"
    format = 3

    host: str
    pid_namespace: int
    pid: Annotated[int, Meta(gt=0, lt=1 << 31)]
    link: Annotated[bytes, Meta(min_length=LINK_BYTES, max_length=LINK_BYTES)]
    socket: str
    memories: tuple[Exported, ...]
