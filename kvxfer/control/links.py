"""Links: the hello, the heartbeat, and the sockets under them. Used by the control thread only.

A consumer dials a producer rank (``Outbound``); the producer takes hellos on its one socket (``Inbound``). The consumer
pings on every link, busy or not, and either side counts a link as lost after ``silence`` seconds without a word. Each
making of a link has a number, so that the data thread's late word about an earlier one is not taken for the present. Of
several back ends that both have, the consumer tries one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import NoReturn

from kvxfer.config import Integrity
from kvxfer.control.revocations import RevocationView
from kvxfer.control.sockets import Connection, ControlSockets
from kvxfer.data.plane import DataPlane
from kvxfer.data.policy import check_facts
from kvxfer.data.results import Broken, Connected, EndpointMade
from kvxfer.errors import PeerError
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Cache, Planner, ShardAssignment
from kvxfer.protocol import messages as m
from kvxfer.protocol.timers import Timers
from kvxfer.protocol.values import LinkId, LinkInfo, PartRef, link_name

__all__ = ["Inbound", "Lost", "Outbound", "Target"]

log = logging.getLogger("kvxfer.links")

K = FailureKind

_numbers = count(1)

MOST = 1024
"""Links that may be dialled to us, that strangers cannot fill our memory with hellos."""
PEER_FRAME = 4 << 20
"""Longest frame over a link: a block table of a million blocks."""


@dataclass(frozen=True)
class Lost:
    """The loss of a link.

    Attributes:
        why: The reason.
        again: Whether it was up, so that dialling anew may help.
    """

    why: Failure
    again: bool


@dataclass
class _In:
    """A link that a consumer has dialled.

    Attributes:
        planner: Plans the copies; ``None`` until its hello has been admitted.
    """

    connection: Connection
    number: int
    hello: m.Hello
    planner: Planner | None = None
    info: LinkInfo | None = None  # agreed on once our back end is there
    mine: bytes = b""
    up: bool = False


class Inbound:
    """Links that consumers have dialled to us, by the names of their connections.

    Args:
        sockets: The agent's control sockets.
        data: The agent's data plane.
        cache: Our cache.
        epoch: Our epoch.
        silence: Seconds without a word after which a link is lost.
        revocations: Where consumers on this host find our revocation counter.
        examine: Has a hello looked at off the control thread, and its answer given to ``examined``; returns false when
            too many wait for that.
    """

    def __init__(
        self,
        sockets: ControlSockets,
        data: DataPlane,
        cache: Cache,
        epoch: int,
        silence: float,
        revocations: str,
        examine: Callable[[LinkId, m.Hello, int], bool],
    ) -> None:
        self._sockets, self._data, self._cache = sockets, data, cache
        self._epoch, self._silence, self._revocations = epoch, silence, revocations
        self._examine = examine
        self._links: dict[LinkId, _In] = {}
        self._clock: Timers[LinkId] = Timers()  # when to look whether a link is silent
        self._deaf: list[LinkId] = []  # do not take our messages

    def receive(self, connection: Connection, frame: bytes, now: float) -> tuple[LinkId, m.Message] | None:
        """Take in a frame.

        Returns:
            What is for the producer's machine or the data plane, with its link; ``None`` when it is for neither.

        Raises:
            PeerError: It makes no sense; its sender has been told if it might be a consumer of another version.
        """
        link = connection.name
        known = self._links.get(link)
        try:
            msg = m.decode(frame)
        except PeerError as e:
            if known is None:
                old = Failure(K.INCOMPATIBLE, f"not understood by kvxfer protocol {m.PROTOCOL}")
                self._refuse(connection, old, again=False)
                self._sockets.finish(connection)
            raise PeerError(f"{_who(known, connection)}: {e}", kind=e.kind) from None
        if known is None:
            match msg:
                case m.Hello():
                    self._hello(connection, msg, len(frame), now)
                    return None
                case (
                    m.FetchRequest()
                    | m.CommitRequest()
                    | m.Committed()
                    | m.CloseAttempt()
                    | m.SlotReady()
                    | m.SlotFree()
                    | m.Ping()
                ):
                    self._refuse(connection, Failure(K.PEER_LOST, "this link is not known here (any more)"), again=True)
                    return None
        else:
            match msg:
                case m.Ping():
                    self.send(link, m.Pong(msg.number))
                    return None
                case (
                    m.FetchRequest()
                    | m.CommitRequest()
                    | m.Committed()
                    | m.CloseAttempt()
                    | m.SlotReady()
                    | m.SlotFree()
                ) if known.up:
                    return link, msg
        raise PeerError(f"{_who(known, connection)}: a {type(msg).__name__} makes no sense here", kind=K.MISUSE)

    def _hello(self, connection: Connection, hello: m.Hello, nbytes: int, now: float) -> None:
        link = connection.name
        try:
            if len(self._links) >= MOST:
                raise PeerError(f"{MOST} links are open already", kind=K.OVERLOADED)
            if not self._examine(link, hello, nbytes):
                raise PeerError("too many hellos at once", kind=K.OVERLOADED)
        except PeerError as e:
            self._turn_away(connection, hello, Failure.of(e))
        self._links[link] = _In(connection, next(_numbers), hello)
        self._clock.set(link, now + self._silence)

    def identify(self, facts: Mapping[str, str]) -> Iterator[tuple[LinkId, Failure]]:
        """Set what our KV depends on from now on, and yield the links that are given up for it.

        These are of consumers to whom other facts apply; those who dial anew are told why there is no link.
        """
        for link, known in list(self._links.items()):
            try:
                check_facts(known.hello, facts)
            except PeerError as e:
                why = Failure.of(e, peer=_name(known))
                self.close(link, why)
                yield link, why

    def examined(self, link: LinkId, found: Planner | Failure, now: float) -> None:
        """Take in what has come of looking at a hello.

        Args:
            link: The link that the hello asks for.
            found: The planner of its copies, or why it is refused.
            now: The time, by ``time.monotonic``.

        Raises:
            PeerError: It is refused; for the log.
        """
        known = self._links.get(link)
        if known is None:
            return
        if isinstance(found, Failure):
            self._forget(link)
            self._turn_away(known.connection, known.hello, found)
        else:
            known.planner = found
            self._sockets.keep(known.connection, PEER_FRAME)
            self._data.endpoint(link, known.number, known.hello.backend, "producer")

    def _turn_away(self, connection: Connection, hello: m.Hello, why: Failure) -> NoReturn:
        self._refuse(connection, why, again=False)
        self._sockets.finish(connection)
        raise PeerError(f"refused a link from {hello.engine[:100]!r} at {connection.host}: {why.detail}", kind=why.kind)

    def result(self, result: EndpointMade | Connected | Broken, now: float) -> LinkInfo | Lost | None:
        """Take in what the data thread says about a link.

        Returns:
            What was agreed on once the link is up, or that it is lost; ``None`` when there is neither news.
        """
        link, known = result.link, self._links.get(result.link)
        if known is None or known.number != result.number:
            return None
        why = result.failure
        if why is None and isinstance(result, EndpointMade):
            try:
                assert known.planner is not None
                known.info = self._data.terms(known.hello.backend).agree(known.hello, known.planner, _name(known))
                known.mine = result.endpoint
                self._data.connect(link, known.number, known.mine, known.hello.endpoint)
                return None
            except PeerError as e:
                why = Failure.of(e)
        if why is not None:
            said = why.about("the producer's back end: ")
            self._refuse(known.connection, said, again=known.up, backend=not known.up)
            self.drop(link)
            return Lost(why.about("", _name(known)), False)
        assert known.info is not None
        known.up = True
        info = known.info
        self.send(link, m.Welcome(self._epoch, known.mine, info.piece_bytes, info.integrity, self._revocations))
        return known.info

    def send(self, link: LinkId, msg: m.Message) -> None:
        """Send if the link is still there; one that takes no messages is lost at the next ``tick``."""
        known = self._links.get(link)
        if known is not None and not known.connection.send(msg):
            self._deaf.append(link)

    @staticmethod
    def _refuse(connection: Connection, why: Failure, again: bool, backend: bool = False) -> None:
        connection.send(m.Refused(why.kind, why.detail, again, backend))

    def hung_up(self, connection: Connection) -> Failure | None:
        """Take in the loss of a connection.

        Returns:
            Why its link is lost, which is closed here already; ``None`` if it had none.
        """
        known = self._links.get(connection.name)
        if known is None:
            return None
        self.drop(connection.name)
        return Failure(K.PEER_LOST, str(connection.lost), _name(known))

    def tick(self, now: float) -> Iterator[tuple[LinkId, Failure]]:
        """Close the links that have gone silent or deaf, and yield them."""
        deaf, self._deaf = self._deaf, []
        for link in deaf:
            yield from self._lost(link, "it does not take our messages")
        for link in self._clock.due(now):
            silent = self._links[link].connection.heard + self._silence
            if silent > now:
                self._clock.set(link, silent)
            else:
                yield from self._lost(link, f"it was silent for {self._silence:g} s")

    def _lost(self, link: LinkId, what: str) -> Iterator[tuple[LinkId, Failure]]:
        known = self._links.get(link)
        if known is not None:
            self.drop(link)
            yield link, Failure(K.PEER_LOST, what, _name(known))

    def next_tick(self) -> float | None:
        return 0.0 if self._deaf else self._clock.next()

    def pardon(self, seconds: float) -> None:
        """Add seconds in which nobody could be heard to the times at which peers were heard last."""
        for known in self._links.values():
            known.connection.heard += seconds

    def reset(self, backend: str, why: Failure) -> list[LinkId]:
        """Give all links of a back end up; their consumers are told to dial anew."""
        gone = [link for link, known in self._links.items() if known.hello.backend == backend]
        for link in gone:
            self.close(link, why)
        return gone

    def close(self, link: LinkId, why: Failure) -> None:
        """Give a link up; its consumer is told to dial anew."""
        if link in self._links:
            self._refuse(self._links[link].connection, why, again=True)
            self.drop(link)

    def drop(self, link: LinkId) -> None:
        known = self._links.get(link)
        if known is not None:
            self._forget(link)
            self._sockets.finish(known.connection)
            if known.planner is not None:
                self._data.disconnect(link)

    def _forget(self, link: LinkId) -> None:
        del self._links[link]
        self._clock.cancel(link)

    @staticmethod
    def ref(link: LinkId, msg: m.SlotReady | m.SlotFree) -> PartRef:
        return PartRef("producer", link, msg.transfer, msg.attempt, msg.part)


def _name(known: _In) -> str:
    return f"{known.hello.engine[:100]} at {known.connection.host}"


def _who(known: _In | None, connection: Connection) -> str:
    return f"a stranger at {connection.host}" if known is None else f"{known.hello.engine[:100]!r} at {connection.host}"


@dataclass(frozen=True)
class Target:
    """A producer rank to dial.

    Attributes:
        address: Where it listens.
        epoch: Its epoch.
        cache: Its cache.
        assignments: What we read of it.
        backends: The back ends that both have, by our preference.
    """

    address: str
    epoch: int
    cache: Cache
    assignments: tuple[ShardAssignment, ...]
    backends: tuple[str, ...]

    @property
    def link(self) -> LinkId:
        return (self.address, self.epoch)


@dataclass
class _Out:
    number: int
    backend: str
    connection: Connection
    target: Target
    pinged: float
    pings: int = 0
    up: bool = False
    mine: bytes = b""
    piece_bytes: int = 0
    integrity: Integrity = "off"
    revocations: RevocationView | None = None


class Outbound:
    """Links that we dial, by (address, epoch).

    Args:
        sockets: The agent's control sockets.
        data: The agent's data plane.
        cache: Our cache.
        epoch: Our epoch.
        engine: Our engine's name.
        silence: Seconds without a word after which a link is lost.
        facts: What all of our KV depends on.
    """

    def __init__(
        self,
        sockets: ControlSockets,
        data: DataPlane,
        cache: Cache,
        epoch: int,
        engine: str,
        silence: float,
        facts: Mapping[str, str],
    ) -> None:
        self._sockets, self._data, self._cache = sockets, data, cache
        self._epoch, self._engine, self._silence, self._facts = epoch, engine, silence, facts
        self._targets: dict[LinkId, Target] = {}
        self._unfit: dict[LinkId, dict[str, Failure]] = {}  # back ends that could not make it, and why
        self._links: dict[LinkId, _Out] = {}
        self._clock: Timers[LinkId] = Timers()  # when to ping a link, or to look whether it is silent
        self._deaf: list[LinkId] = []  # do not take our messages

    def __contains__(self, link: LinkId) -> bool:
        return link in self._links

    def of(self, backend: str) -> list[LinkId]:
        """Return the links of a back end."""
        return [link for link, o in self._links.items() if o.backend == backend]

    def identify(self, facts: Mapping[str, str]) -> list[LinkId]:
        """Set what our KV depends on from now on.

        Returns:
            The links that we know, all made or to be made under other facts.
        """
        self._facts = facts
        return list(self._targets)

    def know(self, targets: Iterable[Target]) -> None:
        """Learn where links lead that may be dialled later."""
        for t in targets:
            self._targets[t.link] = t

    def dial(self, link: LinkId, now: float) -> None:
        """Make a link, or make it anew, with the first back end that has not failed to.

        Raises:
            PeerError: Its address is none, or is not known any more.
        """
        self.drop(link)
        if link not in self._targets:
            raise PeerError(f"the way to {link_name(link)} is not known any more", kind=K.PEER_LOST)
        target = self._targets[link]
        backend = next((b for b in target.backends if b not in self._unfit.get(link, {})), target.backends[-1])
        number = next(_numbers)
        connection = self._sockets.dial(target.address, (self, link), PEER_FRAME)
        self._links[link] = _Out(number, backend, connection, target, now)
        self._data.endpoint(link, number, backend, "consumer")

    def _without(self, o: _Out, why: Failure, now: float) -> Lost | None:
        """Try the next back end, since this one cannot make the link; the link is lost if there is none."""
        link = o.target.link
        failed = self._unfit.setdefault(link, {})
        failed[o.backend] = why
        if all(b in failed for b in o.target.backends):
            each = "; ".join(f"{b}: {w.detail}" for b, w in failed.items())
            return Lost(why if len(failed) == 1 else Failure(K.INCOMPATIBLE, each, why.peer), again=False)
        log.info("the link to %s cannot be made with back end %s: %s", link_name(link), o.backend, why.detail)
        try:
            self.dial(link, now)
        except PeerError as e:
            return Lost(Failure.of(e, peer=link_name(link)), again=False)
        return None

    def result(self, result: EndpointMade | Connected | Broken, now: float) -> LinkInfo | Lost | None:
        """Take in what the data thread says about a link.

        Returns:
            What was agreed on once the link is up, or that it is lost; ``None`` when there is neither news.
        """
        o = self._links.get(result.link)
        if o is None or o.number != result.number:
            return None
        if result.failure is not None:
            why = result.failure.about("our back end: ", link_name(result.link))
            return Lost(why, again=True) if o.up else self._without(o, why, now)
        if isinstance(result, EndpointMade):
            o.mine, o.connection.heard = result.endpoint, now
            t = o.target
            terms = self._data.terms(o.backend)
            self.send(t.link, terms.hello(o.mine, t.epoch, self._epoch, self._engine, t.assignments, self._facts))
            self._clock.set(t.link, now + self._silence / 4)
            return None
        o.up = True
        planner = Planner(o.target.cache, self._cache, o.target.assignments)
        mode = self._data.terms(o.backend).mode
        epoch, name = o.target.epoch, o.target.address
        return LinkInfo(
            mode, planner, epoch, o.piece_bytes, integrity=o.integrity, revocations=o.revocations, name=name
        )

    def receive(self, link: LinkId, connection: Connection, frame: bytes, now: float) -> m.Message | Lost | None:
        """Take in a frame; links may be dropped and dialled meanwhile.

        Returns:
            What is for the consumer's machine or the data plane, or that the link is lost; ``None`` when it is neither.
        """
        o = self._links.get(link)
        if o is None or o.connection is not connection:
            return None
        try:
            msg = m.decode(frame)
        except PeerError as e:
            return Lost(Failure.of(e, peer=link_name(link)), again=False)
        match msg:
            case m.PartReady() | m.SlotReady() | m.Checksums() | m.CommitAck() | m.AttemptClosed() if o.up:
                return msg
            case m.Welcome() if not o.up and o.mine:
                try:
                    self._data.terms(o.backend).accept(msg)
                except PeerError as e:
                    return Lost(Failure.of(e, peer=link_name(link)).about("its welcome: "), again=False)
                o.piece_bytes, o.integrity, o.revocations = (
                    msg.piece_bytes,
                    msg.integrity,
                    RevocationView.of(msg.revocations),
                )
                self._data.connect(link, o.number, o.mine, msg.endpoint)
            case m.Refused(backend=True) if not o.up:
                return self._without(o, m.failure(msg, link_name(link), "it refused: "), now)
            case m.Refused():
                return Lost(m.failure(msg, link_name(link), "it refused: "), again=msg.again and o.up)
        return None  # else it is a Pong, which has been heard, or nonsense

    def hung_up(self, link: LinkId, connection: Connection) -> Lost | None:
        """Take in the loss of a connection, and with it of the link, if it was still that link's."""
        o = self._links.get(link)
        if o is None or o.connection is not connection:
            return None
        kind = K.PEER_LOST if o.up else K.PEER_UNREACHABLE
        return Lost(Failure(kind, str(connection.lost), link_name(link)), again=o.up)

    def send(self, link: LinkId, msg: m.Message) -> None:
        """Send if the link is still there; one that takes no messages is lost at the next ``tick``."""
        o = self._links.get(link)
        if o is not None and not o.connection.send(msg) and o.connection.lost is None:
            self._deaf.append(link)

    def tick(self, now: float) -> Iterator[tuple[LinkId, Lost]]:
        """Ping all that have been sent a hello; those that are silent or deaf are lost."""
        deaf, self._deaf = self._deaf, []
        for link in deaf:
            if link in self._links:
                yield link, Lost(Failure(K.PEER_LOST, "it does not take our messages", link_name(link)), again=False)
        for link in self._clock.due(now):
            o = self._links[link]
            if now - o.connection.heard > self._silence:
                what = "it was silent" if o.up else "no answer to our hello"
                kind = K.PEER_LOST if o.up else K.PEER_UNREACHABLE
                yield link, Lost(Failure(kind, f"{what} for {self._silence:g} s", link_name(link)), again=False)
                continue
            if now - o.pinged >= self._silence / 4:
                o.pinged, o.pings = now, o.pings + 1
                self.send(link, m.Ping(o.pings))
            self._clock.set(link, min(o.pinged + self._silence / 4, o.connection.heard + self._silence + 0.001))

    def next_tick(self) -> float | None:
        return 0.0 if self._deaf else self._clock.next()

    def pardon(self, seconds: float) -> None:
        """Add seconds in which nobody could be heard to the times at which peers were heard last."""
        for o in self._links.values():
            o.connection.heard += seconds

    def drop(self, link: LinkId) -> None:
        """Close a link; it may be dialled again."""
        o = self._links.pop(link, None)
        if o is not None:
            self._clock.cancel(link)
            self._sockets.drop(o.connection)
            self._data.disconnect(link)

    def forget(self, link: LinkId) -> None:
        """Close a link for good."""
        if link not in self._links:
            self._data.disconnect(link)  # for its answer
        self.drop(link)
        self._targets.pop(link, None)
        self._unfit.pop(link, None)

    @staticmethod
    def ref(link: LinkId, msg: m.SlotReady) -> PartRef:
        return PartRef("consumer", link, msg.transfer, msg.attempt, msg.part)
