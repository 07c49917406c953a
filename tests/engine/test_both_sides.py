"""A request that both engines have: whole sides, agents and directories, and bytes that land while the producer computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvxfer import BlockTable, FailureKind, TransferId
from kvxfer.engine import BlockPins
from kvxfer.testing.engine import PagedEngine, until
from tests.engine.small import Pool

T, DIGEST, HERE, THERE = TransferId("router/job", 0), b"digest", [1, 2, 3, 4], [3, 4, 5, 6]
TOKENS = 4
ALL = TOKENS * len(HERE)


class Both:
    def __init__(self) -> None:
        self.pool = Pool(8)
        self.p, self.d = PagedEngine({"lease": 600.0}, pins=BlockPins(8, self.pool)), PagedEngine()
        self.p.step(), self.d.step()

    def until(self, true: Callable[[], bool]) -> None:
        until(lambda: self.d.step() and False or true())

    def came(self, blocks: int) -> bool:
        return np.array_equal(self.d.memory.read(THERE[:blocks]), self.p.memory.read(HERE[:blocks]))

    def ask(self, enough: int) -> None:
        """D gets the request, and P has it in its queue."""
        assert self.d.scheduler.load("r", T, DIGEST, self.p.scheduler.source, ALL, begun=False, enough=enough)
        assert self.p.scheduler.offer("q", T, DIGEST, ALL)
        for _ in range(5):
            self.d.step()
            assert self.d.scheduler.loadable("r", 0) is None, "nobody has begun with it"

    def compute(self, blocks: int, so_far: int) -> None:
        """P computes some more blocks."""
        self.p.memory.compute(DIGEST, HERE, TOKENS * so_far, TOKENS * (so_far + blocks))
        self.p.scheduler.runs("q", TOKENS * so_far, TOKENS * blocks, BlockTable.of([HERE]))
        self.p.step()

    def begin(self) -> None:
        """P computes its first chunk, upon which D has blocks."""
        self.pool.take(len(self.pool.unused))  # P's request has them
        self.compute(1, 0)
        self.until(lambda: self.d.scheduler.loadable("r", 0) == ALL)
        self.d.scheduler.allocated("r", BlockTable.of([THERE]), ALL)
        self.until(lambda: self.came(1))
        self.compute(1, 1)
        self.until(lambda: self.came(2))
        (record,) = self.d.worker.agent._runtime.consumer._fetches.values()
        nbytes = self.d.memory.read(THERE[:2]).nbytes
        self.until(lambda: sum(rank.came_bytes for rank in record.rank_fetches) == nbytes)  # its data thread has told

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture
def both() -> Iterator[Both]:
    found = Both()
    yield found
    found.close()


def test_what_is_computed_comes_while_the_rest_is(both: Both) -> None:
    both.ask(0)
    both.begin()
    both.compute(2, 2)
    update = both.d.until("r")
    assert update.loaded == {"r"} and not update.short
    both.d.memory.expect(DIGEST, THERE, 0, ALL)
    both.d.verify()


def test_the_consumer_goes_on_from_what_has_come_when_the_producer_gives_up(both: Both) -> None:
    both.ask(TOKENS)
    both.begin()
    assert not both.p.scheduler.finished("q", BlockTable.of([HERE]), complete=False, good=True)
    assert both.p.scheduler.waiting, "its blocks are pinned for whoever reads them"
    both.p.step()
    update = both.d.until("r")
    assert update.loaded == {"r"} and update.short == {"r": 2 * TOKENS}
    both.d.memory.expect(DIGEST, THERE, 0, 2 * TOKENS)
    both.d.verify()
    until(lambda: both.p.step() and not both.p.scheduler.waiting)


def test_nothing_is_kept_where_an_abort_crosses_the_word_that_all_is_read(both: Both) -> None:
    """The worker has said that nobody reads any more, once and for all, when the scheduler side begins to wait for that."""
    both.ask(0)
    both.begin()
    both.p.scheduler.runs("q", 2 * TOKENS, 2 * TOKENS, BlockTable.of([HERE]))
    both.p.worker.after_forward(both.p.scheduler.step())
    assert both.d.until("r").loaded == {"r"}
    word = both.p.worker.collect()
    while T not in word.released:
        word = word.merge(both.p.worker.collect(timeout=1.0))
    both.p.scheduler.finished("q", BlockTable.of([HERE]), complete=False)
    both.p.scheduler.report(word)
    for _ in range(3):
        both.p.step()
    assert not both.p.scheduler.waiting and len(both.p.scheduler) == 0


def test_so_does_a_producer_whose_request_never_ran(both: Both) -> None:
    both.ask(0)
    both.p.scheduler.finished("q", BlockTable.of([[]]), complete=False)
    while both.p.scheduler.waiting:
        both.p.step()
    both.until(lambda: both.d.scheduler.loadable("r", 0) == ALL)
    both.d.scheduler.allocated("r", BlockTable.of([THERE]), ALL)
    assert both.d.until("r").failed["r"].kind is FailureKind.WITHDRAWN


@pytest.mark.parametrize("why", ["it is not good", "it is not enough"])
def test_otherwise_it_has_nothing(both: Both, why: str) -> None:
    both.ask(TOKENS if "good" in why else 3 * TOKENS)
    both.begin()
    both.p.scheduler.finished("q", BlockTable.of([HERE]), complete=False, good="good" not in why)
    both.p.step()
    failure = both.d.until("r").failed["r"]
    assert failure.kind is FailureKind.WITHDRAWN and "aborted or failed" in failure.detail
