"""The workers' agents, played: who offers what, who wants what, and bytes that move when a test says so.

A `Wire` joins the agents of several engines. By itself it does what a healthy network does, a little with every step;
a test that wants to see the middle of something pauses it and calls `read`, `settle`, `fail` and `quiet` itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from kvxfer.control.link import LinkStatus
from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.geometry import Cache, Rank, Region
from kvxfer.identity import TransferId, new_epoch
from kvxfer.protocol.messages import RankDescriptor
from kvxfer.protocol.values import Ended, Event, GenerationReleased, Released, Stages, Stats
from kvxfer.values import Fetch, Offer

JUNK = -1


@dataclass(eq=False)
class Load:
    """One fetch of one rank. `agent` is the consumer's; `producer` whom it reads from, once it does."""

    fetch: Fetch
    agent: Agent
    producer: Agent | None = None
    offer: Offer | None = None
    ended: bool = False


@dataclass(eq=False)
class Agent:
    """What `kvxfer.Agent` is to the connector, without sockets, threads or a clock."""

    wire: Wire
    engine: Any
    rank: Rank
    offers: dict[TransferId, Offer] = field(default_factory=dict)
    over: dict[TransferId, int] = field(default_factory=dict)
    loads: dict[str, Load] = field(default_factory=dict)
    renewed: list[TransferId] = field(default_factory=list)
    prepared: list[Any] = field(default_factory=list)
    revoked: list[tuple[TransferId, bool, str]] = field(default_factory=list)
    given_up: dict[TransferId, int] = field(default_factory=dict)  # generations that may still be read
    unwanted: set[TransferId] = field(default_factory=set)  # dropped before they were offered
    out: list[Event] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    readers: Counter[TransferId] = field(default_factory=Counter)  # how many have read what is offered
    loaded: int = 0  # tokens that were delivered here
    said: Stats = Stats(fetches=0, offers=0, quarantined_bytes=0, corrupt=0, direct=0, staged=0)

    def links(self) -> list[LinkStatus]:
        return []

    def stats(self) -> Stats:
        return self.said

    def __post_init__(self) -> None:
        self.cache = Cache((Region(4096, 4096, elastic=self.engine.elastic),), (), (), self.rank)
        self.descriptor = RankDescriptor("tcp://127.0.0.1:1", new_epoch(), self.cache, ())

    # What the connector calls

    def offer(self, offer: Offer, after: Any = None) -> None:
        if offer.generation > self.over.get(offer.transfer, -1):
            self.offers[offer.transfer] = offer
            self.enough(offer.transfer)
            if offer.transfer in self.unwanted and offer.transfer not in self.over:
                self._over(offer.transfer, offer.generation, Outcome(Failure(FailureKind.CANCELLED, "nobody wants it")))

    def revoke(self, transfer: TransferId, generation: int, reason: str, gone: bool, *, kept: bool = False) -> None:
        self.revoked.append((transfer, gone, reason))
        offer = self.offers.get(transfer)
        wanted = [x for x in self.wire.loads() if self.wire.peer(x) is self and x.fetch.transfer == transfer]
        if kept and offer is not None and offer.generation == generation and any(not x.ended for x in wanted):
            self.offers[transfer] = replace(offer, final=True)  # for those who have asked for it
            return
        if offer is not None and offer.generation <= generation:
            del self.offers[transfer]
        if gone and generation > self.over.get(transfer, -1):
            self._over(transfer, generation, Outcome(Failure(FailureKind.WITHDRAWN, reason)))
        elif not gone:
            self.given_up[transfer] = generation
            self._release(transfer)

    def identify(self, facts: dict[str, str]) -> None:
        self.facts = facts

    def renew(self, transfer: TransferId) -> None:
        self.renewed.append(transfer)

    def prepare(self, source: Any, own: Any = None) -> None:
        self.prepared.append((source, own))

    def fetch(self, fetch: Fetch) -> None:
        assert fetch.handle not in self.loads, f"{fetch.handle} is wanted twice"
        load = self.loads[fetch.handle] = Load(fetch, self)
        producer = self.wire.peer(load)
        if producer is not None:
            producer.unwanted.discard(fetch.transfer)

    def cancel(self, handle: str, reason: str) -> None:
        load = self.loads.get(handle)
        if load is not None and not load.ended:
            self.end(load, Outcome(Failure(FailureKind.CANCELLED, reason)))
            if load.producer is None:
                self.quiet(load)

    def listen(self, heard: Any) -> None:
        pass

    def events(self, timeout: float = 0.0) -> list[Event]:
        out, self.out = self.out, []
        return out

    def close(self) -> bool:
        return True

    def drain(self, timeout: float) -> bool:
        return True

    # What a test or the wire does

    def end(self, load: Load, outcome: Outcome, generation: int = -1, short: int | None = None) -> None:
        """The load's outcome, of a generation; if that is bad, its producer hears that nobody reads any more.

        Unless the two engines do not fit, which is found out before there is a link to ask over.
        """
        load.ended = True
        producer, asked = self.wire.peer(load), outcome.kind is not FailureKind.INCOMPATIBLE
        if producer is not None and outcome.failure is not None and asked:
            producer.dropped(load.fetch, outcome.failure)
        named, stages = (load.fetch.transfer, load.fetch.handle, outcome), Stages(1.0, float(asked))
        self.out.append(Ended("consumer", *named, 1, 0.01, generation, stages=stages, short=short))

    def quiet(self, load: Load) -> None:
        """Nothing touches the load's blocks any more, nor those that it read."""
        del self.loads[load.fetch.handle]
        self.out.append(Released("consumer", load.fetch.transfer, load.fetch.handle))
        producer, load.producer = load.producer, None
        if producer is not None:
            producer._release(load.fetch.transfer)

    def dropped(self, fetch: Fetch, why: Failure) -> None:
        """Its reader has given it up."""
        offer = self.offers.get(fetch.transfer)
        if offer is None:
            self.unwanted.add(fetch.transfer)
        elif offer.digest == fetch.digest:  # else it meant something else by that name
            self._over(offer.transfer, offer.generation, Outcome(why))

    def enough(self, transfer: TransferId) -> None:
        """An offer is over once as many have read it as it is for."""
        offer = self.offers[transfer]
        if self.readers[transfer] >= offer.consumers:
            del self.readers[transfer]
            self._over(transfer, offer.generation, Outcome())

    def lease_ends(self) -> None:
        """Nobody has asked in time for what is still offered."""
        for offer in list(self.offers.values()):
            why = Failure(FailureKind.UNFETCHED, "it was not fetched within the lease")
            self._over(offer.transfer, offer.generation, Outcome(why))

    def _over(self, transfer: TransferId, generation: int, outcome: Outcome) -> None:
        self.over[transfer] = generation
        self.offers.pop(transfer, None)
        self.out.append(Ended("producer", transfer, str(transfer), outcome, 1, 0.01, generation))
        self._release(transfer)

    def _release(self, transfer: TransferId) -> None:
        read = [load.offer for load in self.wire.reading(self) if load.fetch.transfer == transfer]
        if transfer in self.over and not read:
            self.out.append(Released("producer", transfer, str(transfer), self.over[transfer]))
        given_up = self.given_up.get(transfer)
        if given_up is not None and all(offer is None or offer.generation > given_up for offer in read):
            del self.given_up[transfer]
            self.out.append(GenerationReleased("producer", transfer, str(transfer), given_up))


class Wire:
    def __init__(self) -> None:
        self.agents: list[Agent] = []
        self.paused = False
        self.failed: list[str] = []  # why loads have failed

    def reading(self, producer: Agent) -> list[Load]:
        return [load for a in self.agents for load in a.loads.values() if load.producer is producer]

    def peer(self, load: Load) -> Agent | None:
        """Whom a load reads from, if there is such a one."""
        return next((a for a in self.agents if a.rank == load.agent.rank and a.engine.is_at(load.fetch.source)), None)

    def loads(self, engine: Any = None) -> list[Load]:
        return [load for a in self.agents if engine in (None, a.engine) for load in a.loads.values()]

    def pump(self) -> None:
        """Serve whatever can be served."""
        if self.paused:
            return
        for load in self.loads():
            if not load.ended and self.read(load):
                self.settle(load)

    def begin(self, load: Load) -> bool:
        """Join a load with its offer: from now on bytes may move. False: there is nothing to read yet, or never."""
        peer = self.peer(load)
        transfer = load.fetch.transfer
        if peer is None:
            return self.fail(load, "no such engine")
        offer = peer.offers.get(transfer)
        if offer is None:
            return self.fail(load, "it is over") if transfer in peer.over else False
        if offer.digest != load.fetch.digest:
            return self.fail(load, "the digests differ")
        if not offer.final:
            return False
        if offer.tokens < (load.fetch.enough or load.fetch.tokens):
            return self.fail(load, "it was given up")
        load.producer, load.offer = peer, offer
        return True

    def read(self, load: Load) -> bool:
        """Move the bytes, as they are in the producer's memory now."""
        if load.producer is None and not self.begin(load):
            return False
        assert load.producer is not None and load.offer is not None
        src, dst = load.producer.engine, load.agent.engine
        fetch = load.fetch
        if any(group.state or group.ring for group in dst.groups) and load.offer.tokens != fetch.tokens:
            return self.fail(load, "the state is that after another token")
        for layer, g in dst.layers.items():
            group, to = dst.groups[g], fetch.blocks[g]
            if group.local:
                assert not len(to), f"a table for {layer}, which stays local"
            if group.local or layer not in src.layers:
                continue
            of = load.offer.blocks[src.layers[layer]]
            if group.ring:
                assert len(of) == len(to) == 1, "a ring is in one block"
                dst.memory[to[0]] = src.memory[of[0]]
                continue
            if group.state:
                there = of[(fetch.tokens - 1) // src.groups[src.layers[layer]].block]
                here = to[(fetch.tokens - 1) // group.block]
                assert max(of) == there and max(to) == here, "a state after fewer tokens is listed"
                dst.memory[here, 0] = src.memory[there, 0]
                continue
            first = max(fetch.start, group.first(fetch.tokens))
            for position in range(fetch.start, min(fetch.tokens, load.offer.tokens)):
                (i, slot), (j, its) = divmod(position, dst.block), divmod(position, src.block)
                if to[i] < 0:
                    continue
                there = of[j] if j < len(of) else -1
                if there >= 0:
                    dst.memory[to[i], slot] = src.memory[there, its]
                elif position >= first:
                    return self.fail(load, f"no source block for token {position} of {layer}")
            if fetch.tail and fetch.tokens % dst.block and to[-1] >= 0:
                dst.memory[to[-1], fetch.tokens % dst.block :] = JUNK  # what the producer has there is none of ours
        return True

    def settle(self, load: Load) -> bool:
        """The bytes are there: ask the producer whether they still count."""
        peer, offer = load.producer, load.offer
        assert peer is not None and offer is not None
        held = peer.offers.get(offer.transfer)
        if held is None or held.generation != offer.generation:
            return self.fail(load, "the producer's blocks are not those that were announced")
        load.agent.end(load, Outcome(), offer.generation, offer.tokens if offer.tokens < load.fetch.tokens else None)
        load.agent.quiet(load)
        load.agent.loaded += min(offer.tokens, load.fetch.tokens) - load.fetch.start
        peer.readers[offer.transfer] += 1
        peer.enough(offer.transfer)
        return True

    def fail(self, load: Load, reason: str, quiet: bool = True, kind: FailureKind = FailureKind.PEER_LOST) -> bool:
        """The load fails. Unless `quiet`, its blocks may still be written to until `quiet`
        is called."""
        if not load.ended:
            self.failed.append(reason)
            load.agent.end(load, Outcome(Failure(kind, reason)))
        if quiet:
            self.quiet(load)
        return False

    def quiet(self, load: Load) -> None:
        load.agent.quiet(load)

    def scribble(self, load: Load) -> None:
        """A late write: bytes of an ended load arrive all the same."""
        for row in load.fetch.blocks:
            for block in row:
                if block >= 0:
                    load.agent.engine.memory[block] = JUNK
