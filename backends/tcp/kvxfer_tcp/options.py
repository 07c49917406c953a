"""What a user may write into ``backend_options``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvxfer.backend.options import ListenOptions, Period

MAX_CONNECTIONS = 64


class Options(ListenOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``backend_options`` of back end ``tcp``.

    Attributes:
        connections: TCP connections of a link for each direction in which it reads; the smaller number of both sides is used.
        connect_timeout_s: Time after which a peer that does not answer counts as unreachable. If its name has several addresses, each
            is tried for its share.
        heartbeat_s: Silence after which the kernel probes the peer's host; after five times as long without an answer the link is
            dead.
        encrypt: Whether everything on the wire is encrypted; must be the same on both sides.
    """

    backend = "tcp"

    connections: Annotated[int, Meta(ge=1, le=MAX_CONNECTIONS)] = 1
    connect_timeout_s: Period = 5.0
    heartbeat_s: Period = 2.0
    encrypt: bool = False
