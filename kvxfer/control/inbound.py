"""The links that consumers dial to this agent: from the hello, which is examined and answered, to their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from kvxfer.control.connection import ControlConnection
from kvxfer.control.link import PEER_FRAME, LinkRecord, LinkTable, Lost
from kvxfer.control.sockets import ControlSockets
from kvxfer.data.commands import Disconnect, EndpointMade, LinkNews
from kvxfer.data.plane import DataPlane
from kvxfer.data.policy import check_facts
from kvxfer.errors import PeerError
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Planner
from kvxfer.protocol import messages as m
from kvxfer.protocol.peer import largest_group
from kvxfer.protocol.shares import Turns
from kvxfer.protocol.values import LinkId, LinkInfo, Role

K = FailureKind

NO_DIRECTORY = "this is the port of a worker, not of its engine's directory"
MAX_NAME = 100
"""The most characters of an engine's name."""


@dataclass
class _Dialled(LinkRecord):
    """A link that a consumer has dialled."""

    hello: m.Hello  # the consumer's hello
    asked: float  # when the consumer last asked for something; at first, when the hello came
    planner: Planner | None = None  # plans the copies; ``None`` until the hello has been admitted


class Inbound(LinkTable[_Dialled]):
    """The links that consumers have dialled to this agent, by the names of their connections.

    Hellos are examined one after the other, with hosts taking turns; those that wait stay in their connections, where the
    memory for strangers is bounded. ``examine`` checks a hello off the control thread, and has the result passed to
    ``examined``. ``invite`` returns where a consumer finds the revocation counter. A link is lost after ``silence`` seconds
    without a message.
    """

    role: ClassVar[Role] = "producer"

    def __init__(
        self,
        sockets: ControlSockets,
        data: DataPlane,
        silence: float,
        epoch: int,
        invite: Callable[[], str],
        examine: Callable[[LinkId, m.Hello], bool],
        serving: Callable[[LinkId], bool],
    ) -> None:
        super().__init__(sockets, data, silence)
        self._epoch, self._invite, self._examine, self._serving = epoch, invite, examine, serving
        self._turn: ControlConnection | None = None  # the stranger whose hello is being handled
        self._turns: Turns[str, ControlConnection] = Turns()

    def receive(self, connection: ControlConnection, frame: bytes, now: float) -> tuple[LinkId, m.ToProducer] | None:
        """Handle a frame.

        Returns:
            A message for the producer's machine, with its link; ``None`` if it is not for that.

        Raises:
            PeerError: It makes no sense here. The sender has been told so if it might be a consumer of another version.
        """
        known = self._links.get(connection.name)
        if known is not None:
            return self._message(connection, known, frame, now)
        if self._turn not in (None, connection):
            self._sockets.put_back(connection, frame)
            self._turns.add(connection.host, connection)
            return None
        self._turn = connection
        try:
            return self._message(connection, None, frame, now)
        finally:
            if connection.name not in self._links:
                self._next_turn()

    def _next_turn(self) -> None:
        """Handle the next stranger that has sent something and can be answered."""
        self._turn = None
        while self._turn is None and (connection := self._turns.next()) is not None:
            if self._sockets.go_on(connection):
                self._turn = connection

    def _message(
        self, connection: ControlConnection, known: _Dialled | None, frame: bytes, now: float
    ) -> tuple[LinkId, m.ToProducer] | None:
        link = connection.name
        who = f"a stranger at {connection.host}" if known is None else known.name
        try:
            msg = m.decode(frame)
        except PeerError as e:
            if known is None:
                old = Failure(K.INCOMPATIBLE, f"not understood by kvxfer protocol {m.PROTOCOL}")
                _refuse(connection, old, again=False)
                self._sockets.finish(connection)
            raise PeerError(f"{who}: {e}", kind=e.kind) from None
        match msg:
            case m.FetchRequest() | m.CommitRequest() | m.Committed() | m.CloseAttempt() if (
                known is not None and known.up
            ):
                if isinstance(msg, m.FetchRequest):
                    known.asked = now
                return link, msg
            case m.Hello() if known is None:
                name = f"{msg.engine[:MAX_NAME]} at {connection.host}"
                owner = msgspec.structs.replace(connection.peer, engine=msg.engine[:MAX_NAME])
                self._links[link] = _Dialled(link, msg.backend, connection, name, msg, now, owner=owner)
                self._clock.set(link, now + self._silence)
                if not self._examine(link, msg):
                    self.examined(link, Failure(K.OVERLOADED, "it cannot examine your hello now"))
            case m.Ping() if known is not None:
                self.send(link, m.Pong(msg.number))
            case m.SlotReady() | m.SlotFree() if known is not None and known.up:
                self.heard(link, msg)
            case (
                m.FetchRequest()
                | m.CommitRequest()
                | m.Committed()
                | m.CloseAttempt()
                | m.SlotReady()
                | m.SlotFree()
                | m.Ping()
            ) if known is None:
                _refuse(connection, Failure(K.PEER_LOST, "this link is not known here (any more)"), again=True)
            case _:
                if isinstance(msg, m.Lookup | m.Explain) and known is None:
                    _refuse(connection, Failure(K.PEER_UNREACHABLE, NO_DIRECTORY), again=False)
                raise PeerError(f"{who}: a {type(msg).__name__} makes no sense here", kind=K.MISUSE)
        return None

    def examined(self, link: LinkId, found: Planner | Failure) -> Lost | None:
        """Process the result of examining a link's hello; return the link that was given up for it, if any.

        Raises:
            PeerError: It is refused; for the log.
        """
        try:
            known = self._links.get(link)
            return None if known is None else self._examined(known, found)
        finally:
            self._next_turn()

    def _examined(self, known: _Dialled, found: Planner | Failure) -> Lost | None:
        try:
            lost = None if isinstance(found, Failure) else self._make_room(known)
        except PeerError as e:
            found = Failure.of(e)
        if isinstance(found, Failure):
            self._forget(known.id)
            _refuse(known.connection, found, again=False)
            self._sockets.finish(known.connection)
            who = f"{known.hello.engine[:MAX_NAME]!r} at {known.connection.host}"
            raise PeerError(f"refused a link from {who}: {found.detail}", kind=found.kind)
        known.planner = found
        self._sockets.keep(known.connection, PEER_FRAME)
        self._begin(known)
        return lost

    def _make_room(self, new: _Dialled) -> Lost | None:
        """If there are as many links as allowed, or descriptors are short, give up one of the peer that has most.

        One over which nothing moves goes first, and of those the one that was last used longest ago. Its consumer dials again
        when it wants something. If something moves over each, the peer that has most loses one, unless the
        newcomer has as many.

        Raises:
            PeerError: Something moves over each of them, and nobody has more than the newcomer.
        """
        made = [link for link in self._links.values() if link.planner is not None]
        if not made or not self._sockets.policy.short_of_links(len(made)):
            return None
        made.sort(key=lambda link: link.asked)
        idle = [link for link in made if link.up and not self._serving(link.id)]
        spare = largest_group(idle or made, lambda link: link.owner)
        if not idle and len(spare) <= sum(link.owner == new.owner for link in made) + 1:
            raise PeerError(f"{len(made)} links are open already, all of them in use", kind=K.OVERLOADED)
        why = f"of {len(made)} links it was one of the peer that has most"
        if idle:
            why = f"of {len(made)} links it was not in use"
        return self.close(spare[0].id, Failure(K.OVERLOADED, why, spare[0].name))

    def _result(self, link: _Dialled, news: LinkNews, now: float) -> LinkInfo | Lost | None:
        why = news.failure
        if why is None and isinstance(news, EndpointMade):
            try:
                assert link.planner is not None
                link.info = self._data.policy(link.backend).agree(link.hello, link.planner, link.name, link.owner)
                link.mine = news.endpoint
                self._connect(link, link.hello.endpoint)
                return None
            except PeerError as e:
                why = Failure.of(e)
        if why is not None:
            said = why.about("the producer's back end: ")
            _refuse(link.connection, said, again=link.up, backend=not link.up)
            self.drop(link.id)
            return Lost(link.id, why.about("", link.name))
        info, mine = link.info, link.mine
        assert info is not None and mine is not None
        link.up = True
        self.send(link.id, m.Welcome(self._epoch, mine, info.piece_bytes, info.integrity, self._invite()))
        return info

    def identify(self, facts: Mapping[str, str]) -> Iterator[Lost]:
        """Set what this engine's KV depends on from now on, and yield the links that are given up for it.

        These are links of consumers with other facts; if they dial again, they are told why there is no link.
        """
        for link in list(self._links.values()):
            try:
                check_facts(link.hello, facts)
            except PeerError as e:
                yield self.close(link.id, Failure.of(e, peer=link.name))

    def hung_up(self, connection: ControlConnection) -> Lost | None:
        """Handle the loss of a connection, and thereby of its link if it had one."""
        self._turns.remove(connection.host, connection)  # and with it what it has sent, which nobody counts any more
        link = self._links.get(connection.name)
        return None if link is None else self._lost(link, K.PEER_LOST, str(connection.lost))

    def _look_after(self, link: _Dialled, now: float) -> Lost | None:
        silent = link.connection.heard + self._silence
        if silent <= now:
            return self._lost(link, K.PEER_LOST, f"it was silent for {self._silence:g} s")
        self._clock.set(link.id, silent)
        return None

    def _lost(self, link: _Dialled, kind: FailureKind, what: str) -> Lost:
        self.drop(link.id)
        return Lost(link.id, Failure(kind, what, link.name))

    def close(self, link: LinkId, why: Failure) -> Lost:
        """Give a link up, and tell its consumer to dial again."""
        if link in self._links:
            _refuse(self._links[link].connection, why, again=True)
            self.drop(link)
        return Lost(link, why)

    def drop(self, link: LinkId) -> None:
        """Forget a link, without telling the consumer why; ``disconnect`` must follow."""
        known = self._links.get(link)
        if known is not None:
            self._forget(link)
            self._sockets.finish(known.connection)

    def disconnect(self, link: LinkId) -> None:
        """Close a link that is forgotten, after all that was announced over it has been counted as revoked."""
        self._data.post(Disconnect(link))

    def _forget(self, link: LinkId) -> None:
        del self._links[link]
        self._clock.cancel(link)


def _refuse(connection: ControlConnection, why: Failure, again: bool, backend: bool = False) -> None:
    connection.send(m.Refused(why.kind, why.detail, again, backend))
