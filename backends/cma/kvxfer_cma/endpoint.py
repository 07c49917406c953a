"""What one side tells the other so that it can be reached, and how a process knows where it runs."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvxfer.errors import TransportError
from kvxfer.geometry.cache import Region

__all__ = ["LINK_BYTES", "Endpoint", "Exported"]

FORMAT = 1
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


class Endpoint(msgspec.Struct, frozen=True, array_like=True, tag="kvxfer-cma"):
    """``host`` and ``pid_namespace`` are as in ``kvxfer.transport.host``. ``link`` is random: it names this end of a link and proves
    the right to use it. ``socket`` is the abstract Unix socket for copies through shared memory, or empty."""

    format: int
    agent: str
    host: str
    pid_namespace: int
    pid: Annotated[int, Meta(gt=0, lt=1 << 31)]
    link: Annotated[bytes, Meta(min_length=LINK_BYTES, max_length=LINK_BYTES)]
    socket: str
    memories: tuple[Exported, ...]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Endpoint:
        try:
            endpoint = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise TransportError(f"this is no endpoint of the cma back end: {e}") from None
        if endpoint.format != FORMAT:
            raise TransportError(
                f"{endpoint.agent} sent a cma endpoint of format {endpoint.format}, this side speaks "
                f"{FORMAT}; install the same release of kvxfer-cma on both"
            )
        return endpoint
