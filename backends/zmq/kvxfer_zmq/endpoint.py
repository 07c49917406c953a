"""What one side tells the other so that it can be reached."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvxfer.backend.endpoint import EndpointBase, Token

KEY_BYTES = 40
"""Of a public key as ZeroMQ writes it (Z85)."""


class Endpoint(EndpointBase, frozen=True):
    """One end of a link. ``token`` is known to the two ends only; ``key`` is the end's public key, if it encrypts."""

    backend = "zmq"
    format = 4

    address: Annotated[str, Meta(pattern="^tcp://[^;/]+$|^ipc://.+/kvxfer-zmq-[^/]+/inbox$")]
    token: Token
    key: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""

    @property
    def hosts(self) -> tuple[str, ...]:
        where = self.address.removeprefix("tcp://")
        return () if where == self.address else (where.rpartition(":")[0],)
