"""What one side tells the other so that it can be reached."""

from __future__ import annotations

import secrets
from typing import Annotated

from msgspec import Meta

from kvxfer.backend import EndpointBase

__all__ = ["TOKEN_BYTES", "Endpoint", "new_token"]

TOKEN_BYTES = 16
KEY_BYTES = 40
"""Of a public key as ZeroMQ writes it (Z85)."""


class Endpoint(EndpointBase, frozen=True):
    """One end of a link. ``token`` is known to the two ends only; ``key`` is the end's public key, if it encrypts."""

    backend = "zmq"
    format = 4

    address: Annotated[str, Meta(pattern="^(tcp|ipc)://")]
    token: Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    key: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""


def new_token() -> bytes:
    """Return a new secret name of a link's end."""
    return secrets.token_bytes(TOKEN_BYTES)
