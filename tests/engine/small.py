"""A small paged engine over `kvxfer.engine`, and agents that are played: no sockets, no threads, no clock.

Blocks with reference counts, chunked prefill, windows that give blocks up, preemption, several ranks. Every slot of every
block knows which tokens it was computed from, so that anything wrong shows.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from kvxfer.config import Config
from kvxfer.engine import BlockPins, EngineQueue, Report, SchedulerSide, Ticket, WorkerSide
from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.geometry import Cache, Region
from kvxfer.identity import RequestId, TransferId, new_epoch
from kvxfer.protocol.messages import RankDescriptor
from kvxfer.protocol.values import Ended, Event, GenerationReleased, Released
from kvxfer.schedule import RankResult
from kvxfer.values import NULL, BlockTable, Fetch, Group, Offer, Rank
from tests.engine.direct import Switchboard

FACTS, RANK = {"model": "small"}, Rank()


def ended(request: str, rank: Rank = RANK, number: int = 0, **more: Any) -> Report:
    """What a rank reports with a step of a load that has ended there."""
    result = RankResult(RequestId(request), rank, number, **{"quiet": True, **more})
    return Report(results={(number, rank): result})


def over(report: Report) -> dict[RequestId, Failure | None]:
    """The loads that have ended by a report of one rank, and why if they have failed."""
    return {one.handle: one.failure for one in report.results.values()}


JUNK = ("junk",)


class Pool:
    """A block pool that counts references; block 0 is never handed out."""

    def __init__(self, blocks: int) -> None:
        self.refs = [0] * blocks
        self.unused = list(range(1, blocks))

    def take(self, n: int) -> list[int]:
        taken = [self.unused.pop() for _ in range(n)]  # what was freed last comes first: the worst for late writes
        for block in taken:
            self.refs[block] = 1
        return taken

    def touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self.refs[block], "a block is pinned that nobody uses"
            self.refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self.refs[block], "a block is freed twice"
            self.refs[block] -= 1
            if not self.refs[block]:
                self.unused.append(block)

    def used(self) -> int:
        return sum(map(bool, self.refs))


class Lending(Pool):
    """A pool for prefetches."""

    def lend(self, blocks: int) -> list[int] | None:
        return self.take(blocks)


@dataclass(eq=False)
class Load:
    """One rank's fetch; `offer`: what it reads, once it has begun."""

    fetch: Fetch
    consumer: Agent
    producer: Agent | None = None
    offer: Offer | None = None
    ended: bool = False


@dataclass(eq=False)
class Agent:
    """What `kvxfer.Agent` is to a worker."""

    wire: Wire
    groups: Sequence[Group]
    rank: Rank
    memory: dict[tuple[int, int], Any] = field(default_factory=dict)  # (block, slot) -> the tokens behind it
    offers: dict[TransferId, Offer] = field(default_factory=dict)
    over: dict[TransferId, int] = field(default_factory=dict)
    loads: dict[str, Load] = field(default_factory=dict)
    out: list[Event] = field(default_factory=list)
    renewed: list[TransferId] = field(default_factory=list)
    prepared: list[Any] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    elastic: bool = False
    revoked: dict[TransferId, int] = field(default_factory=dict)  # generations that may still be read

    def __post_init__(self) -> None:
        self.cache = Cache((Region(4096, 4096, elastic=self.elastic),), (), (), self.rank)
        self.descriptor = RankDescriptor("tcp://127.0.0.1:1", new_epoch(), self.cache, ())
        self.wire.agents.append(self)

    def identify(self, facts: dict[str, str]) -> None:
        self.facts = facts

    def offer(self, offer: Offer, after: Any = None) -> None:
        if offer.generation > self.over.get(offer.transfer, -1):
            self.offers[offer.transfer] = offer

    def revoke(self, transfer: TransferId, generation: int, reason: str, gone: bool, *, kept: bool = False) -> None:
        offer = self.offers.get(transfer)
        if offer is not None and offer.generation <= generation:
            del self.offers[transfer]
        if gone and generation > self.over.get(transfer, -1):
            self.end(transfer, generation, Outcome(Failure(FailureKind.WITHDRAWN, reason)))
        elif generation > self.over.get(transfer, -1):
            self.revoked[transfer] = generation
            self.release(transfer)

    def renew(self, transfer: TransferId) -> None:
        self.renewed.append(transfer)

    def prepare(self, source: Any, own: Any = None) -> None:
        self.prepared.append((source, own))

    def fetch(self, fetch: Fetch) -> None:
        assert fetch.handle not in self.loads
        self.loads[fetch.handle] = Load(fetch, self)

    def cancel(self, handle: str, reason: str) -> None:
        if handle in self.loads and not self.loads[handle].ended:
            self.wire.fail(self.loads[handle], reason)

    def listen(self, heard: Any) -> None:
        pass

    def events(self, timeout: float = 0.0) -> list[Event]:
        out, self.out = self.out, []
        return out

    def close(self) -> bool:
        return True

    def end(self, transfer: TransferId, generation: int, outcome: Outcome) -> None:
        """The producer's end of a transfer."""
        self.offers.pop(transfer, None)
        self.over[transfer] = generation
        self.out.append(Ended("producer", transfer, str(transfer), outcome, 0, 0.0, generation))
        self.release(transfer)

    def release(self, transfer: TransferId) -> None:
        read = [load.offer for load in self.wire.loads if load.producer is self and load.fetch.transfer == transfer]
        if transfer in self.over and not read:
            self.out.append(Released("producer", transfer, str(transfer), self.over[transfer]))
        revoked = self.revoked.get(transfer)
        if revoked is not None and all(offer is None or offer.generation > revoked for offer in read):
            del self.revoked[transfer]
            self.out.append(GenerationReleased("producer", transfer, str(transfer), revoked))


class Wire:
    """All agents; what moves between them moves when it is told to."""

    def __init__(self) -> None:
        self.agents: list[Agent] = []
        self.sources: dict[Any, list[Agent]] = {}

    @property
    def loads(self) -> list[Load]:
        return [load for agent in self.agents for load in agent.loads.values()]

    def begin(self, load: Load) -> bool:
        """Join a load with its offer, and move the bytes; False if there is nothing to read yet."""
        fetch = load.fetch
        there = next(a for a in self.sources[fetch.source] if a.rank == load.consumer.rank)
        offer = there.offers.get(fetch.transfer)
        if offer is None and fetch.transfer in there.over:
            self.fail(load, "it is over")
        if load.ended or load.offer is not None or offer is None or not offer.final:
            return load.offer is not None
        assert offer.digest == fetch.digest and offer.tokens >= fetch.tokens
        load.producer, load.offer = there, offer
        for g, group in enumerate(load.consumer.groups):
            src, dst = offer.blocks[g].tolist(), fetch.blocks[g].tolist()
            for position in range(fetch.start, fetch.tokens):
                i, slot = divmod(position, group.block_tokens)
                if dst[i] == NULL:
                    continue
                if src[i] != NULL:
                    load.consumer.memory[dst[i], slot + g * 100] = there.memory.get((src[i], slot + g * 100))
                elif not group.window or position >= fetch.tokens - group.window + 1:
                    self.fail(load, f"no source for token {position}")
                    return True
            if fetch.tail and dst and dst[-1] != NULL:  # what the producer has there is none of ours
                for slot in range(fetch.tokens % group.block_tokens or group.block_tokens, group.block_tokens):
                    load.consumer.memory[dst[-1], slot + g * 100] = JUNK
        return True

    def settle(self, load: Load) -> None:
        """Ask whether what was read still counts."""
        if load.ended or load.offer is None or load.producer is None:
            return
        producer, offer = load.producer, load.offer
        held = producer.offers.get(offer.transfer)
        if held is None or held.generation != offer.generation:
            self.fail(load, "the blocks are not those that were announced")
            return
        load.ended = True
        fetch = load.fetch
        delivered = Ended("consumer", fetch.transfer, fetch.handle, Outcome(), 1, 0.0, offer.generation)
        load.consumer.out.append(delivered)
        self.quiet(load)
        producer.end(offer.transfer, offer.generation, Outcome())

    def fail(self, load: Load, reason: str, quiet: bool = True) -> None:
        """The load fails; unless `quiet`, its blocks may be written to until `quiet` is called."""
        if not load.ended:
            load.ended = True
            outcome, fetch = Outcome(Failure(FailureKind.PEER_LOST, reason)), load.fetch
            load.consumer.out.append(Ended("consumer", fetch.transfer, fetch.handle, outcome, 0, 0.0))
        if quiet:
            self.quiet(load)

    def quiet(self, load: Load) -> None:
        if load.consumer.loads.get(load.fetch.handle) is load:
            del load.consumer.loads[load.fetch.handle]
            load.consumer.out.append(Released("consumer", load.fetch.transfer, load.fetch.handle))
            producer, load.producer = load.producer, None
            if producer is not None:
                producer.release(load.fetch.transfer)

    def scribble(self, load: Load) -> None:
        """Late bytes of a load that has ended and is not quiet."""
        for g, row in enumerate(load.fetch.blocks):
            for block in row[row >= 0].tolist():
                for slot in range(load.consumer.groups[g].block_tokens):
                    load.consumer.memory[block, slot + g * 100] = JUNK


@dataclass(eq=False)
class Request:
    name: str
    prompt: tuple[int, ...]
    extra: int  # tokens that it decodes after its prompt
    table: list[list[int]]
    computed: int = 0
    loading: bool = False
    running: bool = False
    over: bool = False

    def blocks(self) -> list[int]:
        return [b for row in self.table for b in row if b != NULL]


class SmallEngine:
    """One engine: what an author writes around `SchedulerSide` and `WorkerSide`.

    board: it has side channels.
    late: its steps overlap, so that it hears what workers report only after the next step has been planned.
    """

    def __init__(
        self,
        wire: Wire,
        groups: Sequence[Group],
        ranks: int,
        blocks: int,
        early: bool,
        board: Switchboard | None = None,
        elastic: bool = False,
        writes_early: bool = False,
        late: bool = False,
    ) -> None:
        self.wire, self.groups = wire, list(groups)
        self.reports, self.late = [Report()] * late, late
        self.pool = Pool(blocks)
        self.pins = BlockPins(blocks if elastic else blocks // 4, self.pool)
        with mock.patch("kvxfer.engine.dispatch.SideChannel", (board or Switchboard()).scheduler):
            more: dict[str, Any] = {"pins": self.pins, "writes_early": writes_early}
            more["queue"] = EngineQueue(lambda: len(self.waiting), lambda: False)
            self.side = SchedulerSide(Config(), "small", groups, ranks, FACTS, **more)
        self.agents = [Agent(wire, groups, Rank(0, r), elastic=elastic) for r in range(ranks)]
        more = {"quarantine": blocks // 4 if early else 0, "channel": board.worker if board else None}
        self.workers = [WorkerSide(a, **more) for a in self.agents]  # type: ignore[arg-type]
        wire.sources[self.side.source] = self.agents
        self.waiting: list[Request] = []
        self.held: dict[str, Request] = {}
        self.loading: dict[str, Request] = {}
        self.tickets: list[tuple[Ticket, tuple[int, ...]]] = []
        self.done: list[str] = []
        self.failures: dict[str, Failure] = {}
        self.names = itertools.count()

    # Requests

    def add(self, prompt: tuple[int, ...], extra: int = 1, transfer: TransferId | None = None) -> Request:
        """A request; with `transfer` it is prefilled for others."""
        request = Request(f"r{next(self.names)}", prompt, extra, [[] for _ in self.groups])
        self.waiting.append(request)
        if transfer is not None and self.side.offer(request.name, transfer, bytes(prompt), len(prompt)):
            ticket = self.side.ticket(request.name)
            assert ticket is not None
            self.tickets.append((ticket, prompt))
        return request

    def take(self, ticket: Ticket, prompt: tuple[int, ...]) -> Request:
        """A request that another engine prefills."""
        request = self.add(prompt)
        self.side.load(request.name, ticket.transfer, ticket.digest, ticket.source, len(prompt) - 1)
        return request

    def abort(self, request: Request) -> None:
        self.finish(request, complete=False)

    def preempt(self, request: Request) -> None:
        self.side.preempted(request.name)
        self.drop(request)

    def drop(self, request: Request) -> None:
        for row in request.table:
            self.pool.free([b for b in row if b != NULL])
        request.table = [[] for _ in self.groups]
        request.computed, request.running = 0, False

    def finish(self, request: Request, complete: bool) -> None:
        self.waiting.remove(request)
        request.over = True
        self.done.append(request.name)
        if self.side.finished(request.name, BlockTable.of(request.table), complete):
            self.held[request.name] = request
        elif not request.loading:
            self.drop(request)

    # Steps

    def step(self, budget: int) -> None:
        batch = [work for request in list(self.waiting) if (work := self.plan(request, budget)) is not None]
        said = self.side.step()
        if not batch:
            self.side.loads.wait_alone()
        step = pickle.loads(pickle.dumps(said))
        for worker in self.workers:
            worker.begin(step)
            worker.load(step)
        for request, start, end in batch:
            self.forward(request, start, end)
        report = Report()
        for worker in self.workers:
            worker.after_forward(step)
            report = report.merge(pickle.loads(pickle.dumps(worker.collect())))
        self.reports.append(report)
        self.take_in(self.reports.pop(0))
        for request, _, end in batch:
            if not request.over and request.running and end == len(request.prompt) + request.extra:
                self.finish(request, complete=True)

    def hear(self) -> None:
        """Between two steps, take in what came by the side channel."""
        self.take_in(Report())

    def plan(self, request: Request, budget: int) -> tuple[Request, int, int] | None:
        if request.loading:
            return None
        if not request.running and not self.admit(request):
            return None
        end = min(request.computed + budget, len(request.prompt) + request.extra)
        if request.computed < len(request.prompt):
            end = min(end, len(request.prompt))
        start, request.computed = request.computed, end
        for g, group in enumerate(self.groups):  # what is behind a window is given up as the request goes on
            for i in range(self.first(group, start)):
                block, request.table[g][i] = request.table[g][i], NULL
                self.pool.free([block] if block != NULL else [])
        self.side.runs(request.name, start, end - start, BlockTable.of(request.table))
        return request, start, end

    def admit(self, request: Request) -> bool:
        external = self.side.loadable(request.name, 0)
        if external is None:
            return False
        total = len(request.prompt) + request.extra
        first = [self.first(group, external) for group in self.groups]
        need = sum(group.blocks(total) - f for group, f in zip(self.groups, first, strict=True))
        if need > len(self.pool.unused):
            return False
        rows = zip(self.groups, first, strict=True)
        request.table = [[NULL] * f + self.pool.take(group.blocks(total) - f) for group, f in rows]
        self.side.allocated(request.name, BlockTable.of(request.table), external)
        request.running = not external
        if external:
            request.loading, request.computed = True, external
            self.loading[request.name] = request
        return request.running

    def first(self, group: Group, computed: int) -> int:
        """The first position that token `computed` attends to."""
        return max(0, computed - group.window + 1) // group.block_tokens if group.window else 0

    def forward(self, request: Request, start: int, end: int) -> None:
        for agent in self.agents:
            for g, group in enumerate(self.groups):
                for position in range(self.first(group, start) * group.block_tokens, end):
                    i, slot = divmod(position, group.block_tokens)
                    cell, content = (request.table[g][i], slot + g * 100), (g, *self.text(request)[: position + 1])
                    if position >= start:
                        agent.memory[cell] = content
                    elif not group.window or position > start - group.window:
                        found = agent.memory.get(cell)
                        assert found == content, f"{request.name} attends to {found} at {position}, wants {content}"

    def text(self, request: Request) -> tuple[int, ...]:
        return (*request.prompt, *range(100, 100 + request.extra))

    def take_in(self, report: Report) -> None:
        update = self.side.report(report)
        for name in update.free:
            self.drop(self.held.pop(name))
        self.failures |= update.failed
        assert not update.loaded & update.failed.keys()
        for name in [*update.loaded, *update.failed]:
            request = self.loading.pop(name)
            request.loading = False
            if request.over or name in update.failed:
                self.drop(request)
            else:
                request.running = True
