"""What a peer gets to know of us for one link: our NIXL agent, this end of the link, and where our memory lies."""

from __future__ import annotations

import zlib
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvxfer.errors import TransportError

__all__ = ["FORMAT", "Endpoint", "Piece"]

FORMAT = 2
MOST_BYTES = 1 << 20


class Piece(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A memory: its device, and (address, bytes) of its regions."""

    device: Annotated[str, Meta(max_length=32)]
    regions: tuple[tuple[Annotated[int, Meta(ge=1, le=1 << 62)], Annotated[int, Meta(ge=1, le=1 << 48)]], ...]


class Endpoint(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``agent``: for messages to humans. ``host``: ``Reach.here``. ``end``: names this end of this link. ``memories``: by
    number, ``None`` for one that is gone. ``metadata``: what NIXL has to know of our agent."""

    format: int
    plugin: Annotated[str, Meta(max_length=64)]
    agent: Annotated[str, Meta(max_length=256)]
    host: Annotated[str, Meta(max_length=128)]
    end: Annotated[str, Meta(min_length=1, max_length=64)]
    memories: tuple[Piece | None, ...]
    metadata: bytes

    def encode(self) -> bytes:
        """With a checksum: NIXL hands parts of the metadata to UCX, which takes them on trust."""
        body = msgspec.msgpack.encode(self)
        if len(body) + 4 > MOST_BYTES:
            count = sum(len(m.regions) for m in self.memories if m is not None)
            raise TransportError(
                f"an endpoint with {count} regions takes {len(body)} bytes, more than {MOST_BYTES}; "
                "register fewer, longer regions"
            )
        return zlib.crc32(body).to_bytes(4, "big") + body

    @classmethod
    def decode(cls, data: bytes) -> Endpoint:
        """Raises ``TransportError`` for anything but what ``encode`` made."""
        if len(data) > MOST_BYTES or zlib.crc32(data[4:]).to_bytes(4, "big") != data[:4]:
            raise TransportError("these bytes are no endpoint of back end 'nixl', or were altered")
        try:
            endpoint = msgspec.msgpack.decode(data[4:], type=cls)
        except msgspec.DecodeError as e:
            raise TransportError(f"these bytes are no endpoint of back end 'nixl': {e}") from None
        if endpoint.format != FORMAT:
            raise TransportError(
                f"peer {endpoint.agent!r} makes endpoints of format {endpoint.format}, this side of {FORMAT}"
            )
        return endpoint
