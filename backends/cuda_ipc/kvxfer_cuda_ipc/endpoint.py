"""What one side tells the other so that it can be reached."""

from __future__ import annotations

from typing import Annotated, Self

import msgspec
from msgspec import Meta

from kvxfer.backend.door import DoorName
from kvxfer.backend.endpoint import EndpointBase
from kvxfer.backend.liveness import LINK_BYTES
from kvxfer.errors import TransportError

HANDLE_BYTES = 64

Size = Annotated[int, Meta(gt=0, lt=1 << 62)]
Place = Annotated[int, Meta(ge=0, lt=1 << 62)]
Secret = Annotated[bytes, Meta(min_length=LINK_BYTES, max_length=LINK_BYTES)]


class Allocation(msgspec.Struct, frozen=True, array_like=True):
    """What the driver allocated at once, and the handle by which another process opens it."""

    handle: Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    nbytes: Size


class Exported(msgspec.Struct, frozen=True, array_like=True):
    """One memory.

    ``gpu``: UUID of the device that it is on. ``regions``: index of the allocation in which each region lies, its
    offset there, and its size.
    """

    number: Annotated[int, Meta(ge=0, lt=4096)]
    gpu: bytes
    allocations: tuple[Allocation, ...]
    regions: tuple[tuple[Place, Place, Size], ...]


class Endpoint(EndpointBase, frozen=True):
    """``link`` is random: it names this end of a link and proves the right to use it.

    ``socket`` is the Unix socket on which the peer announces itself, which only processes of this host can find.
    """

    backend = "cuda_ipc"
    format = 3
    trusted = frozenset({"memories"})  # a handle does not say whose memory it opens: a peer that knows it can name it

    link: Secret
    socket: DoorName
    memories: tuple[Exported, ...]

    @classmethod
    def decode(cls, data: bytes) -> Self:
        endpoint = super().decode(data)
        for memory in endpoint.memories:
            for at, offset, nbytes in memory.regions:
                if at >= len(memory.allocations) or offset + nbytes > memory.allocations[at].nbytes:
                    raise TransportError(f"{endpoint.agent} sent a region that lies outside its allocation")
        return endpoint
