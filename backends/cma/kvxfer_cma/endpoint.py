"""What one side tells the other over the network so that the other finds it, if it is on the same host.

It is of no use anywhere else, and tells nothing of the process: where its memory lies is said over the socket only (``exported``).
"""

from __future__ import annotations

from kvxfer.backend.door import DoorName
from kvxfer.backend.endpoint import EndpointBase, Token

__all__ = ["Endpoint"]


class Endpoint(EndpointBase, frozen=True):
    """``link``: this end of a link. ``line``: the Unix socket on which this side awaits the other end.

    ``socket``: the one for copies through shared memory, or ``None`` if this side makes none.
    """

    backend = "cma"
    format = 4

    link: Token
    line: DoorName
    socket: DoorName | None
