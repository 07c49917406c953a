"""What one side tells the other so that it can be reached, and how a process knows where it runs."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
from msgspec import Meta

from kvxfer.errors import TransportError

__all__ = ["HANDLE_BYTES", "LINK_BYTES", "Allocation", "Endpoint", "Exported", "process"]

FORMAT = 1
LINK_BYTES = 16
HANDLE_BYTES = 64

Size = Annotated[int, Meta(gt=0, lt=1 << 62)]
Place = Annotated[int, Meta(ge=0, lt=1 << 62)]
Secret = Annotated[bytes, Meta(min_length=LINK_BYTES, max_length=LINK_BYTES)]


class Allocation(msgspec.Struct, frozen=True, array_like=True):
    """What the driver allocated at once, and the handle by which another process opens it."""

    handle: Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    nbytes: Size


class Exported(msgspec.Struct, frozen=True, array_like=True):
    """One memory. ``gpu``: UUID of the device that it is on. ``regions``: index of the allocation in which each region
    lies, its offset there, and its size."""

    number: Annotated[int, Meta(ge=0, lt=4096)]
    gpu: bytes
    allocations: tuple[Allocation, ...]
    regions: tuple[tuple[Place, Place, Size], ...]


class Endpoint(msgspec.Struct, frozen=True, array_like=True, tag="kvxfer-cuda-ipc"):
    """``host``: ``kvxfer.transport.host``. ``process`` is as below. ``link`` is random: it names this end of a link and proves the right to
    use it. ``socket`` is the abstract Unix socket on which the peer announces itself."""

    format: int
    agent: str
    host: str
    process: Secret
    link: Secret
    socket: str
    memories: tuple[Exported, ...]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Endpoint:
        try:
            endpoint = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise TransportError(f"this is no endpoint of the cuda_ipc back end: {e}") from None
        if endpoint.format != FORMAT:
            raise TransportError(
                f"{endpoint.agent} sent a cuda_ipc endpoint of format {endpoint.format}, this side speaks {FORMAT}; "
                "install the same release of kvxfer-cuda-ipc on both"
            )
        for memory in endpoint.memories:
            for at, offset, nbytes in memory.regions:
                if at >= len(memory.allocations) or offset + nbytes > memory.allocations[at].nbytes:
                    raise TransportError(f"{endpoint.agent} sent a region that lies outside its allocation")
        return endpoint


_process = (0, b"")


def process() -> bytes:
    """Random bytes that are this process's own, also after a fork."""
    global _process
    if _process[0] != os.getpid():
        _process = os.getpid(), os.urandom(LINK_BYTES)
    return _process[1]
