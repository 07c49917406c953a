"""A request that has the name of an earlier one: what is still said about that is not taken for its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from kvxfer.config import Config
from kvxfer.engine import BlockPins, Report, SchedulerSide, Step, Update, WorkerSide
from kvxfer.engine.side_channel import DirectFetches, RankResult
from kvxfer.failures import Failure, FailureKind
from kvxfer.identity import Source, TransferId
from kvxfer.schedule import Cancel, StepCommands
from kvxfer.values import BlockTable, Fetch, Group, Rank
from tests.engine.direct import Switchboard
from tests.engine.small import FACTS, Agent, Lending, Pool, Wire, ended, over

T, U, D, SOURCE = TransferId("own/1", 0), TransferId("own/2", 0), b"digest", Source("127.0.0.1", 1, 1)
A, B = Rank(0, 0), Rank(0, 1)
LOST = Failure(FailureKind.PEER_LOST, "it went away")


@pytest.fixture
def board() -> Switchboard:
    return Switchboard()


@pytest.fixture
def pool() -> Pool:
    return Pool(12)


@pytest.fixture
def two(board: Switchboard, pool: Pool) -> Iterator[SchedulerSide]:
    """The scheduler side of an engine of two ranks with side channels."""
    with mock.patch("kvxfer.engine.dispatch.SideChannel", board.scheduler):
        side = SchedulerSide(Config(), "d", (Group(4),), 2, FACTS, pins=BlockPins(8, pool))
    side.listen_to({rank: board.worker(lambda _: None, list).address for rank in (A, B)})
    side.step()
    yield side
    side.close()


def load(side: SchedulerSide, transfer: TransferId, table: BlockTable) -> int:
    """Begin the load of a request, if it may; return how many tokens are to come."""
    side.load("r", transfer, D, SOURCE, 8)
    external = side.loadable("r", 0)
    assert external is not None
    side.allocated("r", table, external)
    side.step()
    return external


def test_a_load_does_not_begin_before_the_one_before_is_quiet_and_is_not_ended_by_what_is_said_of_that(
    two: SchedulerSide, board: Switchboard, pool: Pool
) -> None:
    """Rank B has said by the side channel alone that it has the first; its step, whose report comes apart from A's, says so again."""
    table = BlockTable.of([pool.take(2)])
    assert load(two, T, table) == 8
    board.late = [RankResult("r", B, 0, 1, None, True)]
    assert two.report(ended("r", A, failure=LOST, quiet=False)).failed == {"r": LOST}
    two.finished("r", table, False)
    assert load(two, U, table) == 0, "it is computed here"
    two.finished("r", table, True)
    assert two.waiting
    two.report(ended("r", A, failure=LOST))
    assert not two.waiting and load(two, U, table) == 8, "now it may"
    assert two.report(ended("r", B, generation=1)) == two.report(Report())
    assert not two.report(ended("r", A, 1, generation=2)).loaded, "B has nothing of it"
    assert two.report(ended("r", B, 1, generation=2)).loaded == {"r"}


def test_what_is_said_of_a_number_under_another_name_ends_no_load(
    two: SchedulerSide, board: Switchboard, pool: Pool
) -> None:
    """Numbers count up from 0 in each scheduler side: what workers say of one before it must not end what is loaded now."""
    table = BlockTable.of([pool.take(2)])
    assert load(two, T, table) == 8
    for rank in (A, B):
        board.late = [RankResult("other", rank, 0, 1, None, True)]
        assert two.report(ended("other", rank, generation=1)) == Update()
    assert not two.report(ended("r", A, generation=1)).loaded
    assert two.report(ended("r", B, generation=1)).loaded == {"r"}


def test_a_cancel_that_comes_late_does_not_hit_the_load_that_has_gone_ahead(board: Switchboard) -> None:
    """Steps overlap: the first load has ended by itself before its cancel is there, and the next one has overtaken that step."""
    agent: Any = Agent(Wire(), [Group(4)], A)
    worker = WorkerSide(agent, channel=board.worker)
    (end,) = board.ends.values()
    table = BlockTable.of([[1, 2]])
    one, two = (Fetch("r", transfer, D, SOURCE, table, 0, 8, number=n) for n, transfer in enumerate((T, U)))
    worker.begin(Step(facts=FACTS))
    worker.load(Step(StepCommands(fetches=(one,))))
    agent.wire.fail(agent.loads["r"], "its peer went away")
    assert over(worker.collect()).keys() == {"r"}
    end.take(DirectFetches((two,)))
    worker.load(Step(StepCommands(cancels=(Cancel(0, "its client left"),))))
    assert not agent.loads["r"].ended
    worker.load(Step(StepCommands(fetches=(two,))))
    worker.load(Step(StepCommands(cancels=(Cancel(1, "its client left"),))))
    assert "r" not in agent.loads and over(worker.collect()).keys() == {"r"}


def test_a_load_beside_the_steps_is_none_within_one_where_an_earlier_one_of_its_name_was(board: Switchboard) -> None:
    """Both in the time of one step: its workers would report the end of a prefetch, for which nobody waits any more."""
    agent: Any = Agent(Wire(), [Group(4)], A)
    worker = WorkerSide(agent, channel=board.worker, copy=lambda src, dst: None)
    with mock.patch("kvxfer.engine.dispatch.SideChannel", board.scheduler):
        side = SchedulerSide(Config(), "d", (Group(4),), 1, FACTS, pins=BlockPins(8, Lending(12)))
    try:
        worker.begin(side.step())
        side.report(worker.collect())
        assert side.load("r", T, D, SOURCE, 8, offered=True) and side.loadable("r", 0) is None
        agent.wire.fail(agent.loads["r"], "its peer went away")
        assert side.loadable("r", 0) == 0, "it was a prefetch, and has failed"
        side.finished("r", BlockTable.of([[]]), False)
        assert (
            side.load("r", U, D, SOURCE, 8, offered=True) and side.loadable("r", 0) == 8 and not side.is_prefetched("r")
        )
        side.allocated("r", BlockTable.of([[1, 2]]), 8)
        worker.load(side.step())
        agent.wire.fail(agent.loads["r"], "its peer went away")
        assert side.report(worker.collect()).failed.keys() == {"r"}
    finally:
        side.close()


def test_nothing_is_offered_under_the_name_of_a_request_whose_blocks_are_held() -> None:
    """An update could not tell whose blocks are free, and what ends at the same time would not be reported at all."""
    side = SchedulerSide(Config(), "p", (Group(4),), 1, FACTS)
    try:
        table = BlockTable.of([[1, 2]])
        assert side.offer("r", T, D, 8)
        side.runs("r", 0, 8, table)
        (offer,) = side.step().commands.offers
        assert side.finished("r", table, True)
        assert not side.offer("r", U, D, 8) and side.ticket("r") is None
        other = BlockTable.of([[3, 4]])
        side.runs("r", 0, 8, other)
        assert not side.finished("r", other, True), "its blocks may be freed"
        assert side.report(Report(released={T: {A: offer.generation}})).free == {"r"}, "those of the first"
        assert side.offer("r", U, D, 8)
        side.finished("r", other, False)
        side.step()
        assert len(side) == 0
    finally:
        side.close()
