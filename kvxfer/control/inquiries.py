"""Inquiries that wait for the engine: bounded, with a share for each peer. Peers take turns."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field

from kvxfer import clock
from kvxfer.control.connection import ControlConnection
from kvxfer.protocol import messages as m
from kvxfer.protocol.shares import Shares, Turns

MAX_INQUIRIES = 512
"""The most inquiries that wait for the engine."""


@dataclass(frozen=True, eq=False)
class PeerInquiry:
    """An inquiry, the connection over which it came, and when."""

    message: m.Inquire
    connection: ControlConnection
    came_at: float = field(default_factory=lambda: clock.now())

    @property
    def peer(self) -> Hashable:
        """The peer that it counts for, by key and host."""
        return self.connection.peer.levels[0]

    @property
    def gone(self) -> bool:
        """Whether the peer has hung up. Any thread."""
        return self.connection.lost is not None


class Inquiries:
    """The inquiries that wait. Any thread.

    Attributes:
        hung_up: Set once some peer has hung up, whether or not it has asked anything.
    """

    def __init__(self) -> None:
        self.hung_up = False
        self._lock = threading.Lock()
        self._shares: Shares[Hashable, PeerInquiry] = Shares(MAX_INQUIRIES, "nothing")
        self._turns: Turns[Hashable, PeerInquiry] = Turns()

    def put(self, inquiry: PeerInquiry) -> bool:
        """Let an inquiry wait; return False if its peer has too many that do."""
        with self._lock:
            if self._shares.take(inquiry.peer, inquiry, 1, inquiry.connection.peer) is None:
                return False
            self._turns.add(inquiry.peer, inquiry)
            return True

    def get(self) -> PeerInquiry | None:
        """Return the next one: the oldest of the peer whose turn it is. None: no one waits."""
        with self._lock:
            inquiry = self._turns.next()
            if inquiry is not None:
                self._shares.give(inquiry.peer, inquiry)
            return inquiry

    def __bool__(self) -> bool:
        return bool(self._turns)
