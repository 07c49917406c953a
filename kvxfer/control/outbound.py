"""The links that this agent dials to producer ranks: hello, heartbeat, and another back end if one cannot make the link.

Every link is pinged, busy or not. If both sides have several back ends, they are tried one after the other. Of each engine, only a
few ranks are dialled at once; the others follow as these links come up or fail.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import msgspec

from kvxfer.control.broken import unanswered
from kvxfer.control.connection import ControlConnection
from kvxfer.control.link import PEER_FRAME, LinkRecord, LinkTable, Lost
from kvxfer.control.revocations import RevocationView
from kvxfer.control.sockets import GUEST_FRAME, ControlSockets
from kvxfer.data.commands import Disconnect, EndpointMade, LinkNews
from kvxfer.data.plane import DataPlane
from kvxfer.errors import PeerError
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Cache, Planner, ShardAssignment
from kvxfer.identity import Source
from kvxfer.logs import logger
from kvxfer.protocol import messages as m
from kvxfer.protocol.index import Index
from kvxfer.protocol.values import LinkId, LinkInfo, Role, link_name

FEWER = "describe the cache by fewer, longer regions, or choose another back end"

AT_ONCE = 16
"""The most ranks of one engine that are dialled at once."""
CUTS = 3
"""How often a link is dialled again because the connection was cut before it was up: by something on the way, or by a full peer."""

log = logger("kvxfer.links")

K = FailureKind


@dataclass(frozen=True)
class Target:
    """A producer rank to dial."""

    address: str  # where it listens
    epoch: int
    cache: Cache
    assignments: tuple[ShardAssignment, ...]  # what this agent reads from it
    backends: tuple[str, ...]  # the back ends that both have, in the order of this agent's preference
    source: Source  # the directory that has named it

    @cached_property
    def link(self) -> LinkId:
        """The link to it. Only targets that are alike in everything share one: what moves over it is planned by what they say.

        Any directory can name any rank's address and epoch there, and describe its cache otherwise than it is.
        """
        said = msgspec.msgpack.encode((self.epoch, self.cache, self.assignments, self.backends))
        return (self.address, int.from_bytes(hashlib.blake2b(said, digest_size=16).digest()))


@dataclass
class _Dial(LinkRecord):
    """A link that this agent has dialled."""

    target: Target
    pinged: float
    pings: int = 0
    cuts: int = 0  # how often the connection of an attempt to make it has been cut


class Outbound(LinkTable[_Dial]):
    """The links that this agent dials, by what its targets say.

    A link is lost after ``silence`` seconds without a message. ``facts``: what all KV of the engine depends on.
    """

    role: ClassVar[Role] = "consumer"

    def __init__(
        self,
        sockets: ControlSockets,
        data: DataPlane,
        silence: float,
        cache: Cache,
        engine: str,
        facts: Mapping[str, str],
    ) -> None:
        super().__init__(sockets, data, silence)
        self._cache, self._engine, self._facts = cache, engine, facts
        self._secret = os.urandom(16)
        self._targets: dict[LinkId, Target] = {}
        self._unfit: dict[LinkId, dict[str, Failure]] = {}  # back ends that could not make it, and why
        self._dialling: Index[Source, LinkId] = Index()  # links that are being made
        self._queued: Index[Source, LinkId] = Index()  # links to be made after those
        self._due: set[Source] = set()  # engines of which more may be dialled

    def identify(self, facts: Mapping[str, str]) -> list[LinkId]:
        """Set what this engine's KV depends on from now on; return all known links, which were made under other facts."""
        self._facts = facts
        return list(self._targets)

    def know(self, targets: Iterable[Target]) -> None:
        """Record the targets of links that may be dialled later."""
        for t in targets:
            self._targets[t.link] = t

    def dial(self, link: LinkId, now: float, cuts: int = 0) -> None:
        """Make a link, or make it again, with the first back end that has not failed to make it.

        If enough ranks of its engine are being dialled, it waits for one of them.

        Raises:
            PeerError: Its address is invalid, or not known any more.
        """
        self.drop(link)
        if link not in self._targets:
            raise PeerError(f"the route to {link_name(link)} is not known any more", kind=K.PEER_LOST)
        target = self._targets[link]
        if self._dialling.count(target.source) >= AT_ONCE:
            self._queued.add(target.source, link)
            return
        backend = next((b for b in target.backends if b not in self._unfit.get(link, {})), target.backends[-1])
        connection = self._sockets.dial(target.address, link, PEER_FRAME, target.source.host)
        self._links[link] = known = _Dial(link, backend, connection, link_name(link), target, now, cuts=cuts)
        self._dialling.add(target.source, link)
        self._begin(known)

    def _made(self, target: Target) -> None:
        """Record that a link is up, or given up; the queue of its engine goes on at the next ``tick``."""
        self._dialling.remove(target.source, target.link)
        if self._queued.count(target.source):
            self._due.add(target.source)

    def _without(self, link: _Dial, why: Failure, now: float) -> Lost | None:
        """Try the next back end, because this one cannot make the link; return its loss if there is none."""
        failed = self._unfit.setdefault(link.id, {})
        failed[link.backend] = why
        if all(b in failed for b in link.target.backends):
            each = "; ".join(f"{b}: {w.detail}" for b, w in failed.items())
            return Lost(link.id, why if len(failed) == 1 else Failure(K.INCOMPATIBLE, each, why.peer))
        log.info("the link to %s cannot be made with back end %s: %s", link.name, link.backend, why.detail)
        try:
            self.dial(link.id, now)
        except PeerError as e:
            return Lost(link.id, Failure.of(e, peer=link.name))
        return None

    def _result(self, link: _Dial, news: LinkNews, now: float) -> LinkInfo | Lost | None:
        if news.failure is not None:
            why = news.failure.about("our back end: ", link.name)
            return Lost(link.id, why, again=True) if link.up else self._without(link, why, now)
        if isinstance(news, EndpointMade):
            link.mine, link.connection.heard = news.endpoint, now
            t = link.target
            policy = self._data.policy(link.backend)
            hello = policy.hello(link.mine, t.epoch, self._reader(t), self._engine, t.assignments, self._facts)
            if (nbytes := len(m.encode(hello))) > GUEST_FRAME:
                what = f"with its endpoint, of {len(link.mine)} bytes, the hello has {nbytes}, and a peer takes {GUEST_FRAME}"
                return self._without(link, Failure(K.BACKEND_FAILED, what, link.name, FEWER), now)
            self.send(link.id, hello)
            self._clock.set(link.id, now + self._silence / 4)
            return None
        link.up = True
        self._made(link.target)
        return link.info

    def receive(
        self, link: LinkId, connection: ControlConnection, frame: bytes, now: float
    ) -> m.ToConsumer | Lost | None:
        """Handle a frame; this may drop links and dial them.

        Return a message for the consumer's machine, or the loss of the link; ``None`` if it is neither.
        """
        known = self._of(link, connection)
        if known is None:
            return None
        try:
            msg = m.decode(frame)
        except PeerError as e:
            return Lost(link, Failure.of(e, peer=known.name))
        match msg:
            case m.PartReady() | m.Underway() | m.Checksums() | m.CommitAck() | m.AttemptClosed() if known.up:
                return msg
            case m.SlotReady() if known.up:
                self.heard(link, msg)
            case m.Welcome() if known.info is None and known.mine is not None:
                return self._welcome(known, msg)
            case m.Refused(backend=True) if not known.up:
                return self._without(known, m.failure(msg, known.name, "it refused: "), now)
            case m.Refused():
                return Lost(link, m.failure(msg, known.name, "it refused: "), again=msg.again and known.up)
            case m.Pong() if msg.number == known.pings:
                known.round_trip = now - known.pinged
            case _:
                pass  # a late Pong, or nonsense
        return None

    def _reader(self, target: Target) -> int:
        """Return the number by which a producer rank knows this agent, over whichever link.

        Not the epoch, which directories tell to anybody, and another for each rank: a process that does not know it cannot speak for us.
        """
        number = hashlib.blake2b(target.epoch.to_bytes(8), key=self._secret, digest_size=8).digest()
        return int.from_bytes(number) >> 1

    def _passed(self, link: _Dial) -> Mapping[str, str]:
        return {backend: why.detail for backend, why in dict(self._unfit.get(link.id, {})).items()}

    def _welcome(self, link: _Dial, welcome: m.Welcome) -> Lost | None:
        policy, t = self._data.policy(link.backend), link.target
        try:
            policy.accept(welcome)
        except PeerError as e:
            return Lost(link.id, Failure.of(e, peer=link.name).about("its welcome: "))
        link.info = LinkInfo(
            policy.mode,
            Planner(t.cache, self._cache, t.assignments),
            t.epoch,
            welcome.piece_bytes,
            policy.stage_below,
            integrity=welcome.integrity,
            revocations=RevocationView.of(welcome.revocations),
            name=t.address,
        )
        self._connect(link, welcome.endpoint)
        return None

    def _of(self, link: LinkId, connection: ControlConnection) -> _Dial | None:
        """Return a link if this is its connection, and not an earlier attempt's."""
        known = self._links.get(link)
        return known if known is not None and known.connection is connection else None

    def hung_up(self, link: LinkId, connection: ControlConnection, now: float) -> Lost | None:
        """Handle the loss of a connection, and thereby of the link if it is still that link's connection and not dialled again."""
        known = self._of(link, connection)
        if known is None:
            return None
        if not known.up and connection.opened and not connection.denied and known.cuts < CUTS:
            with suppress(PeerError):  # no name can be looked up now
                self.dial(link, now, known.cuts + 1)
                return None
        unmet = K.OVERLOADED if connection.short else K.PEER_UNREACHABLE
        kind = K.REFUSED if connection.denied else K.PEER_LOST if known.up else unmet
        return Lost(link, Failure(kind, str(connection.lost), known.name), again=known.up)

    def tick(self, now: float) -> Iterator[Lost]:
        yield from super().tick(now)
        due, self._due = self._due, set()
        for source in due:
            for link in self._queued.of(source)[: AT_ONCE - self._dialling.count(source)]:
                try:
                    self.dial(link, now)
                except PeerError as e:
                    yield Lost(link, Failure.of(e, peer=link_name(link)))

    def next_tick(self) -> float | None:
        return 0.0 if self._due else super().next_tick()

    def _look_after(self, link: _Dial, now: float) -> Lost | None:
        heard = link.connection.heard
        if now - heard > self._silence:
            if link.up:
                return self._lost(link, K.PEER_LOST, f"it was silent for {self._silence:g} s")
            return self._lost(
                link,
                K.PEER_UNREACHABLE,
                f"no answer to the hello: {unanswered(self._silence, link.connection.connected)}",
            )
        if now - link.pinged >= self._silence / 4:
            link.pinged, link.pings = now, link.pings + 1
            self.send(link.id, m.Ping(link.pings))
        self._clock.set(link.id, min(link.pinged + self._silence / 4, heard + self._silence + 0.001))
        return None

    def _lost(self, link: _Dial, kind: FailureKind, what: str) -> Lost:
        return Lost(link.id, Failure(kind, what, link.name))

    def drop(self, link: LinkId) -> None:
        """Close a link; it may be dialled again."""
        target = self._targets.get(link)
        if target is not None:
            self._queued.remove(target.source, link)
        known = self._links.pop(link, None)
        if known is not None:
            self._made(known.target)
            self._clock.cancel(link)
            self._sockets.drop(known.connection)
            self._data.post(Disconnect(link))

    def forget(self, link: LinkId) -> None:
        """Close a link and do not dial it again."""
        if link not in self._links:
            self._data.post(Disconnect(link))  # for its answer
        self.drop(link)
        self._targets.pop(link, None)
        self._unfit.pop(link, None)
