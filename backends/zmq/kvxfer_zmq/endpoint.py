"""What one side tells the other so that it can be reached."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvxfer.backend.endpoint import EndpointBase, Token
from kvxfer.backend.names import numeric

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
    def named(self) -> tuple[str, int] | None:
        """The host and port of an address whose host has to be looked up; ``None`` for others."""
        where, _, port = self.address.removeprefix("tcp://").rpartition(":")
        if not self.hosts or not port.isdecimal() or numeric(where.strip("[]"), int(port)) is not None:
            return None
        return where, int(port)

    @property
    def hosts(self) -> tuple[str, ...]:
        where = self.address.removeprefix("tcp://")
        return () if where == self.address else (where.rpartition(":")[0],)
