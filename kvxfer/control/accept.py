"""Who may connect, how many, and who goes first where something is short: one policy for all control connections.

Connections that were dialled to this side are *guests* until their owner knows their peers. A guest may stay as long as nobody needs its
place. What all of them cost is bounded, so that strangers take nothing from peers:

| what | at most | who goes beyond that |
|---|---|---|
| connections of hosts that are not allowed | none | the newcomer |
| handshakes, if there are keys | ``BURST`` of a host, and ``A_SECOND`` more in each second | the newcomer |
| guests | ``GUESTS``; ``FEW_GUESTS`` if descriptors are short | a guest, the longest silent one |
| bytes that are held for guests | ``GUEST_BYTES`` | a guest of the host for which most is held, or the one that takes more than its share |
| bytes that are held for other connections | ``PEER_BYTES`` | likewise |
| links that consumers have dialled | ``MAX_LINKS``; as many as there are if descriptors are short | one of them (``inbound.py``) |
| connections that were dialled from here | as many as there are if descriptors are spent | the newcomer |
| those of them over which nothing has come | ``AcceptPolicy.unheard`` | the earliest |

Who goes is one of the peer that has most (``protocol/peer.py``). If there are keys, guests that have not proved one may take a
quarter of the places from those that have. So a newcomer has time for its handshake, and then takes the place of a guest that has the
key and is silent.

A handshake costs the thread a millisecond, and a peer that asks for it has proved nothing yet, so it is counted by host. The host that has
begun fewest goes first, and a turn does only a few, so that all others wait no longer than for these.
"""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress

from kvxfer import clock
from kvxfer.control.connection import ControlConnection
from kvxfer.protocol.peer import PeerIdentity, largest_group
from kvxfer.protocol.shares import Debts, Shares
from kvxfer.security import Security

GUESTS, GUEST_BYTES = 1024, 16 << 20
FEW_GUESTS = 16
"""As many may stay however few descriptors are left: newcomers need one for their handshake and hello."""
PEER_BYTES = 128 << 20
"""The bytes that are held for known peers are messages that have not come whole, or wait to be handled or taken."""
MAX_LINKS = 1024
BURST, A_SECOND = 1024, 64
"""600 engines on one host may connect at once. After that a host may take some tenth of the control thread's time."""
IN_A_TURN = 4
"""The most steps of handshakes between two turns of everything else: some 3 ms."""
_SHARE, _MIN = 8, 32
"""The part of the process's descriptors that is left to others, and the fewest that are."""
_MAX_UNHEARD = 1024
_UNLISTED = "it is not in the list of allowed peers"
_TOO_MANY = "its host has begun too many connections recently, each of which costs a handshake"

Excess = tuple[ControlConnection, str]
"""The connection to close, and why."""


class AcceptPolicy:
    """Counts the control connections of one thread, which uses it.

    Attributes:
        accepted: The number of descriptors in use from which on they are short.
        dialled: The number from which on nobody is dialled any more.
        guests: The guests, the longest silent first.
        unheard: The most connections that were dialled and over which nothing has come. Requests that name addresses can have that many
            made.
    """

    def __init__(self, security: Security) -> None:
        self._security = security
        self.guests: OrderedDict[ControlConnection, None] = OrderedDict()
        # The bytes that are held for guests, and for others.
        self._strange: Shares[ControlConnection, ControlConnection] = Shares(GUEST_BYTES, "newest")
        self._known: Shares[ControlConnection, ControlConnection] = Shares(PEER_BYTES, "newest")
        self._unheard: dict[ControlConnection, None] = {}  # the earliest first; some may have answered since
        self._handshakes: Debts[PeerIdentity] = Debts()
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if soft == resource.RLIM_INFINITY:
            soft = 1 << 30
        reserve = max(soft // _SHARE, _MIN)
        self.accepted = max(soft - reserve, soft // 2)
        self.dialled = max(soft - reserve // 2, soft // 2)
        self.unheard = min(max(soft // 4, _MIN), _MAX_UNHEARD)

    # --- newcomers -------------------------------------------------------------------------------------------------

    def refusal(self, host: str) -> str:
        """Return why a host that dials is turned away; empty: it is not, and its handshake counts."""
        if not self._security.admits(host):
            return _UNLISTED
        if self._security.keys is None:
            return ""
        peer, now = PeerIdentity(host), clock.now()
        if self._handshakes.of(peer, now) * A_SECOND + 1 > BURST:
            return _TOO_MANY
        self._handshakes.add(peer, 1 / A_SECOND, now)
        return ""

    def next(self, waiting: Iterable[ControlConnection]) -> list[ControlConnection]:
        """Return those whose handshakes go on in this turn."""
        now = clock.now()
        return sorted(waiting, key=lambda conn: self._handshakes.of(conn.peer, now))[:IN_A_TURN]

    def short_of_links(self, links: int) -> bool:
        """Return whether one of as many links has to go for a new one."""
        return links >= MAX_LINKS or self.short

    @property
    def short(self) -> bool:
        """Whether this process has few descriptors left, so that a newcomer should take the place of another."""
        return _in_use() > self.accepted

    @property
    def spent(self) -> bool:
        """Whether nobody may be dialled any more."""
        return _in_use() > self.dialled

    # --- connections -----------------------------------------------------------------------------------------------

    def guest(self, conn: ControlConnection) -> None:
        """Count a connection as a guest, which has just been heard."""
        self.discard(conn)
        self.guests[conn] = None

    def heard(self, conn: ControlConnection) -> None:
        """Record that a guest, if it is one, has said something."""
        if conn in self.guests:
            self.guests.move_to_end(conn)

    def discard(self, conn: ControlConnection) -> None:
        """No longer count a connection."""
        self.guests.pop(conn, None)
        for shares in (self._strange, self._known):
            shares.give(conn, conn)
            shares.leave(conn)

    def crowded(self) -> Excess | None:
        """Return the guest that has to go for a newcomer, if there are too many, or some and descriptors are short."""
        guests = self.guests
        if len(guests) > GUESTS:
            why = f"there are more than {GUESTS} connections, and it was silent for longest"
        elif len(guests) > FEW_GUESTS and self.short:
            why = "this process has few descriptors left (ulimit -n), and it was silent for longest"
        else:
            return None
        strangers = [conn for conn in guests if not conn.authenticated]
        proved = [conn for conn in guests if conn.authenticated]
        crowd = strangers if 4 * len(strangers) > len(guests) else proved
        return largest_group(crowd, lambda conn: conn.peer)[0], why

    def measure(self, conn: ControlConnection) -> list[Excess]:
        """Count what is held for a connection; return those that have to go if that is too much for all like it."""
        shares = self._strange if conn.guest else self._known
        shares.give(conn, conn)
        lost = shares.take(conn, conn, conn.held, conn.peer) if conn.held else []
        if lost == []:
            return []
        why = f"unfinished messages take more than {PEER_BYTES >> 20} MiB, most of them its peer's"
        if conn.guest:
            why = "strangers fill too much memory"
        return [(one, why) for one in lost or [conn]]

    def dials(self, conn: ControlConnection) -> Excess | None:
        """Count a connection that is dialled; return the one that has to go if too many are silent."""
        self._unheard[conn] = None
        if len(self._unheard) > self.unheard:
            self._unheard = {one: None for one in self._unheard if one.lost is None and not one.answered}
        if len(self._unheard) <= self.unheard:
            return None
        oldest = next(iter(self._unheard))
        del self._unheard[oldest]
        return oldest, f"{self.unheard} others were dialled since and have not answered either"


def _in_use() -> int:
    """Return how many descriptors are open, by any part of the process; 0 if the kernel does not tell."""
    with suppress(OSError):
        # Linux 6.2 and later say it as the folder's size; to count is slow where there are many.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    return 0
