"""Whose handshake is next: each costs the control thread a millisecond, and a peer that asks for it has proved nothing yet.

So it is counted by host. A host may begin ``BURST`` handshakes at once, and ``A_SECOND`` more in each second. The host that has begun
fewest goes first, and a turn does only a few, so that all others wait no longer than for these.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvxfer import clock
from kvxfer.control.connection import ControlConnection
from kvxfer.protocol.peer import PeerIdentity

BURST, A_SECOND = 1024, 64
"""600 engines on one host may connect at once. After that a host may take some tenth of the control thread's time."""
IN_A_TURN = 4
"""The most steps of handshakes between two turns of everything else: some 3 ms."""
_MAX_HOSTS = 4096
"""The most hosts that are remembered. The one that has begun none for longest is forgotten, and has its burst again."""


class Handshakes:
    """Counts the handshakes of peers that dial. Used by the thread of the control sockets."""

    def __init__(self) -> None:
        self._begun: OrderedDict[PeerIdentity, tuple[float, float]] = OrderedDict()  # how many count, as of when

    def begin(self, peer: PeerIdentity) -> bool:
        """Count a handshake; return false, and count nothing, if the peer has begun too many."""
        now = clock.now()
        count = self._count(peer, now) + 1
        if count > BURST:
            return False
        self._begun[peer] = count, now
        self._begun.move_to_end(peer)
        if len(self._begun) > _MAX_HOSTS:
            self._begun.popitem(last=False)
        return True

    def next(self, waiting: Iterable[ControlConnection]) -> list[ControlConnection]:
        """Return those whose handshakes go on in this turn."""
        now = clock.now()
        return sorted(waiting, key=lambda conn: self._count(conn.peer, now))[:IN_A_TURN]

    def _count(self, peer: PeerIdentity, now: float) -> float:
        count, then = self._begun.get(peer, (0.0, now))
        return max(0.0, count - A_SECOND * (now - then))
