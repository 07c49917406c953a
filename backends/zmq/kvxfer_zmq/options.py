"""What a user may write into ``backend_options``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvxfer.backend.options import ListenOptions, Period


class Options(ListenOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``backend_options`` of back end ``zmq``.

    Attributes:
        protocol: `tcp`, or `ipc`: a Unix socket in a private folder, for processes of one user.
        io_threads: Threads of ZeroMQ; one moves about 4 GB/s.
        encrypt: Whether everything on the wire is encrypted (CurveZMQ); must be the same on both sides.
        connect_timeout_s: Time after which a peer that does not answer counts as unreachable.
        heartbeat_s: Time between heartbeats; after five times as long without one a link is dead.
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
