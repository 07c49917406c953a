"""What both sides of a link keep of it, and do alike. Used by the control thread only.

A link begins with this side's endpoint, is agreed on by hello and welcome, and is up once both back ends are connected. Each
attempt to make it has a number, by which a late result of the data thread for an earlier attempt is recognised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar, Generic, TypeVar

from kvxfer.control.connection import ControlConnection
from kvxfer.control.sockets import ControlSockets
from kvxfer.data.commands import Connect, LinkNews, MakeEndpoint, SlotMessage, SlotNews
from kvxfer.data.plane import DataPlane
from kvxfer.failures import Failure, FailureKind
from kvxfer.protocol import messages as m
from kvxfer.protocol.peer import NOBODY, PeerIdentity
from kvxfer.protocol.timers import Timers
from kvxfer.protocol.values import LinkId, LinkInfo, PartRef, Role

PEER_FRAME = 4 << 20
"""The most bytes of a frame over a link: enough for a block table of a million blocks."""

_numbers = count(1)


@dataclass
class LinkRecord:
    """One attempt to make a link."""

    id: LinkId
    backend: str
    connection: ControlConnection
    name: str  # the peer's, for operators
    number: int = field(default_factory=lambda: next(_numbers), kw_only=True)  # of the attempt to make it
    owner: PeerIdentity = field(default=NOBODY, kw_only=True)  # the peer that it counts for, if that dialled
    mine: bytes | None = field(default=None, kw_only=True)  # this side's endpoint, once there is one
    info: LinkInfo | None = field(default=None, kw_only=True)  # what was agreed on
    up: bool = field(default=False, kw_only=True)  # whether both back ends are connected
    round_trip: float | None = field(default=None, kw_only=True)  # seconds, if this side pings


@dataclass(frozen=True)
class LinkStatus:
    """A link as an operator sees it.

    Attributes:
        peer: The peer's name for operators.
        role: This agent's role on it.
        backend: The back end that it is made with, or is being made with.
        up: Whether KV can move over it.
        passed: Back ends that were tried for it and could not make it, and why.
        round_trip: Seconds from the last ping to its answer; ``None`` until one has come, and if it is the peer that pings.
        bytes_per_s: How fast KV has moved over it recently, if it is this side that moves it; 0 if that is not known.
    """

    peer: str
    role: Role
    backend: str
    up: bool
    passed: Mapping[str, str]
    round_trip: float | None
    bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Lost:
    """The loss of a link."""

    link: LinkId
    why: Failure
    again: bool = False  # whether it was up, so that dialling again may help


L = TypeVar("L", bound=LinkRecord)


class LinkTable(ABC, Generic[L]):
    """The links on which this agent has one role. A link is lost after ``silence`` seconds without a message."""

    role: ClassVar[Role]

    def __init__(self, sockets: ControlSockets, data: DataPlane, silence: float) -> None:
        self._sockets, self._data, self._silence = sockets, data, silence
        self._links: dict[LinkId, L] = {}
        self._clock: Timers[LinkId] = Timers()  # when to look after a link
        self._deaf: list[LinkId] = []  # links whose peers do not read messages

    def __contains__(self, link: LinkId) -> bool:
        return link in self._links

    def of(self, backend: str) -> list[LinkId]:
        """Return the links of a back end."""
        return [link.id for link in self._links.values() if link.backend == backend]

    def statuses(self, pace: Callable[[LinkId], float]) -> list[LinkStatus]:
        """Return how the links are now, with the ``pace`` of each.

        Any thread: a copy of the table's values is one step of the interpreter.
        """
        return [
            LinkStatus(link.name, self.role, link.backend, link.up, self._passed(link), link.round_trip, pace(link.id))
            for link in list(self._links.values())
        ]

    def send(self, link: LinkId, msg: m.Message) -> None:
        """Send a message if the link still exists; if its peer does not read messages, it is lost at the next ``tick``."""
        known = self._links.get(link)
        if known is not None and not known.connection.send(msg) and known.connection.lost is None:
            self._deaf.append(link)

    def tell(self, news: SlotNews) -> None:
        """Tell the peer what the data plane says about a slot, unless the link is being made: the slot was one of the link before."""
        known = self._links.get(news.ref.link)
        if known is not None and known.up:
            self.send(known.id, news.said)

    def heard(self, link: LinkId, msg: SlotMessage) -> None:
        """Tell the data plane what the peer says about a slot."""
        self._data.post(SlotNews(PartRef(self.role, link, msg.transfer, msg.attempt, msg.part), msg))

    def result(self, news: LinkNews, now: float) -> LinkInfo | Lost | None:
        """Process what the data thread says about a link.

        Return what was agreed on if the link is now up, or its loss; ``None`` if it is neither.
        """
        link = self._links.get(news.link)
        if link is None or link.number != news.number:
            return None
        return self._result(link, news, now)

    def tick(self, now: float) -> Iterator[Lost]:
        """Look after the links, and yield those whose peers are silent or do not read messages."""
        deaf, self._deaf = self._deaf, []
        for link in deaf:
            if link in self._links:
                yield self._lost(self._links[link], FailureKind.PEER_LOST, "it does not read the messages sent to it")
        for link in self._clock.due(now):
            lost = self._look_after(self._links[link], now)
            if lost is not None:
                yield lost

    def next_tick(self) -> float | None:
        return 0.0 if self._deaf else self._clock.next()

    def discount_stall(self, seconds: float, now: float) -> None:
        """Discount seconds up to ``now`` in which this process did not run: add them to the times at which peers were last heard."""
        for link in self._links.values():  # what has come since may have been read already
            link.connection.heard = min(link.connection.heard + seconds, now)

    def _passed(self, link: L) -> Mapping[str, str]:
        return {}

    # --- for either side -------------------------------------------------------------------------------------------

    def _begin(self, link: L) -> None:
        self._data.post(MakeEndpoint(link.id, link.number, link.backend, self.role))

    def _connect(self, link: L, theirs: bytes) -> None:
        assert link.mine is not None
        at = link.connection
        self._data.post(Connect(link.id, link.number, link.mine, theirs, at.address, at.binding, link.owner))

    @abstractmethod
    def _result(self, link: L, news: LinkNews, now: float) -> LinkInfo | Lost | None: ...

    @abstractmethod
    def _look_after(self, link: L, now: float) -> Lost | None:
        """Do what is due on a link; return its loss if it has been silent for too long."""

    @abstractmethod
    def _lost(self, link: L, kind: FailureKind, what: str) -> Lost: ...
