"""What a user may write into ``backend_options``."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from kvxfer.errors import ConfigError

__all__ = ["Options"]

Seconds = Annotated[float, Meta(gt=0, le=3600)]
NonEmpty = Annotated[str, Meta(min_length=1)]

WILDCARDS = frozenset({"0.0.0.0", "::", "*"})


class Options(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Attributes:
    protocol: ``tcp``, or ``ipc`` (a Unix socket) between processes of one host.
    listen: address to bind to; peers must be able to reach it (both sides dial).
    advertise: host name or address given to peers, if it is not ``listen``.
    port: TCP port to bind to; 0 takes any free one.
    io_threads: threads of ZeroMQ; one moves about 4 GB/s.
    connect_timeout_s: seconds after which a peer that does not answer is unreachable.
    heartbeat_s: seconds between signs of life; after five without one a link is dead.
    """

    protocol: Literal["tcp", "ipc"] = "tcp"
    listen: NonEmpty = "127.0.0.1"
    advertise: NonEmpty | None = None
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    io_threads: Annotated[int, Meta(ge=1, le=64)] = 1
    connect_timeout_s: Seconds = 5.0
    heartbeat_s: Seconds = 2.0

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Options:
        """Raises ``ConfigError`` for an unknown option (naming the nearest one) and for a bad value."""
        for key in options:
            if key not in cls.__struct_fields__:
                near = get_close_matches(str(key), cls.__struct_fields__, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(cls.__struct_fields__)}"
                raise ConfigError(f"unknown option {key!r} of back end 'zmq': {hint}")
        try:
            parsed = msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as e:
            raise ConfigError(f"bad option of back end 'zmq': {e}") from None
        if parsed.protocol == "tcp" and parsed.listen in WILDCARDS and parsed.advertise is None:
            raise ConfigError(
                f"back end 'zmq' listens on {parsed.listen!r}, which is no address that a peer could dial; "
                "set the option 'advertise' to this host's name or address"
            )
        return parsed
