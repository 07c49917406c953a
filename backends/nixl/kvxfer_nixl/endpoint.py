"""What a peer gets to know of us for one link: our NIXL agent, this end of the link, and where our memory lies."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvxfer.backend.door import DoorName
from kvxfer.backend.endpoint import EndpointBase, Token


class ExportedPiece(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A memory: its device, and (address, bytes) of its regions."""

    device: Annotated[str, Meta(min_length=1, max_length=32)]
    regions: tuple[tuple[Annotated[int, Meta(ge=1, le=1 << 62)], Annotated[int, Meta(ge=1, le=1 << 48)]], ...]


class Endpoint(EndpointBase, frozen=True):
    """``end``: names this end of this link; ``line``: where a peer of the same host announces itself, which no other finds.

    ``memories``: by number, ``None`` for one that is gone or not for this peer. ``metadata``: what NIXL has to know of our agent that
    serves peers on a network, parts of which UCX takes on trust; empty if there is none. Those of the other agent, for a peer of this
    host, are told over ``line`` only.
    """

    backend = "nixl"
    format = 6
    trusted = frozenset({"metadata"})

    agent: Annotated[str, Meta(max_length=256)]
    plugin: Annotated[str, Meta(max_length=64)]
    end: Token
    line: DoorName
    memories: tuple[ExportedPiece | None, ...]
    metadata: bytes

    @property
    def name(self) -> str:
        """Its end, as greetings name it."""
        return self.end.hex()
