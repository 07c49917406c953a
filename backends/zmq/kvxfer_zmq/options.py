"""What a user may write into ``backend_options``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvxfer.backend.listening import ListenOptions, Period

__all__ = ["Options"]


class Options(ListenOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What can be set.

    Attributes:
        protocol: ``tcp``, or ``ipc`` (a Unix socket) between processes of one host.
        io_threads: Threads of ZeroMQ; one moves about 4 GB/s.
        encrypt: Whether all that travels is encrypted (CurveZMQ); alike on both sides.
        connect_timeout_s: Period after which a peer that does not answer is unreachable.
        heartbeat_s: Period between signs of life; after five without one a link is dead.
    """

    backend = "zmq"

    protocol: Literal["tcp", "ipc"] = "tcp"
    io_threads: Annotated[int, Meta(ge=1, le=64)] = 1
    encrypt: bool = False
    connect_timeout_s: Period = 5.0
    heartbeat_s: Period = 2.0

    @property
    def dialled(self) -> bool:
        """Whether peers dial ``host``; over ``ipc`` they open a file."""
        return self.protocol == "tcp"
