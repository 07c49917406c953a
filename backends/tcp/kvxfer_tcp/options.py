"""What a user may write into ``backend_options``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from kvxfer.settings import check_dialable, read

__all__ = ["MOST_CONNECTIONS", "Options"]

Seconds = Annotated[float, Meta(gt=0, le=3600)]
NonEmpty = Annotated[str, Meta(min_length=1)]

MOST_CONNECTIONS = 64

NAMING = "option {!r} of back end 'tcp'"


class Options(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options, checked.

    Attributes:
        listen: address to bind to; peers that read from this side must be able to reach it.
        advertise: host name or address given to peers, if it is not ``listen``.
        port: TCP port to bind to; 0 takes any free one.
        connections: TCP connections of a link in each direction in which it reads; the lesser of both sides' counts.
        connect_timeout_s: seconds after which a peer that does not answer is unreachable.
        heartbeat_s: seconds of silence after which the kernel asks whether a peer's host is there; after five times as
            many without an answer the link is dead.
    """

    listen: NonEmpty = "127.0.0.1"
    advertise: NonEmpty | None = None
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    connections: Annotated[int, Meta(ge=1, le=MOST_CONNECTIONS)] = 1
    connect_timeout_s: Seconds = 5.0
    heartbeat_s: Seconds = 2.0

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Options:
        """Return the options that a user has set.

        Raises:
            ConfigError: one is unknown (the nearest one is named) or has a bad value.
        """
        parsed = read(cls, options, NAMING)
        check_dialable(parsed.listen, parsed.advertise, NAMING)
        return parsed
