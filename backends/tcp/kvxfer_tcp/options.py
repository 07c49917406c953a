"""What a user may write into ``backend_options``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvxfer.backend.listening import ListenOptions, Period

__all__ = ["MOST_CONNECTIONS", "Options"]

MOST_CONNECTIONS = 64


class Options(ListenOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options, checked.

    Attributes:
        connections: TCP connections of a link in each direction in which it reads; the lesser of both sides' counts.
        connect_timeout_s: Seconds after which a peer that does not answer is unreachable.
        heartbeat_s: Seconds of silence after which the kernel asks whether a peer's host is there; after five times as
            many without an answer the link is dead.
        encrypt: Whether all that travels is encrypted; alike on both sides.
    """

    backend = "tcp"

    connections: Annotated[int, Meta(ge=1, le=MOST_CONNECTIONS)] = 1
    connect_timeout_s: Period = 5.0
    heartbeat_s: Period = 2.0
    encrypt: bool = False
