"""The peers of an agent and its state machines: passes messages to the machines, and carries out what these ask of peers.

Used by the control thread only; ``AgentRuntime`` has the rest. Peers are ranks that this agent has dialled, ranks that have dialled it,
and directories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from kvxfer import clock
from kvxfer.config import Config
from kvxfer.control.connection import ControlConnection
from kvxfer.control.inbound import Inbound
from kvxfer.control.link import LinkStatus, Lost
from kvxfer.control.loop import ControlLoop, Step
from kvxfer.control.outbound import Outbound
from kvxfer.control.resolver import Path, Paths, Resolver
from kvxfer.control.revocations import SharedRevocationCounter
from kvxfer.control.worker import Worker
from kvxfer.data.commands import LinkNews, SlotNews
from kvxfer.data.plane import DataPlane
from kvxfer.data.policy import admit
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Planner
from kvxfer.identity import Source
from kvxfer.protocol import messages as m
from kvxfer.protocol.consumer import ConsumerMachine
from kvxfer.protocol.producer import ProducerMachine
from kvxfer.protocol.values import Action, Close, Dial, LinkId, LinkInfo, Resolve, Send

MAX_EXAMINED = 256
"""The most descriptors that may wait to be examined."""

T = TypeVar("T")


class AgentPeers:
    """Both state machines of an agent, with the links to and from other engines' ranks, and the questions to directories.

    ``facts`` are ``None`` until the engine has stated them.
    """

    def __init__(
        self,
        loop: ControlLoop,
        data: DataPlane,
        revocations: SharedRevocationCounter,
        me: m.RankDescriptor,
        config: Config,
        engine: str,
        facts: dict[str, str] | None,
    ) -> None:
        self._loop, self._data, self._me, self._facts = loop, data, me, facts
        self.consumer = ConsumerMachine(config.start, config.transfer_timeout, hangs=data.hangs)
        self.producer = ProducerMachine(config.lease, max(config.lease, config.transfer_timeout), revocations)
        self._hellos = Worker("kvxfer-hellos", 1, loop.do)
        self._descriptors = Worker("kvxfer-examine", MAX_EXAMINED, loop.do)
        silence, stated, invite, serving = config.peer_timeout, facts or {}, revocations.invite, self.producer.serving
        self._in = Inbound(loop.sockets, data, silence, me.epoch, invite, self._examine_hello, serving)
        self._out = Outbound(loop.sockets, data, silence, me.cache, engine, stated)
        patience = min(config.peer_timeout, config.transfer_timeout)
        self._resolver = Resolver(loop.sockets, me, patience, stated, self._examine_descriptor)

    def links(self) -> list[LinkStatus]:
        """Return the links of both roles, as they are now. Any thread."""
        return [*self._out.statuses(self.consumer.pace), *self._in.statuses(self.producer.pace)]

    def identify(self, facts: dict[str, str], now: float) -> list[Action]:
        """Give up all links that were made, or are being made, under other facts."""
        if facts == self._facts:
            return []
        self._facts = self._resolver.facts = facts
        another = Failure(FailureKind.INCOMPATIBLE, "the model of this engine has changed")
        out: list[Action] = []
        for link in self._out.identify(facts):
            out += self.consumer.link_down(link, another, now)
        for lost in self._in.identify(facts):
            out += self._lost(lost, now)
        return out

    # --- what they say ---------------------------------------------------------------------------------------------

    def message(self, connection: ControlConnection, frame: bytes, now: float) -> list[Action]:
        match connection.destination:
            case None:
                found = self._in.receive(connection, frame, now)
                return [] if found is None else self.producer.message(*found, now)
            case Source() as directory:
                return self._resolved(self._resolver.receive(directory, frame), now)
            case link:
                item = self._out.receive(link, connection, frame, now)
                if isinstance(item, Lost):
                    return self._lost(item, now)
                return [] if item is None else self.consumer.message(link, item, now)

    def hung_up(self, connection: ControlConnection, now: float) -> list[Action]:
        match connection.destination:
            case None:
                return self._lost(self._in.hung_up(connection), now)
            case Source() as directory:
                return self._resolved(self._resolver.hung_up(directory, connection), now)
            case link:
                return self._lost(self._out.hung_up(link, connection, now), now)

    def _lost(self, lost: Lost | None, now: float) -> list[Action]:
        if lost is None:
            return []
        if isinstance(lost.link, bytes):
            out = self.producer.link_down(lost.link, lost.why, now)
            self._in.disconnect(lost.link)  # only now: it frees slots from which the consumer may still read
            return out
        if lost.again:
            return self.consumer.link_reset(lost.link, lost.why, now)
        return self.consumer.link_down(lost.link, lost.why, now)

    def _resolved(self, paths: Paths, now: float) -> list[Action]:
        out: list[Action] = []
        for source, path in paths:
            if isinstance(path, Path):
                self._out.know(path.targets)
            out += self.consumer.resolved(source, path.resolved if isinstance(path, Path) else path, now)
        return out

    def _examine_hello(self, link: LinkId, hello: m.Hello) -> bool:
        job = partial(admit, hello, self._data.candidates, self._me.cache, self._me.epoch, self._facts)
        return self._hellos.submit(0, job, partial(self._examined, link))

    def _examined(self, link: LinkId, found: Planner | Failure, now: float) -> list[Action]:
        return self._lost(self._in.examined(link, found), now)

    def _examine_descriptor(self, weight: int, job: Callable[[], T], done: Callable[[T | Failure], Paths]) -> bool:
        return self._descriptors.submit(weight, job, lambda found, now: self._resolved(done(found), now))

    # --- what the data plane says of links -------------------------------------------------------------------------

    def _linked(self, news: LinkNews, now: float) -> list[Action]:
        """Process what the data thread says about a link."""
        dialled_us = isinstance(news.link, bytes)
        found = (self._in if dialled_us else self._out).result(news, now)
        if isinstance(found, LinkInfo):
            return (self.producer if dialled_us else self.consumer).link_up(news.link, found, now)
        return self._lost(found, now)

    def _reset(self, backend: str, why: Failure, now: float) -> list[Action]:
        """Record that a back end was reset, which ended all of its links."""
        out: list[Action] = []
        for link in self._out.of(backend):
            out += self.consumer.link_reset(link, why, now)
        for link in self._in.of(backend):
            out += self._lost(self._in.close(link, why), now)
        return out

    def _tell_peer(self, news: SlotNews) -> None:
        """Tell the peer what the data plane says about a slot."""
        (self._in if news.ref.role == "producer" else self._out).tell(news)

    # --- what is due -----------------------------------------------------------------------------------------------

    def due(self, now: float) -> Iterator[Step]:
        for source, failure in self._resolver.tick(now):
            yield partial(self._resolved, iter([(source, failure)]))
        # ``now`` is when everything that had come was read: time in which this thread stands still later does not count as silence.
        for lost in self._out.tick(now):
            self._resolver.doubt(lost.link, lost.why, now)
            yield partial(self._lost, lost)
        for lost in self._in.tick(now):
            yield partial(self._lost, lost)

    def discount_stall(self, seconds: float, now: float) -> None:
        self._in.discount_stall(seconds, now)
        self._out.discount_stall(seconds, now)
        self._resolver.discount_stall(seconds, now)

    # --- what the machines ask of them -----------------------------------------------------------------------------

    def _ask(self, action: Send | Dial | Close | Resolve) -> None:
        """Carry out an action of a machine.

        Raises:
            PeerError: It cannot be done; see ``_failed``.
        """
        match action:
            case Send():
                (self._in if isinstance(action.link, bytes) else self._out).send(action.link, action.message)
            case Dial():
                self._out.dial(action.link, clock.now())
            case Close(link=bytes() as link):
                self._loop.do(partial(self._lost, self._in.close(link, action.why)))
            case Close():
                self._out.forget(action.link)
            case Resolve():
                why = self._resolver.ask(action.source, action.own, clock.now())
                if why is not None:
                    self._loop.do(partial(self.consumer.resolved, action.source, why))

    def _failed(self, action: Send | Dial, why: Failure) -> None:
        """Count the link of an action that could not be done as lost."""
        link = action.link
        if isinstance(action, Dial) or not isinstance(link, bytes):
            self._loop.do(partial(self.consumer.link_down, link, why))
        else:
            self._in.drop(link)
            self._loop.do(partial(self._lost, Lost(link, why)))

    def _stop_examining(self, until: float) -> None:
        """Examine nothing more; wait for what is being examined until this time of ``kvxfer.clock``, at least briefly."""
        for examiner in (self._hellos, self._descriptors):
            examiner.close(max(until - clock.now(), 0.1))
