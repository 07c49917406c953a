"""What a user may write into ``backend_options``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvxfer.backend.options import ListenOptions, Period

MAX_CONNECTIONS = 64


class Options(ListenOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``backend_options`` of back end ``tcp``.

    Attributes:
        connections: The number of TCP connections of a link, in each direction in which it reads; the smaller count of both
            sides is used.
        connect_timeout_s: Seconds after which a peer that does not answer counts as unreachable. If its name has several
            addresses, each is tried for its share of them.
        heartbeat_s: Seconds of silence after which the kernel probes whether a peer's host is there; after five times as
            many without an answer, the link is dead.
        encrypt: Whether everything on the wire is encrypted; must be the same on both sides.
    """

    backend = "tcp"

    connections: Annotated[int, Meta(ge=1, le=MAX_CONNECTIONS)] = 1
    connect_timeout_s: Period = 5.0
    heartbeat_s: Period = 2.0
    encrypt: bool = False
