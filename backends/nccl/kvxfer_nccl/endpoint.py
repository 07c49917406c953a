"""What one side tells the other so that it can be reached."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvxfer.backend.endpoint import EndpointBase, Token
from kvxfer.identity import Address

MAX_BYTES = 4096
"""Of an endpoint, and of one message."""


class Endpoint(EndpointBase, frozen=True):
    """One side of a link to be.

    ``token``: secret name of the link on this side. ``device``: which GPU. ``channels``: at most, for both sides must
    have the same. ``release``: of the library, for two releases do not understand each other. ``format``: of everything
    in this file.
    """

    backend = "nccl"
    format = 3
    most_bytes = MAX_BYTES

    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    token: Token
    device: str
    channels: Annotated[int, Meta(ge=1, le=32)]
    release: str

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host,)

    def __str__(self) -> str:
        return f"{self.agent!r} at {Address(self.host, self.port)}"
