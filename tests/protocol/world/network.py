"""Links between the agents, and the messages on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Planner, ShardAssignment
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import LinkInfo
from tests.protocol.world.base import LATEST, SILENCE, Agent, Link, layers_of

if TYPE_CHECKING:
    from tests.protocol.world.world import World


class Network:
    def __init__(self, world: World) -> None:
        self.world = world
        self.made = 0

    # --- making and closing ----------------------------------------------------------------------------------------

    def dial(self, agent: Agent, name: Any) -> None:
        """The consumer's runtime makes a link, and closes the one before."""
        self._hang_up(agent, name)
        rank, epoch = int(name[0][1:]), name[1]
        self.made += 1
        link = agent.links[name] = Link(agent, self.world.producers[rank], name, b"link %d" % self.made)
        if link.producer.epoch == epoch:
            self._at_consumer(link, LATEST / 2, lambda: self._hello(link))
        else:
            self._at_consumer(link, SILENCE, lambda: self._lost(link, "refused: another epoch"))

    def _at_consumer(self, link: Link, seconds: float, what: Any) -> None:
        """Things that the consumer's runtime learns of one link come in their order."""
        self.world.later(seconds, ("link", link.consumer.epoch, link.name), what)

    def _hello(self, link: Link) -> None:
        if not link.works:
            self._at_consumer(link, SILENCE, lambda: self._lost(link, "no answer"))
            return
        p = link.producer
        link.up_p, p.links[link.id] = True, link
        self.world.perform(p, p.machine.link_up(link.id, self._info(link), self.world.now))
        self._at_consumer(link, LATEST / 2, lambda: self._welcome(link))

    def _welcome(self, link: Link) -> None:
        c = link.consumer
        if c.links.get(link.name) is not link:
            return
        if not link.works:
            self._lost(link, "silent")
            return
        link.up_c = True
        self.world.perform(c, c.machine.link_up(link.name, self._info(link), self.world.now))

    def _info(self, link: Link) -> LinkInfo:
        assignments = (ShardAssignment(0, 0, layers_of(link.producer.rank), 0, 1),)
        planner = Planner(link.producer.cache, link.consumer.cache, assignments)
        setting, revocations = self.world.setting, link.producer.revocations
        below, seen = 1 << 40 if setting.staged else 0, (lambda: revocations.declared) if setting.seen else None
        return LinkInfo(setting.mode, planner, link.consumer.epoch, 16, below, setting.integrity, seen)  # type: ignore[arg-type]

    def close(self, agent: Agent, name: Any) -> None:
        if agent.role == "producer":
            link = agent.links[name]
            self.world.later(LATEST, None, lambda: self._lost(link, "closed by the producer", again=True))
            self.world.later(0.0, None, lambda: self._lost_at_producer(link, "closed"))
            return
        if not self._hang_up(agent, name):
            self.world.later(0.5, ("link", agent.epoch, name), lambda: self._closed(agent, name, None))

    def _hang_up(self, agent: Agent, name: Any) -> bool:
        """The consumer's runtime closes a link, which takes a moment; the producer's notices later."""
        link = agent.links.pop(name, None)
        if link is None:
            return False
        self._at_consumer(link, 0.5, lambda: self._closed(agent, name, link))
        self.world.later(SILENCE, None, lambda: self._lost_at_producer(link, "silent"))
        return True

    def _closed(self, agent: Agent, name: Any, link: Link | None) -> None:
        if link is not None:
            link.closed = True
            self.world.backend.fail(agent, link, "the link was closed")
        if agent.alive:
            self.world.perform(agent, agent.machine.link_closed(name, self.world.now))

    # --- losing ----------------------------------------------------------------------------------------------------

    def cut(self, link: Link, again: bool = False) -> None:
        """Nothing passes any more; either side learns of it in time, in whatever order."""
        if not link.cut:
            link.cut = True
            self.world.later(SILENCE, None, lambda: self._lost(link, "silent", again))
            self.world.later(SILENCE, None, lambda: self._lost_at_producer(link, "silent"))

    def forget(self, link: Link) -> None:
        """The producer gives a link up of which it hears nothing (the consumer was stopped, say). The connection of the
        back end is closed on one side only: what is being read goes on."""
        self._lost_at_producer(link, "silent")

    def _lost(self, link: Link, reason: str, again: bool = False) -> None:
        """The consumer's runtime counts a link as lost."""
        c = link.consumer
        if c.links.get(link.name) is link and c.alive:
            call = c.machine.link_reset if again and link.up_c else c.machine.link_down
            self.world.perform(c, call(link.name, Failure(FailureKind.PEER_LOST, reason), self.world.now))

    def _lost_at_producer(self, link: Link, reason: str) -> None:
        p = link.producer
        if link.up_p and p.alive:
            link.up_p = False
            p.links.pop(link.id, None)
            self.world.backend.fail(p, link, "the link was closed")
            self.world.perform(p, p.machine.link_down(link.id, Failure(FailureKind.PEER_LOST, reason), self.world.now))

    # --- messages --------------------------------------------------------------------------------------------------

    def send(self, agent: Agent, name: Any, msg: m.Message) -> None:
        link, script = agent.links.get(name), self.world.script
        if link is None:
            return
        if isinstance(msg, m.FetchRequest):
            agent.tries[msg.attempt] = agent.owner[int(msg.blocks[0][0])]
        frame = m.encode(msg)
        to = link.producer if agent is link.consumer else link.consumer
        copies = 1
        if not self.world.calm:
            fate = script.pick(256)
            copies = 0 if fate >= 253 else 2 if fate >= 248 else 1
        key = None if not self.world.calm and script.chance(32) else ("wire", link.id, to.role)
        for _ in range(copies):
            self.world.later(LATEST, key, lambda: self._deliver(link, to, frame))

    def _deliver(self, link: Link, to: Agent, frame: bytes) -> None:
        if not link.works:
            return
        msg = m.decode(frame)
        if to is link.consumer:
            if to.links.get(link.name) is link and link.up_c:
                if isinstance(msg, m.PartReady):
                    self.world.banded += msg.bands is not None
                    self.world.decodes.begun(to, msg.attempt)
                self.world.perform(to, to.machine.message(link.name, msg, self.world.now))
        elif link.up_p:
            self.world.drain(to)
            self.world.perform(to, to.machine.message(link.id, msg, self.world.now))
        else:  # forgotten here: the consumer is told to dial anew
            self.world.later(LATEST, None, lambda: self._lost(link, "not known any more", again=True))
