"""What a user may write into ``backend_options``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvxfer.settings import check_dialable, read

__all__ = ["Options"]

Seconds = Annotated[float, Meta(gt=0, le=3600)]
NonEmpty = Annotated[str, Meta(min_length=1)]

NAMING = "option {!r} of back end 'zmq'"


class Options(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What can be set.

    Attributes:
        protocol: ``tcp``, or ``ipc`` (a Unix socket) between processes of one host.
        listen: Address to bind to; peers must be able to reach it (both sides dial).
        advertise: Host name or address given to peers, if it is not ``listen``.
        port: TCP port to bind to; 0 takes any free one.
        io_threads: Threads of ZeroMQ; one moves about 4 GB/s.
        encrypt: Whether all that travels is encrypted (CurveZMQ); alike on both sides.
        connect_timeout_s: Seconds after which a peer that does not answer is unreachable.
        heartbeat_s: Seconds between signs of life; after five without one a link is dead.
    """

    protocol: Literal["tcp", "ipc"] = "tcp"
    listen: NonEmpty = "127.0.0.1"
    advertise: NonEmpty | None = None
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    io_threads: Annotated[int, Meta(ge=1, le=64)] = 1
    encrypt: bool = False
    connect_timeout_s: Seconds = 5.0
    heartbeat_s: Seconds = 2.0

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Options:
        """Read the options of a configuration.

        Raises:
            ConfigError: an option is unknown (the message names the nearest one), or a value is bad.
        """
        parsed = read(cls, options, NAMING)
        if parsed.protocol == "tcp":
            check_dialable(parsed.listen, parsed.advertise, NAMING)
        return parsed
