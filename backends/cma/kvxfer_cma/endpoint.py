"""What one side tells the other over the network so that the other finds it, if it is on the same host.

It is of no use anywhere else, and tells nothing of the process: where its memory lies is said over the socket only (``exported``).
"""

from __future__ import annotations

from kvxfer.backend.door import DoorName
from kvxfer.backend.endpoint import EndpointBase, Token


class Endpoint(EndpointBase, frozen=True):
    """``link``: this end of a link. ``line``: the Unix socket on which this side awaits the other end.

    ``shares``: whether this side copies through shared memory if it is asked to.
    """

    backend = "cma"
    format = 5

    link: Token
    line: DoorName
    shares: bool
