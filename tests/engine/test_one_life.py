"""A block that a load fills is not offered, and one that is offered is not filled: a third engine would take the bytes for good."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvxfer import BlockTable, Config, Group, Rank, Source, TransferId
from kvxfer.engine import Report, ScheduleError, SchedulerSide
from kvxfer.testing.engine import FACTS, PagedEngine
from tests.engine.small import ended
from tests.schedule.ends import Loading

BLOCKS, TOKENS = 8, 4
EMPTY = BlockTable.of([[]])


@pytest.fixture
def three() -> Iterator[tuple[PagedEngine, PagedEngine, PagedEngine]]:
    """A producer, an engine that loads from it and offers what it has, and one that loads from that."""
    with PagedEngine() as p, PagedEngine() as d, PagedEngine() as third:
        for engine in (p, d, third):
            engine.step()
        yield p, d, third


def waits(d: PagedEngine, name: str, p: PagedEngine, blocks: list[int]) -> TransferId:
    """A load of the tokens of these blocks that the producer has not offered yet."""
    ticket = p.ask(name, TOKENS * len(blocks))
    d.load(name, ticket, TOKENS * len(blocks), blocks)
    d.step()
    return ticket.transfer


def test_what_has_not_arrived_is_not_offered(three: tuple[PagedEngine, PagedEngine, PagedEngine]) -> None:
    p, d, third = three
    d.memory.write([1, 2, 3], 99)  # of somebody else
    waits(d, "r", p, [1, 2])
    mine = TransferId.mint(d.scheduler.source.epoch, "r")
    assert d.scheduler.offer("r", mine, b"r", 3 * TOKENS)
    ticket, table = d.scheduler.ticket("r"), BlockTable.of([[1, 2, 3]])
    assert ticket is not None
    told = "request r cannot run with block 1, which the load of request r still fills: run it once that load is over"
    with pytest.raises(ScheduleError, match=told):
        d.scheduler.runs("r", 2 * TOKENS, TOKENS, table)
    d.step()
    third.load("x", ticket, 12, [4, 5, 6])
    third.step()
    p.run("r", b"r", 0, 2 * TOKENS, [5, 6])
    p.step()
    assert "r" in d.until("r").loaded
    d.memory.compute(b"r", [1, 2, 3], 2 * TOKENS, 3 * TOKENS)
    d.scheduler.runs("r", 2 * TOKENS, TOKENS, table)
    d.step()
    assert "x" in third.until("x").loaded
    third.verify()


def test_nothing_is_loaded_into_what_is_offered(three: tuple[PagedEngine, PagedEngine, PagedEngine]) -> None:
    p, d, third = three
    ticket = d.offer("q", 8, [1, 2])
    source = p.offer("r", 8, [5, 6])
    told = "request r cannot load into block 2, which the offer of request q still uses: give each block to one of them"
    with pytest.raises(ScheduleError, match=told):
        d.load("r", source, 8, [2, 3])
    assert d.scheduler.loadable("r", 0) == 0, "it has failed: no tokens will come"
    third.load("x", ticket, 8, [4, 5])
    assert "x" in third.until("x").loaded
    third.verify()
    assert "q" in d.until("q").free
    d.scheduler.finished("r", EMPTY, complete=False)
    again = p.offer("s", 8, [3, 4])
    d.load("s", again, 8, [2, 3])  # now they are free
    assert "s" in d.until("s").loaded
    d.verify()


def test_two_loads_have_blocks_of_their_own(three: tuple[PagedEngine, PagedEngine, PagedEngine]) -> None:
    p, d, _ = three
    waits(d, "r", p, [1, 2])
    with pytest.raises(
        ScheduleError, match="request s cannot load into block 2, which the load of request r still uses"
    ):
        d.load("s", p.offer("s", 8, [5, 6]), 8, [2, 3])


def test_a_prompt_that_ends_in_blocks_of_a_load_is_withdrawn(
    three: tuple[PagedEngine, PagedEngine, PagedEngine],
) -> None:
    p, d, third = three
    waits(d, "r", p, [1, 2])
    ticket = d.ask("q", 2 * TOKENS)
    d.scheduler.runs("q", 0, 2 * TOKENS, BlockTable.of([[3, 4]]))
    assert not d.scheduler.finished("q", BlockTable.of([[3, 1]]), complete=True)
    d.step()
    third.load("x", ticket, 8, [4, 5])
    assert "block 1, which the load of request r still fills" in third.until("x").failed["x"].detail


class Sides(RuleBasedStateMachine):
    """The calls of one scheduler side, whose workers are played, against what the requests hold."""

    def __init__(self) -> None:
        super().__init__()
        self.side = SchedulerSide(Config(), "e", (Group(TOKENS),), 1, FACTS)
        self.names = count()
        self.loads: dict[str, set[int]] = {}
        self.offers: dict[
            str, tuple[TransferId, list[int], int]
        ] = {}  # the table, and how many of its blocks are offered
        self.held: dict[str, tuple[TransferId, list[int]]] = {}

    def teardown(self) -> None:
        self.side.close()

    @property
    def read(self) -> set[int]:
        offered = [table[:n] for _, table, n in self.offers.values()]
        return set().union(*offered, *(table for _, table in self.held.values()))

    @property
    def filled(self) -> set[int]:
        return set().union(*self.loads.values())

    @rule(row=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=3, unique=True), start=st.integers(0, 1))
    def load(self, row: list[int], start: int) -> None:
        name, cached = f"l{next(self.names)}", TOKENS * min(start, len(row) - 1)
        source, tokens, table = Source("127.0.0.1", 1, 1), TOKENS * len(row), BlockTable.of([row])
        self.side.load(name, TransferId.mint(1, name), b"d", source, tokens)
        assert self.side.loadable(name, cached) == tokens - cached
        fills = set(row[cached // TOKENS :])
        if fills & (self.read | self.filled):
            with pytest.raises(ScheduleError, match=f"request {name} cannot load into block .*request [lo]"):
                self.side.allocated(name, table, tokens - cached)
            self.side.finished(name, EMPTY, complete=False)
        else:
            self.side.allocated(name, table, tokens - cached)
            self.loads[name] = fills

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def load_ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.loads)))
        self.side.step()
        number = Loading(self.side.loads.schedule).of(name).fetched  # type: ignore[union-attr]
        update = self.side.report(ended(name, number=number, generation=1))  # type: ignore[arg-type]
        assert update.loaded == {name}
        self.side.finished(name, EMPTY, complete=True)
        del self.loads[name]

    @rule(row=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=3, unique=True))
    def offer(self, row: list[int]) -> None:
        name = f"o{next(self.names)}"
        transfer = TransferId.mint(1, name)
        assert self.side.offer(name, transfer, b"d", TOKENS * len(row))
        self.offers[name] = transfer, row, 0

    @precondition(lambda self: self.offers)
    @rule(data=st.data())
    def runs(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.offers)))
        transfer, row, offered = self.offers[name]
        more = data.draw(st.integers(0, len(row) - offered))
        if set(row[offered : offered + more]) & self.filled:
            with pytest.raises(ScheduleError, match=f"request {name} cannot run with block .*the load of request l"):
                self.side.runs(name, TOKENS * offered, TOKENS * more, BlockTable.of([row]))
        else:
            self.side.runs(name, TOKENS * offered, TOKENS * more, BlockTable.of([row]))
            self.offers[name] = transfer, row, offered + more

    @precondition(lambda self: self.offers)
    @rule(data=st.data(), complete=st.booleans())
    def finish(self, data: st.DataObject, complete: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.offers)))
        transfer, row, offered = self.offers.pop(name)
        held = self.side.finished(name, BlockTable.of([row]), complete)
        assert held == (complete and offered == len(row))
        if held:
            self.held[name] = transfer, row

    @precondition(lambda self: self.offers)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.offers)))
        self.side.preempted(name)
        self.offers[name] = *self.offers[name][:2], 0

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def offer_ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.side.step()
        update = self.side.report(Report(released={self.held[name][0]: {Rank(): 1 << 40}}))
        assert update.free == {name}
        del self.held[name]


TestSides = Sides.TestCase
TestSides.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
