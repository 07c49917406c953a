"""Two small engines over `kvxfer.engine`, driven through all that happens to an engine, in any order."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvxfer.config import Config
from kvxfer.engine import BlockPins, Report, SchedulerSide
from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.identity import Source, TransferId
from kvxfer.ticket import Ticket
from kvxfer.values import BlockTable, Group, Rank
from tests.engine.direct import Switchboard
from tests.engine.small import FACTS, Pool, Request, SmallEngine, Wire, ended

FULL, HYBRID = [Group(4)], [Group(4), Group(2, "window", 5)]
LOST, CUT = Failure(FailureKind.PEER_LOST, "first"), Failure(FailureKind.CORRUPT, "then")
PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)


class Machine(RuleBasedStateMachine):
    """Whatever happens: nobody attends to another's bytes, no block leaks, and both sides forget all."""

    @initialize(
        groups=st.sampled_from([FULL, HYBRID]),
        ranks=st.integers(1, 2),
        early=st.booleans(),
        direct=st.booleans(),
        elastic=st.booleans(),
        writes_early=st.booleans(),
        late=st.booleans(),
    )
    def start(
        self, groups: list[Group], ranks: int, early: bool, direct: bool, elastic: bool, writes_early: bool, late: bool
    ) -> None:
        self.wire, self.elastic = Wire(), elastic
        board = Switchboard() if direct else None
        self.p, self.d = (
            SmallEngine(self.wire, groups, ranks, 24, early, board, elastic, writes_early, late) for _ in "pd"
        )
        self.engines = self.p, self.d
        self.transfers = 0

    @property
    def alive(self) -> list[tuple[SmallEngine, Request]]:
        return [(e, r) for e in self.engines for r in e.waiting]

    soon = st.integers(0, 4)  # steps that follow at once

    @rule(length=st.integers(2, 12), extra=st.integers(1, 6), soon=soon)
    def prefill(self, length: int, extra: int, soon: int) -> None:
        self.transfers += 1
        prompt = tuple((self.transfers + i) % 7 for i in range(length))
        self.p.add(prompt, extra, TransferId(f"own/{self.transfers}", 0))
        self.step(0, 4, soon)

    @precondition(lambda self: self.p.tickets)
    @rule(data=st.data(), soon=soon)
    def decode(self, data: st.DataObject, soon: int) -> None:
        self.d.take(*data.draw(st.sampled_from(self.p.tickets)))
        self.step(1, 4, soon)

    @precondition(lambda self: any(r.running and r.computed > 1 for r in self.p.waiting))
    @rule(data=st.data(), back=st.integers(0, 2), soon=soon)
    def computed(self, data: st.DataObject, back: int, soon: int) -> None:
        """What a request has computed and generated so far is offered as it is, whatever becomes of the request."""
        request = data.draw(st.sampled_from([r for r in self.p.waiting if r.running and r.computed > 1]))
        tokens = max(2, request.computed - (back if len(self.p.groups) == 1 else 0))
        text = self.p.text(request)[:tokens]
        self.transfers += 1
        what = TransferId(f"own/{self.transfers}", 0), bytes(text), tokens, BlockTable.of(request.table)
        offered = self.p.side.offers.computed(*what)
        assert self.p.side.offers.computed(*what) == offered
        if offered:
            self.p.tickets.append((Ticket(*what[:2], self.p.side.source, tokens), text))
        self.step(0, 4, soon)

    @rule(which=st.integers(0, 1), budget=st.integers(1, 12), times=st.integers(1, 3))
    def step(self, which: int, budget: int, times: int) -> None:
        for _ in range(times):
            for load in self.wire.loads:
                if load.ended:
                    self.wire.scribble(load)
            self.engines[which].step(budget)

    @rule()
    def hear(self) -> None:
        self.d.hear()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        engine, request = data.draw(st.sampled_from(self.alive))
        engine.abort(request)

    @precondition(lambda self: any(r.running for _, r in self.alive))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        engine, request = data.draw(st.sampled_from([(e, r) for e, r in self.alive if r.running]))
        engine.preempt(request)
        engine.step(1)  # as an engine does, before anybody hears of it otherwise

    @precondition(lambda self: self.wire.loads)
    @rule(data=st.data(), what=st.sampled_from(["begin", "settle", "settle", "fail", "break", "quiet"]))
    def move(self, data: st.DataObject, what: str) -> None:
        load = data.draw(st.sampled_from(self.wire.loads))
        if what == "begin":
            self.wire.begin(load)
        elif what == "settle":
            self.wire.begin(load)
            self.wire.settle(load)
        elif what in ("fail", "break"):
            self.wire.fail(load, "the network broke", quiet=what == "fail")
        elif what == "quiet" and load.ended:
            self.wire.quiet(load)

    @rule()
    def lease_ends(self) -> None:
        for agent in self.p.agents:
            for transfer, offer in list(agent.offers.items()):
                agent.end(transfer, offer.generation, Outcome(Failure(FailureKind.UNFETCHED, "nobody fetched it")))

    @invariant()
    def blocks_have_owners(self) -> None:
        for engine in self.engines:
            owned = [b for r in [*engine.waiting, *engine.held.values(), *engine.loading.values()] for b in r.blocks()]
            assert sum(engine.pool.refs) == len(set(owned)) + len(engine.pins)

    @invariant()
    def what_is_read_has_memory(self) -> None:
        """In an elastic cache a block has memory only as long as somebody holds it."""
        for load in self.wire.loads if self.elastic else ():
            if load.producer is not None and load.offer is not None:
                assert all(self.p.pool.refs[b] for b in load.offer.blocks.ids()), (
                    f"{load.offer} is read and has no memory"
                )

    def teardown(self) -> None:
        try:
            self.ends()
        finally:  # hypothesis plays many more histories of one that fails
            for engine in self.engines:
                engine.side.close()

    def ends(self) -> None:
        for engine, request in self.alive:
            engine.abort(request)
        for _ in range(3):
            for engine in self.engines:
                engine.step(4)
            for load in self.wire.loads:
                self.wire.fail(load, "the end")
            self.lease_ends()
        for engine in self.engines:
            for _ in range(1 + engine.late):
                engine.step(1)
            assert len(engine.side) == 0 and not engine.pool.used() and not engine.side.waiting
            assert all(len(worker) == 0 for worker in engine.workers)


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = settings(
    max_examples=int(os.environ.get("KVXFER_EXAMPLES", "30")),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),  # each example opens two directories, which takes what it takes
)


@pytest.fixture
def pair() -> Any:
    wire = Wire()
    engines = [SmallEngine(wire, HYBRID, 2, 64, True) for _ in "pd"]
    yield wire, *engines
    for engine in engines:
        engine.side.close()


def offered(p: SmallEngine, extra: int = 1, name: str = "own/1") -> tuple[Any, tuple[int, ...]]:
    p.add(PROMPT, extra, TransferId(name, 0))
    for _ in range(12):
        p.step(4)
    return p.tickets[-1]


def test_the_end_of_a_window_stays_pinned_when_the_request_is_aborted(pair: Any) -> None:
    """The engine has given these blocks up and only we hold them: a pool that drops them first has nothing left to pin."""
    _, p, _ = pair
    request = p.add(PROMPT, 30, TransferId("own/1", 0))
    while request.computed < 25:
        p.step(4)
    (offer,) = p.agents[0].offers.values()
    given_up = set(offer.blocks.ids()) - set(request.blocks())
    assert given_up, "the window has not moved past what is offered"
    p.abort(request)
    assert all(p.pool.refs[b] for b in offer.blocks.ids())
    p.step(1)
    p.step(1)
    assert not p.pool.used()


def test_what_may_still_be_written_is_not_reused(pair: Any) -> None:
    wire, p, d = pair
    request = d.take(*offered(p))
    d.step(4)
    loads = wire.loads
    for load in loads:
        wire.fail(load, "the network broke", quiet=False)
    d.step(1)
    assert not request.loading and d.side.waiting
    assert d.failures[request.name].kind is FailureKind.PEER_LOST
    written = {b for load in loads for b in load.fetch.blocks.ids()}
    assert written and all(d.pool.refs[b] for b in written), "they may be handed out while they are written to"
    d.step(4)
    for load in loads:
        wire.scribble(load)
        wire.quiet(load)
    for _ in range(4):
        d.step(4)
    assert request.over and not d.side.waiting and not d.pool.used()


def test_a_load_that_still_writes_is_not_over_where_nothing_pins_its_blocks() -> None:
    """Whoever let workers quarantine blocks, and gave no pool to pin them in, would use them again under a late write."""
    side, a, b = SchedulerSide(Config(), "x", [Group(4)], 2, FACTS), Rank(0, 0), Rank(0, 1)
    try:
        assert side.load("r", TransferId("own/1", 0), b"d", Source("h", 1, 1), 4)
        side.allocated("r", BlockTable.of([[1]]), side.loadable("r", 0) or 0)
        early = ended("r", a, failure=LOST, quiet=False)
        assert not side.report(early).failed and not side.report(ended("r", b)).failed
        assert side.report(ended("r", a, failure=LOST)).failed == {"r": LOST}
        side.finished("r", BlockTable.of([[1]]), False)
        side.step()
        assert len(side) == 0
    finally:
        side.close()


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "plain"])
def test_what_is_preempted_has_memory_until_nobody_reads_it(elastic: bool) -> None:
    """An elastic cache unmaps what is freed, at once. Elsewhere the engine needs the room, and late bytes are revoked."""
    wire = Wire()
    p, d = (SmallEngine(wire, FULL, 2, 64, True, elastic=elastic) for _ in "pd")
    try:
        request = p.add(PROMPT, 9, TransferId("own/1", 0))
        while not any(offer.final for offer in p.agents[0].offers.values()):
            p.step(4)
        d.take(*p.tickets[0])
        d.step(4)
        for load in wire.loads:
            assert wire.begin(load)
        read = {b for load in wire.loads if load.offer is not None for b in load.offer.blocks.ids()}
        p.preempt(request)
        assert len(read) == 3 and all(bool(p.pool.refs[b]) is elastic for b in read)
        for _ in range(3):
            p.step(4)
        assert request.running and len(p.pins) == (6 if elastic else 0), "what was read, and what it has now"
        (one, other) = wire.loads
        wire.settle(one)
        p.step(1)
        assert all(p.pool.refs[b] for b in read) or not elastic, "the other rank still reads"
        wire.settle(other)
        p.step(1)
        assert len(p.pins) == (3 if elastic else 0) and not any(p.pool.refs[b] for b in read - set(request.blocks()))
    finally:
        p.side.close()
        d.side.close()


def test_what_is_offered_anew_is_held_until_ranks_that_were_done_before_are_done_with_it() -> None:
    """A lease has ended, which the scheduler side hears only once the request, preempted meanwhile, has been offered again."""
    wire = Wire()
    p, d = (SmallEngine(wire, FULL, 1, 64, True, elastic=True, late=late) for late in (True, False))
    try:
        p.step(4)
        request = p.add(PROMPT, 0, TransferId("own/1", 0))
        p.step(4)
        (first,) = p.agents[0].offers.values()
        p.agents[0].end(first.transfer, first.generation, Outcome(LOST))
        p.preempt(request)
        p.step(9)
        assert p.held and p.agents[0].offers[first.transfer].final
        d.take(*p.tickets[0])
        d.step(4)
        (load,) = wire.loads
        assert wire.begin(load) and load.offer is not None
        read = load.offer.blocks.ids()
        p.step(1)
        assert all(p.pool.refs[b] for b in read)
        p.step(1)
        wire.settle(load)
        for _ in range(3):
            p.step(1)
        assert not p.held and not p.pool.used() and len(p.side) == 0
    finally:
        p.side.close()
        d.side.close()


@pytest.mark.parametrize("end", ["preempted", "aborted", "withdrawn"])
@pytest.mark.parametrize("writes_early", [True, False], ids=["early", "behind"])
def test_what_is_offered_whole_outlasts_the_step_that_revokes_it(writes_early: bool, end: str) -> None:
    """That step may write to blocks that it is given before its workers hear that others must not trust them any more."""
    pool = Pool(8)
    pins = BlockPins(0, pool)  # an abort finds no room to keep them for longer
    side = SchedulerSide(Config(), "x", FULL, 1, FACTS, pins=pins, writes_early=writes_early)
    try:
        blocks = pool.take(3)
        table, transfer = BlockTable.of([blocks]), TransferId("own/1", 0)
        assert side.offer("r", transfer, b"d", 9)
        side.runs("r", 0, 8, table)
        side.step()
        assert not len(pins), "nobody is delivered a part of it"
        side.runs("r", 8, 1, table)
        (offer,) = side.step().commands.offers
        assert offer.final
        if end == "aborted":
            side.finished("r", table, False)
        elif end == "withdrawn":
            side.withdraw_all("other weights")
        pool.free(blocks)
        assert pool.used() == (3 if writes_early else 0)  # what the step may be given now
        if end != "aborted":
            side.preempted("r")
        assert side.step().commands.revokes
        assert not pool.used() and not side.waiting
        side.finished("r", BlockTable.of([[]]), False)
        side.step()
        assert len(side) == 0
    finally:
        side.close()


def test_ranks_that_were_delivered_different_generations_have_not_loaded(pair: Any) -> None:
    _, p, d = pair
    d.take(*offered(p))
    d.step(4)
    (name,) = d.loading
    ranks = [Rank(0, 0), Rank(0, 1)]
    assert not d.side.report(ended(name, ranks[0], generation=1)).failed
    update = d.side.report(ended(name, ranks[1], generation=2))
    assert update.failed[name].kind is FailureKind.REVOKED and not update.loaded


def test_what_the_side_channel_has_said_is_not_said_again(pair: Any) -> None:
    """Neither by a step, nor of a later load that has the same name."""
    wire, p, _ = pair
    board = Switchboard()
    d = SmallEngine(wire, HYBRID, 2, 64, True, board)
    try:
        d.step(4)  # its workers introduce themselves
        ticket = offered(p)
        for _ in range(2):
            d.names = itertools.count()
            request = d.take(*ticket)
            d.step(4)
            said = board.said
            board.late, board.said = said, []
            assert d.side.report(Report()).loaded == set(), "nothing has come yet for this one"
            for load in wire.loads:
                wire.begin(load)
                wire.settle(load)
            d.hear()
            assert not request.loading and len(board.said) == 2
            ticket = offered(p, name="own/2")
            for _ in range(4):
                d.step(4)
            assert request.over and len(d.side) == 0
    finally:
        d.side.close()


def test_a_load_is_as_long_as_on_the_rank_that_has_least(pair: Any) -> None:
    _, p, d = pair
    d.take(*offered(p))
    d.step(4)
    (name,) = d.loading
    a, b = Rank(0, 0), Rank(0, 1)
    assert not d.side.report(ended(name, a, generation=1, short=6)).loaded
    update = d.side.report(ended(name, b, generation=1, short=4))
    assert update.loaded == {name} and update.short == {name: 4}


@pytest.mark.parametrize("held", [True, False])
def test_a_rank_that_is_done_twice_is_forgotten(held: bool) -> None:
    """Its reader gave up a generation; what replaced that was read from the other rank, and is then over on this one, too."""
    side = SchedulerSide(Config(), "p", FULL, 2, FACTS)
    try:
        transfer, a, b = TransferId("router/1", 0), Rank(0, 0), Rank(0, 1)
        table = BlockTable.of([[1, 2]])
        side.offer("r", transfer, b"digest", 8)
        side.runs("r", 0, 8, table)
        (first,) = side.step().commands.offers
        assert not side.report(Report(released={transfer: {b: first.generation}})).free
        side.preempted("r")
        side.runs("r", 0, 8, table)
        (second,) = side.step().commands.offers
        if held:
            assert side.finished("r", table, True)
        assert not side.report(Report(released={transfer: {a: second.generation}})).free
        assert side.report(Report(released={transfer: {b: second.generation}})).free == ({"r"} if held else set())
        if not held:
            assert not side.finished("r", table, True)
        assert side.step().commands.revokes and len(side) == 0
    finally:
        side.close()


def test_workers_hear_of_other_weights_and_offers_are_withdrawn(pair: Any) -> None:
    _, p, _ = pair
    offered(p)
    assert p.agents[0].facts == FACTS
    assert not p.side.withdraw_all("other weights"), "blocks are in use"
    p.step(1)
    p.step(1)
    assert p.side.withdraw_all("other weights")
    p.side.identify({"model": "other"})
    p.step(1)
    assert p.agents[0].facts == {"model": "other"} and not p.agents[0].offers


def test_reports_merge_rank_by_rank() -> None:
    t, a, b = TransferId("own/1", 0), Rank(0, 0), Rank(0, 1)
    one = Report(released={t: {a: 1}}).merge(ended("r", a, failure=LOST, quiet=False)).merge(ended("s", a, 1))
    two = Report(released={t: {b: 2}}).merge(ended("r", a, failure=LOST)).merge(ended("r", b))
    both = one.merge(two)
    assert both.released == {t: {a: 1, b: 2}}
    assert {key: one.failure for key, one in both.results.items()} == {(0, a): LOST, (0, b): None, (1, a): None}
    assert both.results[0, a].quiet, "what comes later counts"
    assert both and not Report() and Report().merge(one) == one


def test_pins_hold_what_was_freed_up_to_their_limit() -> None:
    pool = Pool(9)
    blocks = pool.take(6)
    pins = BlockPins(4)
    assert not pins.keep("h", blocks), "there is no pool yet"
    pins.bind(pool)
    assert pins.hold("a", blocks[:3]) and not pins.hold("b", blocks[3:5]) and pins.keep("c", blocks[:1])
    pool.free(blocks)
    assert pool.used() == 3 and len(pins) == 4 and not pins.pool_unused
    for holder in "abc":
        pins.drop(holder)
    assert pins.pool_unused and len(pins) == 0
