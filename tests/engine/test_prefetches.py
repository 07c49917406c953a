"""Loads within one step: what is copied into a request's blocks, and when it no longer may be."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from kvxfer.config import Config
from kvxfer.engine import BlockPins, Report, SchedulerSide
from kvxfer.engine.side_channel import RankResult
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.values import Stages
from kvxfer.schedule import ScheduleError
from kvxfer.values import BlockTable, Fetch, Group, Rank
from tests.engine.direct import Switchboard
from tests.engine.small import FACTS, Lending

T, U, D, SOURCE = TransferId("own/1", 0), TransferId("own/2", 0), b"digest", Source("127.0.0.1", 1, 1)
RANK = Rank()
TOKENS, BOTH = 8, BlockTable.of([[1, 2]])


class Consumer:
    """The scheduler side of an engine with a side channel and a pool that lends; its only worker is played."""

    def __init__(self, *groups: Group) -> None:
        self.pool, board = Lending(12), Switchboard()
        with mock.patch("kvxfer.engine.dispatch.SideChannel", board.scheduler):
            self.side = SchedulerSide(Config(), "d", groups, 1, FACTS, pins=BlockPins(8, self.pool))
        self.sent: list[Fetch] = []  # what went ahead of its step
        worker = board.worker(lambda direct: self.sent.extend(direct.fetches), list)
        self.side.listen_to({RANK: worker.address})
        self.side.step()  # says the facts

    def load(self, transfer: TransferId = T) -> bool:
        return self.side.load("r", transfer, D, SOURCE, TOKENS, offered=True)

    def come(self, number: int = 0) -> None:
        result = RankResult("r", RANK, number, 1, None, True, Stages(1.0, 2.0))
        self.side.report(Report(results={(number, RANK): result}))

    def admitted(self) -> None:
        """The request is given blocks in the step that is planned."""
        assert self.load() and self.side.loadable("r", 0) is None
        self.come()
        assert self.side.loadable("r", 0) == TOKENS
        self.side.allocated("r", BOTH, TOKENS)

    def over(self) -> None:
        """Nothing is left of it."""
        self.side.finished("r", BlockTable.of([[]]), False)
        self.side.step()
        assert not self.pool.used() and not self.side.waiting and len(self.side) == 0


@pytest.fixture
def d() -> Iterator[Consumer]:
    made = Consumer(Group(4))
    yield made
    made.side.close()


@pytest.mark.parametrize(("local", "within"), [(4, True), (6, False)], ids=["at a block's border", "within a block"])
def test_a_block_that_has_local_tokens_is_not_copied_over(d: Consumer, local: int, within: bool) -> None:
    """The lent block has nothing in front of where its load begins, and would be copied whole."""
    assert d.load()
    d.side.prefetch("r", local)
    if d.sent:
        d.come()
    assert d.side.loadable("r", local) == TOKENS - local and d.side.is_prefetched("r") is within
    d.side.allocated("r", BOTH, TOKENS - local)
    copied = d.side.step().copies
    assert [copy.dst.ids() for copy in copied] == ([(2,)] if within else [])
    assert [(fetch.start, fetch.blocks.ids() == (2,)) for fetch in d.sent] == [(local, not within)]


@pytest.mark.parametrize("told", [None, 0, TOKENS], ids=["not yet", "none", "fewer"])
def test_what_is_not_promised_cannot_be_counted_on(d: Consumer, told: int | None) -> None:
    """Nothing would come, and no report would say so: the request would wait for ever."""
    assert d.load() and d.side.loadable("r", 0) is None
    if told is not None:
        d.come()
        assert d.side.loadable("r", 0) == TOKENS
    if told == 0:
        assert d.side.loadable("r", TOKENS) == 0
    with pytest.raises(ScheduleError, match="can be had|are here"):
        d.side.allocated("r", BlockTable.of([[1, 2, 3]]), TOKENS + bool(told))
    assert d.side.loadable("r", 0) == 0 and not d.side.step().copies
    d.come()
    d.over()


def test_it_is_not_copied_where_there_are_no_blocks(d: Consumer) -> None:
    assert d.load() and d.side.loadable("r", 0) is None
    d.come()
    assert d.side.loadable("r", 0) == TOKENS
    with pytest.raises(ScheduleError, match="no blocks for tokens 0 to 8"):
        d.side.allocated("r", BlockTable.of([[1]]), TOKENS)
    assert not d.side.step().copies
    d.over()


@pytest.mark.parametrize("counted", [7, 6])
def test_fewer_tokens_must_not_need_more_of_a_window(counted: int) -> None:
    """Of the window only what is behind the last token has come; whoever goes on earlier attends to blocks in front of that."""
    d = Consumer(Group(4), Group(2, "window", 3))
    try:
        assert d.load() and d.side.loadable("r", 0) is None
        (fetch,) = d.sent
        assert (fetch.blocks[1] < 0).tolist() == [True, True, True, False]
        d.come()
        assert d.side.loadable("r", 0) == TOKENS
        table = BlockTable.of([[1, 2], [3, 4, 5, 6]])
        with pytest.raises(ScheduleError, match="a window needs more than is here"):
            d.side.allocated("r", table, counted)
        assert not d.side.step().copies
        d.side.finished("r", BlockTable.of([[], []]), False)
        d.side.step()
        assert not d.pool.used() and len(d.side) == 0
    finally:
        d.side.close()


@pytest.mark.parametrize("end", ["aborted", "preempted"])
def test_nothing_is_copied_into_blocks_that_were_taken_away_in_the_same_step(d: Consumer, end: str) -> None:
    """A load of another request may have been given them, and have gone ahead of the step."""
    d.admitted()
    if end == "aborted":
        d.side.finished("r", BOTH, False)
    else:
        d.side.preempted("r")
        assert d.side.loadable("r", 0) == 0
    assert not d.side.step().copies
    d.over()


def test_what_a_step_copies_stays_until_it_has_though_the_request_comes_again(d: Consumer) -> None:
    """Else the copy of the later one, which a step has yet to make, would read blocks that are somebody else's by then."""
    d.admitted()
    assert d.side.step().copies
    d.side.finished("r", BOTH, False)
    assert not d.load(U), "it is computed here"
    assert d.side.loadable("r", 0) == 0 and d.pool.used() == 2
    d.side.finished("r", BOTH, True)
    copied = Report(copied={0: {RANK: 1e-6}})
    d.side.report(copied)
    assert not d.pool.used()
    assert d.load(U) and d.side.loadable("r", 0) is None, "now it may"
    d.come(1)
    assert d.side.loadable("r", 0) == TOKENS
    d.side.allocated("r", BOTH, TOKENS)
    assert d.side.step().copies
    d.side.report(copied)
    assert d.pool.used() == 2, "what is told again of the earlier one says nothing of this one"
    d.side.report(Report(copied={1: {RANK: 1e-6}}))
    d.over()


@pytest.mark.parametrize("end", ["admitted", "aborted", "not needed", "short of blocks"])
def test_a_sibling_waits_until_what_is_here_is_in_the_cache_or_given_up(d: Consumer, end: str) -> None:
    """The engine may put off one that it could admit, for what it can copy in a step. The next in line would compute the whole prompt."""
    assert d.load() and d.side.loadable("r", 0) is None
    assert d.side.load("s", T, D, SOURCE, TOKENS, offered=True) and d.side.loadable("s", 0) is None
    d.come()
    assert d.side.loadable("s", 0) is None
    if end == "admitted":
        assert d.side.loadable("r", 0) == TOKENS
        d.side.allocated("r", BOTH, TOKENS)
    elif end == "aborted":
        d.side.finished("r", BlockTable.of([[]]), False)
    elif end == "not needed":
        d.side.allocated("r", BOTH, 0)
    else:
        d.side.short_of_blocks()
    assert d.side.loadable("s", 0) == 0
