"""What one side tells the other so that it can be reached."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvxfer.backend import EndpointBase

__all__ = ["Endpoint"]


class Endpoint(EndpointBase, frozen=True):
    """An endpoint, as it travels to the peer.

    ``address``: of the worker that waits for the peer. ``tag``: 64 random bits from which the tags of all messages to this
    side of the link are made. Nobody else knows them, although UCX takes tagged messages from everybody who reaches it.
    ``plain``: all of this side's memory is host memory. ``format``: of all that travels between two of us: endpoints, tags.
    """

    backend = "ucx"
    format = 3
    trusted = frozenset({"address"})

    address: Annotated[bytes, Meta(min_length=1, max_length=1 << 16)]
    tag: Annotated[int, Meta(ge=0)]
    plain: bool
