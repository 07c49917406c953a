"""The world itself: agents and their crashes, what will happen, and time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np

from kvxfer import memory
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Rank
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.consumer import ConsumerMachine
from kvxfer.protocol.producer import ProducerMachine
from kvxfer.protocol.revocations import RevocationCounter
from kvxfer.protocol.values import (
    Abort,
    Action,
    Close,
    Dial,
    Emit,
    Hash,
    Hashed,
    Move,
    RankRoute,
    RemoteWritesEnded,
    Resolve,
    Resolved,
    Send,
)
from tests.protocol.world.backend import Backend
from tests.protocol.world.base import (
    BLOCKS,
    D_TOKENS,
    GARBAGE,
    LATEST,
    LAYERS,
    LONGEST,
    P_TOKENS,
    RANKS,
    RETRY,
    START,
    TIMEOUT,
    TRANSFERS,
    UNIT,
    Agent,
    Script,
    Setting,
    check,
    layers_of,
    make_cache,
)
from tests.protocol.world.engines import ConsumerEngine, ProducerEngine
from tests.protocol.world.network import Network


class World:
    """``steps``: taken by all worlds so far."""

    steps = 0

    def __init__(self, setting: Setting, script: Script) -> None:
        self.setting, self.script = setting, script
        self.calm = not setting.faults
        self.now = 0.0
        self.epochs = count(1)
        self.generations = count(1)
        self.moments = count(1)  # finer than the clock: what comes before what
        self.banded = 0  # parts of some layers that were announced
        # What will happen: (latest time, order key or None, what). Things of one key happen in their order.
        self.agenda: list[tuple[float, Any, Callable[[], None]]] = []
        self.network, self.backend = Network(self), Backend(self)
        self.prefills, self.decodes = ProducerEngine(self), ConsumerEngine(self)
        self.producers = [self._producer(r) for r in range(RANKS)]
        self.consumers = [self._consumer(r) for r in range(RANKS)]

    def _producer(self, rank: int) -> Agent:
        memory = np.full(LAYERS * BLOCKS * P_TOKENS * UNIT, GARBAGE, np.uint8)
        cache = make_cache(memory, layers_of(rank), P_TOKENS, rank)
        revocations = RevocationCounter()
        return Agent(
            "producer",
            rank,
            ProducerMachine(self.setting.lease, LONGEST, revocations),
            memory,
            cache,
            next(self.epochs),
            revocations=revocations,
        )

    def _consumer(self, rank: int) -> Agent:
        memory = np.full(RANKS * LAYERS * BLOCKS * D_TOKENS * UNIT, GARBAGE, np.uint8)
        cache = make_cache(memory, sum(map(layers_of, range(RANKS)), ()), D_TOKENS, rank)
        return Agent("consumer", rank, ConsumerMachine(START, TIMEOUT, RETRY), memory, cache, next(self.epochs))

    @property
    def agents(self) -> list[Agent]:
        return [*self.producers, *self.consumers]

    def crash(self, role: str) -> None:
        """An engine dies with all its ranks, and a new one starts in its place."""
        links = {link.id: link for a in self.agents for link in a.links.values()}
        for agent in self.agents:
            agent.alive &= agent.role != role
        for link in links.values():
            if not (link.consumer.alive and link.producer.alive):
                self.network.cut(link)
        if role == "producer":
            self.producers = [self._producer(r) for r in range(RANKS)]
            self.prefills = ProducerEngine(self)
        else:
            self.consumers = [self._consumer(r) for r in range(RANKS)]
            self.decodes = ConsumerEngine(self)

    # --- what machines ask for -------------------------------------------------------------------------------------

    def perform(self, agent: Agent, actions: list[Action]) -> None:
        for action in actions if agent.alive else ():
            match action:
                case Emit(event=event):
                    engine = self.prefills if event.role == "producer" else self.decodes
                    engine.report(agent, event)
                case Send(link=name, message=msg):
                    self.network.send(agent, name, msg)
                case Move():
                    self.backend.move(agent, action)
                case Hash():
                    self._hash(agent, action)
                case Abort(ref=ref):
                    self.backend.abort(agent, ref)
                case RemoteWritesEnded(ref=ref):
                    self.backend.remote_writes_ended(agent, ref)
                case Dial(link=name):
                    self.network.dial(agent, name)
                case Close(link=name):
                    self.network.close(agent, name)
                case Resolve(source=source):
                    self.later(2 * LATEST, ("resolve", agent.epoch), lambda source=source: self._resolve(agent, source))

    def say(self, agent: Agent, call: Callable[[], list[Action]]) -> None:
        """An engine's call, which the machine hears of a little later, in its order."""
        agent.inbox.append(lambda: self.perform(agent, call()))
        self.later(LATEST / 4, ("inbox", agent.epoch), lambda: self.hear(agent))

    def hear(self, agent: Agent) -> None:
        if agent.inbox:
            agent.inbox.popleft()()

    def drain(self, agent: Agent) -> None:
        """The machine hears all that its engine has said so far."""
        while agent.inbox:
            self.hear(agent)

    def _hash(self, agent: Agent, action: Hash) -> None:
        """Reads at some time; what it finds then is told later. Sooner or later: the thread has much to do."""

        def read() -> None:
            if agent.alive:
                value = memory.space(agent.cache.regions).checksum(action.plan, action.side).value
                done = Hashed(
                    action.ref,
                    value,
                    None
                    if self.calm or not self.script.chance(2)
                    else Failure(FailureKind.BACKEND_FAILED, "it failed"),
                )
                self.later(0.2, None, lambda: tell(done))

        def tell(done: Hashed) -> None:
            if agent.alive:
                self.perform(agent, agent.machine.hashed(done, self.now))

        self.later(LATEST, ("hash", agent.epoch), read)

    def _resolve(self, agent: Agent, source: Source) -> None:
        route: Resolved | Failure = Failure(FailureKind.PEER_LOST, "the engine there has restarted")
        if source == self.source:
            route = Resolved(tuple(RankRoute((f"p{p.rank}", p.epoch), RANKS, Rank(0, p.rank)) for p in self.producers))
        self.perform(agent, agent.machine.resolved(source, route, self.now))

    @property
    def source(self) -> Source:
        return Source("p", 1, self.producers[0].epoch)

    # --- time ------------------------------------------------------------------------------------------------------

    def later(self, seconds: float, key: Any, what: Callable[[], None]) -> None:
        """``what`` will happen within this time."""
        self.agenda.append((self.now + seconds, key, what))

    def _ready(self) -> Iterator[int]:
        """Items of the agenda that may happen next."""
        seen: set[Any] = set()
        for i, (_, key, _) in enumerate(self.agenda):
            if key is None or key not in seen:
                yield i
                seen.add(key)

    def happen(self) -> None:
        ready = list(self._ready())
        if ready:
            self.agenda.pop(ready[self.script.pick(len(ready))])[2]()

    def elapse(self, seconds: float) -> None:
        """Time passes: what is due happens, in its order, and the machines' clocks tick."""
        end = self.now + seconds
        while True:
            first = min(self._ready(), key=lambda i: self.agenda[i][0], default=None)
            due = self.agenda[first][0] if first is not None else end + 1
            ticks = [(t, i) for i, a in enumerate(self.agents) if (t := a.machine.next_tick()) is not None]
            tick, i = min(ticks, default=(end + 1, 0))
            if tick <= min(due, end):
                self.now = max(self.now, tick)
                agent = self.agents[i]
                self.perform(agent, agent.machine.tick(self.now))
            elif first is not None and due <= end:
                self.now = max(self.now, due)
                self.agenda.pop(first)[2]()
            else:
                break
        self.now = end

    # --- the script ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        World.steps += 1
        s = self.script
        choice = s.pick(64)
        if choice < 28:
            self.happen()
        elif choice < 38:
            rank = s.pick(RANKS)
            for _ in range(1 + s.pick(8 * LAYERS)):
                self.prefills.work(rank)
        elif choice < 44:
            self.prefills.prefill(*TRANSFERS[s.pick(len(TRANSFERS))])
        elif choice < 50:
            known = [t for t in TRANSFERS if t[0] in self.prefills.known]
            if not self.calm and (not known or s.chance(32)):
                known = TRANSFERS
            if known:
                self.decodes.fetch(*known[s.pick(len(known))], self.source)
        elif choice < 56 or self.calm:
            self.elapse((1 + s.pick(16)) / (16 if not self.calm else 64))
        elif choice < 58:
            self.elapse(s.pick(8))
        elif choice < 60:
            self.decodes.cancel()
        elif choice < 62 and s.chance(96):
            links = [x for c in self.consumers for x in c.links.values() if not x.cut]
            if links and s.chance(64):
                self.network.forget(links[s.pick(len(links))])
            elif links:
                self.network.cut(links[s.pick(len(links))], again=bool(s.pick(2)))
        elif choice == 62 and s.chance(32):
            self.crash("producer" if s.pick(2) else "consumer")
        elif choice == 63:
            self.meet(*TRANSFERS[s.pick(len(TRANSFERS))])
        else:
            self.happen()

    def meet(self, transfer: TransferId, total: int) -> None:
        """A router sends a request to both sides, and the producer has computed its first chunk when its consumer has asked."""
        self.prefills.prefill(transfer, total)
        self.decodes.fetch(transfer, total, self.source)
        self.elapse(self.script.pick(16) / 8)
        for rank in range(RANKS):
            for _ in range(1 + LAYERS + self.script.pick(LAYERS)):
                self.prefills.work(rank)
        self.elapse(self.script.pick(8) / 8)

    def run(self) -> None:
        while not self.script.ended:
            self.step()
        self.end()

    def end(self) -> None:
        """Peace: whatever was begun must end, and leave nothing behind; and what comes next must succeed."""
        self.calm = True
        for r in range(RANKS):
            while self.prefills.orders[r]:
                self.prefills.work(r)
        self._settle()
        before = self.decodes.outcomes["delivered"]
        self.decodes.fetch(*TRANSFERS[-1], self.source)
        self.prefills.prefill(*TRANSFERS[-1])
        for r in range(RANKS):
            while self.prefills.orders[r]:
                self.prefills.work(r)
        for _ in range(int(START)):  # renewed by the engine that waits for it: its links may have to be made first
            self.elapse(1.0)
            for p in self.producers:
                p.machine.renew(TRANSFERS[-1][0], self.now)
        self._settle()
        check(self.decodes.outcomes["delivered"] == before + RANKS, f"no recovery: {self.decodes.outcomes}")

    def _settle(self) -> None:
        for _ in range(8):
            self.elapse(START + TIMEOUT + self.setting.lease)
        check(self.prefills.ended == self.prefills.released, "outcomes without a release")
        check(not self.prefills.read, f"revoked, and read for ever: {self.prefills.read}")
        check(not self.decodes.wishes, f"fetches that never ended: {list(self.decodes.wishes)}")
        for a in self.agents:
            check(a.machine.corrupt == 0, f"{a.role} {a.rank} found right bytes wrong")
            check(len(a.machine) == 0, f"{a.role} {a.rank} still holds {len(a.machine)} transfers")
            check(a.machine.next_tick() is None, f"{a.role} {a.rank} still waits for something")
            lives = self.prefills.lives[a.rank] if a.role == "producer" else {}
            check(not [x for x in lives.values() if x.told >= 0], "transfers that the engine waits for for ever")
            for life in lives.values():
                a.give(life.blocks)
            lives.clear()
            check(len(a.free) == BLOCKS, "blocks were lost")
