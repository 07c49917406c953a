"""Guests: connections that were dialled to this side and whose peers are not known yet. What all of them cost is bounded.

So is what is held for all other connections: messages that have not come whole, or wait to be handled or taken.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator

from kvxfer.control.connection import ControlConnection
from kvxfer.protocol.peer import largest_group

GUESTS, GUEST_BYTES = 1024, 16 << 20
"""The most guests, and the most bytes that are held for all of them."""
PEER_BYTES = 128 << 20
"""The most bytes that are held for all connections of peers that are known."""
FEW_GUESTS = 16
"""As many may stay however few descriptors are left: newcomers need one for their handshake and hello."""


class Guests:
    """The guests of one thread's control sockets, the longest silent one first."""

    def __init__(self) -> None:
        self._held: OrderedDict[ControlConnection, int] = OrderedDict()  # with the bytes that are held for each
        self._bytes = 0
        self._known: dict[ControlConnection, int] = {}  # the others for which something is held, and how much
        self._known_bytes = 0

    def __iter__(self) -> Iterator[ControlConnection]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, conn: ControlConnection) -> None:
        self.discard(conn)
        self._held[conn] = 0

    def discard(self, conn: ControlConnection) -> None:
        """No longer count a connection."""
        self._bytes -= self._held.pop(conn, 0)
        self._known_bytes -= self._known.pop(conn, 0)

    def heard(self, conn: ControlConnection) -> None:
        """Record that a guest, if it is one, has said something."""
        if conn in self._held:
            self._held.move_to_end(conn)

    def measure(self, conn: ControlConnection) -> tuple[ControlConnection, str] | None:
        """Count what is held for a connection; return the one to close, and why, if that is too much for all like it."""
        if not conn.guest:
            return self._measure_known(conn)
        self._bytes += conn.held - self._held[conn]
        self._held[conn] = conn.held
        if self._bytes <= GUEST_BYTES:
            return None
        return max(self._held, key=lambda guest: guest.held), "strangers fill too much memory"

    def _measure_known(self, conn: ControlConnection) -> tuple[ControlConnection, str] | None:
        self._known_bytes -= self._known.pop(conn, 0)
        if held := conn.held:
            self._known[conn] = held
            self._known_bytes += held
        if self._known_bytes <= PEER_BYTES:
            return None
        by_peer: Counter[Hashable] = Counter()
        for one, n in self._known.items():
            by_peer[one.peer.levels[0]] += n
        ((most, _),) = by_peer.most_common(1)
        its = [one for one in self._known if one.peer.levels[0] == most]
        why = f"unfinished messages take more than {PEER_BYTES >> 20} MiB, most of them its peer's"
        return max(its, key=self._known.__getitem__), why

    def excess(self, short: bool) -> tuple[ControlConnection, str] | None:
        """Return the guest to close for a newcomer, and why, if there are too many, or some and descriptors are ``short``."""
        if len(self._held) > GUESTS:
            return self._spare(), f"there are more than {GUESTS} connections, and it was silent for longest"
        if len(self._held) > FEW_GUESTS and short:
            return self._spare(), "this process has few descriptors left (ulimit -n), and it was silent for longest"
        return None

    def _spare(self) -> ControlConnection:
        strangers = [guest for guest in self._held if not guest.authenticated]
        proved = [guest for guest in self._held if guest.authenticated]
        crowd = strangers if 4 * len(strangers) > len(self._held) else proved
        return largest_group(crowd, lambda guest: guest.peer)[0]
