"""What a peer gets to know of us for one link: our NIXL agent, this end of the link, and where our memory lies."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvxfer.backend.endpoint import EndpointBase
from kvxfer.backend.liveness import LINK_BYTES

__all__ = ["Endpoint", "ExportedPiece"]


class ExportedPiece(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A memory: its device, and (address, bytes) of its regions."""

    device: Annotated[str, Meta(max_length=32)]
    regions: tuple[tuple[Annotated[int, Meta(ge=1, le=1 << 62)], Annotated[int, Meta(ge=1, le=1 << 48)]], ...]


class Endpoint(EndpointBase, frozen=True):
    """``host``: ``Reach.here``; ``within``: the network namespace.

    ``end``: random, names this end of this link; ``line``: where a peer of the same host and namespace announces
    itself. ``memories``: by number, ``None`` for one that is gone or not for this peer. ``metadata``: what NIXL has to
    know of our agent, parts of which UCX takes on trust.
    """

    backend = "nixl"
    format = 4

    agent: Annotated[str, Meta(max_length=256)]
    plugin: Annotated[str, Meta(max_length=64)]
    host: Annotated[str, Meta(max_length=128)]
    within: int
    end: Annotated[bytes, Meta(min_length=LINK_BYTES, max_length=LINK_BYTES)]
    line: Annotated[str, Meta(max_length=96)]
    memories: tuple[ExportedPiece | None, ...]
    metadata: bytes

    @property
    def name(self) -> str:
        """Its end, as greetings name it."""
        return self.end.hex()
