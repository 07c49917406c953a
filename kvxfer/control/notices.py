"""What other engines' directories have told this engine, until its scheduler side takes it; bounded, with a share for each peer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import msgspec

from kvxfer.control.connection import ControlConnection
from kvxfer.control.sockets import GUEST_FRAME
from kvxfer.protocol import messages as m
from kvxfer.protocol.peer import PeerIdentity
from kvxfer.protocol.shares import Shares

MAX_NOTICES = 4 << 20
"""The most bytes of notices that wait. Beyond it, each peer has an equal share, and in it each of its connections. All closed ones of a
peer have one together."""
MAX_UNHEARD = 100_000
"""The most notices beside which the loss of a directory is still told."""
TOGETHER, TOGETHER_BYTES = 1000, GUEST_FRAME // 2
"""The most transfers in one notice, and bytes of them, with room for what else it says; more are sent in several."""


class Unheard(msgspec.Struct, frozen=True):
    """The directory at an address cannot be reached (any more): what was sent to it, and its answers, may be lost."""

    host: str
    port: int


class Answered(msgspec.Struct, frozen=True):
    """What the directory at an address has answered to an inquiry."""

    host: str
    port: int
    holding: m.InquiryAnswer


class Declined(msgspec.Struct, frozen=True):
    """These will not be fetched, as a peer says; see ``messages.Decline``."""

    peer: PeerIdentity
    transfers: tuple[m.Named, ...]
    reason: str
    answer: str

    @classmethod
    def by(cls, peer: PeerIdentity, said: m.Decline) -> Declined:
        return cls(peer, said.transfers, said.reason, said.answer)


Said = m.Renew | m.Decline | m.Begun | m.OtherContent | Answered
"""What another engine has said."""
Notice = m.Renew | Declined | m.Begun | m.OtherContent | Answered | Unheard
"""A notice about a transfer between another engine and this one."""


class NoticeBox:
    """The notices that wait. Any thread may take them; the directory's thread does the rest."""

    def __init__(self) -> None:
        self.answered = False
        self._notices: dict[int, Notice] = {}
        self._numbers = count()
        self._room: Shares[ControlConnection | PeerIdentity, int] = Shares(MAX_NOTICES, "newest")
        self._lock = threading.Lock()

    def take(self) -> list[Notice]:
        """Return all notices, and keep none."""
        with self._lock:
            out, self._notices, self.answered = list(self._notices.values()), {}, False
            self._room = Shares(MAX_NOTICES, "newest")
        return out

    def put(self, notice: Said, connection: ControlConnection, nbytes: int) -> int | None:
        """Add a notice; return how many others make room for it, or ``None`` if its peer has no room for it."""
        number, peer = next(self._numbers), connection.peer
        with self._lock:
            lost = self._room.take(connection, number, nbytes, peer)
            if lost is None:
                return None
            self._notices[number] = Declined.by(peer, notice) if isinstance(notice, m.Decline) else notice
            for other in lost:
                del self._notices[other]
            self.answered |= isinstance(notice, Answered)
        return len(lost)

    def unheard(self, host: str, port: int) -> None:
        """Add that the directory at an address cannot be reached."""
        with self._lock:
            if len(self._notices) < MAX_UNHEARD:
                self._notices[next(self._numbers)] = Unheard(host, port)

    def leave(self, connection: ControlConnection) -> None:
        """Count what a connection that is closed has sent as its peer's."""
        with self._lock:
            self._room.merge(connection, connection.peer, connection.peer)


def bundles(named: tuple[m.Named, ...]) -> Iterator[tuple[m.Named, ...]]:
    """Yield the transfers of a notice, as many together as a peer takes, which hangs up on longer ones."""
    first = nbytes = 0
    for i, one in enumerate(named):
        size = len(msgspec.msgpack.encode(one))
        if i - first == TOGETHER or nbytes + size > TOGETHER_BYTES:
            yield named[first:i]
            first, nbytes = i, 0
        nbytes += size
    if named:
        yield named[first:]
