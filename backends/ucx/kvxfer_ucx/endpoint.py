"""What one side tells the other so that it can be reached."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvxfer.backend.door import DoorName
from kvxfer.backend.endpoint import EndpointBase, Token


class Endpoint(EndpointBase, frozen=True):
    """An endpoint, as it travels to the peer."""

    backend = "ucx"
    format = 5  # of all that travels between two of us: endpoints, tags
    trusted = frozenset({"address"})

    # of the worker that waits for the peer on a network; empty if there is none. That of the other worker, for a peer
    # of this host, is told over ``line`` only
    address: Annotated[bytes, Meta(max_length=1 << 16)]
    end: Token  # names this end of the link
    line: DoorName  # where a peer of the same host announces itself, which no other finds
    # 64 random bits from which the tags of all messages to this side of the link are made. Nobody else knows them,
    # although UCX takes tagged messages from every process that reaches it
    tag: Annotated[int, Meta(ge=0)]
    plain: bool  # all of this side's memory is host memory
