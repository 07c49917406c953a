"""What one side tells the other so that it can be reached."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvxfer.backend.endpoint import EndpointBase, Token
from kvxfer_tcp.options import MAX_CONNECTIONS

KEY_BYTES = 32
"""Of a public key."""


class Endpoint(EndpointBase, frozen=True):
    """One end of a link."""

    backend = "tcp"
    format = 2

    host: Annotated[str, Meta(min_length=1, max_length=255)]  # name or address that the peer dials
    port: Annotated[int, Meta(ge=1, le=65535)]  # the TCP port
    token: Token  # secret of this end of the link, known to its two ends only
    # the most connections that this side makes or takes in each direction
    connections: Annotated[int, Meta(ge=1, le=MAX_CONNECTIONS)]
    # numbers of the memories that the peer may read
    lends: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...], Meta(max_length=4096)]
    key: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""  # the public key of this side, if it encrypts

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host,) if self.lends else ()  # a peer that lends nothing is not dialled
