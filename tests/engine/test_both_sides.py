"""A request that both engines have: whole sides, agents and directories, and bytes that land while the producer computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvxfer import BlockTable, FailureKind, TransferId
from kvxfer.engine import BlockPins
from tests.engine.small import Pool
from tests.engine.test_memory import TOKENS, Engine

T, DIGEST, HERE, THERE = TransferId("router/job", 0), b"digest", [1, 2, 3, 4], [3, 4, 5, 6]
ALL = TOKENS * len(HERE)


class Both:
    def __init__(self) -> None:
        self.pool = Pool(8)
        self.p, self.d = Engine(BlockPins(8, self.pool)), Engine()
        self.p.turn(), self.d.turn()
        self.arrived: list[int] = []

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not true():
            assert time.monotonic() < end
            self.arrived += self.d.turn().arrived.values()

    def ask(self, enough: int) -> None:
        """D gets the request, and P has it in its queue."""
        more = {"begun": False, "progress": TOKENS, "enough": enough}
        assert self.d.scheduler.load("r", T, DIGEST, self.p.scheduler.source, ALL, **more)
        assert self.p.scheduler.offer("q", T, DIGEST, ALL)
        for _ in range(5):
            self.d.turn()
            assert self.d.scheduler.loadable("r", 0) is None, "nobody has begun with it"

    def compute(self, blocks: int, so_far: int) -> None:
        """P computes some more blocks."""
        self.p.memory[HERE[so_far : so_far + blocks]] = 7 + so_far
        self.p.scheduler.runs("q", TOKENS * so_far, TOKENS * blocks, BlockTable.of([HERE]))
        self.p.turn()

    def begin(self) -> None:
        """P computes its first chunk, upon which D has blocks."""
        self.pool.take(len(self.pool.unused))  # P's request has them
        self.compute(1, 0)
        self.until(lambda: self.d.scheduler.loadable("r", 0) == ALL)
        self.d.scheduler.allocated("r", BlockTable.of([THERE]), ALL)
        self.until(lambda: self.arrived == [TOKENS])
        self.compute(1, 1)
        self.until(lambda: self.arrived == [TOKENS, 2 * TOKENS])

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
    assert (both.d.memory[THERE] == both.p.memory[HERE]).all()


def test_the_consumer_goes_on_from_what_has_come_when_the_producer_gives_up(both: Both) -> None:
    both.ask(TOKENS)
    both.begin()
    assert not both.p.scheduler.finished("q", BlockTable.of([HERE]), complete=False, good=True)
    assert both.p.scheduler.waiting, "its blocks are pinned for whoever reads them"
    both.p.turn()
    update = both.d.until("r")
    assert update.loaded == {"r"} and update.short == {"r": 2 * TOKENS}
    assert (both.d.memory[THERE[:2]] == both.p.memory[HERE[:2]]).all()
    end = time.monotonic() + 30
    while both.p.scheduler.waiting:
        assert time.monotonic() < end
        both.p.turn()


@pytest.mark.parametrize("why", ["it is not good", "it is not enough"])
def test_otherwise_it_has_nothing(both: Both, why: str) -> None:
    both.ask(TOKENS if "good" in why else 3 * TOKENS)
    both.begin()
    both.p.scheduler.finished("q", BlockTable.of([HERE]), complete=False, good="good" not in why)
    both.p.turn()
    failure = both.d.until("r").failed["r"]
    assert failure.kind is FailureKind.WITHDRAWN and "aborted or failed" in failure.detail
