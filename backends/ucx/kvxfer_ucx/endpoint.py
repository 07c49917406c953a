"""What one side tells the other so that it can be reached."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvxfer.backend.door import DoorName
from kvxfer.backend.endpoint import EndpointBase, Token

__all__ = ["Endpoint"]


class Endpoint(EndpointBase, frozen=True):
    """An endpoint, as it travels to the peer.

    Attributes:
        address: Of the worker that waits for the peer on a network; empty if there is none. That of the other worker, for a peer of this
            host, is told over ``line`` only.
        end: Names this end of the link.
        line: Where a peer of the same host announces itself, which no other finds.
        tag: 64 random bits from which the tags of all messages to this side of the link are made. Nobody else knows them, although UCX
            takes tagged messages from every process that reaches it.
        plain: All of this side's memory is host memory.
        format: Of all that travels between two of us: endpoints, tags.
    """

    backend = "ucx"
    format = 5
    trusted = frozenset({"address"})

    address: Annotated[bytes, Meta(max_length=1 << 16)]
    end: Token
    line: DoorName
    tag: Annotated[int, Meta(ge=0)]
    plain: bool
