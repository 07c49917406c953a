"""An engine whose cache goes and comes back as a whole: nothing moves through what was, and all goes on afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.engine import Report, Step, WorkerSide
from kvxfer.errors import ArgumentError, KvxferError
from kvxfer.failures import FailureKind
from kvxfer.geometry import Cache, Group, Region, View
from kvxfer.identity import TransferId
from kvxfer.schedule import StepCommands
from kvxfer.testing.engine import PagedEngine, until
from kvxfer.values import BlockTable, Fetch, Offer, Rank
from tests.data.elastic_pages import PAGE, ElasticPages
from tests.engine.small import over

BLOCKS, TOKENS = 8, 4
GONE = {FailureKind.PEER_LOST, FailureKind.PEER_UNREACHABLE, FailureKind.NO_SUCH_ENGINE}
"""Whether a connection ends first, or a new one is refused, is the network's business."""
SETTINGS = {"transfer_timeout": 20.0, "peer_timeout": 20.0, "staging_bytes": 1 << 20}


class Worker:
    """A worker over a cache that can be unmapped and mapped anew."""

    def __init__(self, backend: str) -> None:
        self.pages, self._config = ElasticPages(BLOCKS, BLOCKS), Config.from_mapping({"backend": backend, **SETTINGS})
        view = View("kv", 0, ("a",), (0,), BLOCKS, PAGE, PAGE, "test")
        self._cache = Cache((Region(self.pages.address, BLOCKS * PAGE),), (Group(TOKENS),), (view,))
        self.cleared: list[BlockTable] = []
        self.side = WorkerSide(self.agent(), before_load=lambda blocks, start, tokens: self.cleared.append(blocks))
        self.directory = Directory(self._config, "sleeper")
        self.report = Report()
        self._map()
        self.collect()

    def agent(self) -> Agent:
        return Agent(self._cache, self._config, "sleeper")

    def _map(self) -> None:
        for page in range(BLOCKS):
            self.pages.map(page)

    def sleep(self) -> None:
        self.side.suspend()
        for page in range(BLOCKS):
            self.pages.unmap(page)

    def wake(self) -> None:
        self._map()
        self.side.resume(self.agent())
        self.collect()

    def collect(self) -> Report:
        self.report = self.report.merge(self.side.collect())
        if self.report.descriptors:
            self.directory.publish(tuple(self.report.descriptors.values()))
        return self.report

    def until(self, what: Callable[[Report], Any]) -> Report:
        until(lambda: what(self.collect()))
        return self.report

    def offer(self, transfer: TransferId, blocks: list[int], final: bool = True) -> None:
        offer = Offer(transfer, b"d", 0, TOKENS * len(blocks), BlockTable.of([blocks]), final)
        self.side.after_forward(Step(StepCommands(offers=(offer,))))

    def fetch(self, transfer: TransferId, source: Worker, blocks: list[int]) -> None:
        table = BlockTable.of([blocks])
        fetch = Fetch(str(transfer), transfer, b"d", source.directory.source, table, 0, TOKENS * len(blocks))
        self.side.load(Step(StepCommands(fetches=(fetch,))))

    def block(self, block: int) -> np.ndarray:
        return self.pages.bytes.reshape(BLOCKS, PAGE)[block]

    def close(self) -> None:
        self.side.close()
        self.directory.close()
        self.pages.close()


@pytest.fixture(params=["tcp", "cma", "zmq"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Worker, Worker]]:
    p, d = Worker(request.param), Worker(request.param)
    yield p, d
    p.close()
    d.close()


def hears_that_it_is_gone(agent: Agent) -> None:
    """Wait until an agent knows that its only peer is gone: what it asks for before that is under way, and fails."""
    until(lambda: not agent.links())


def moves(p: Worker, d: Worker, number: int) -> bool:
    """One block moves, and is right."""
    transfer = TransferId("own/1/sleep", number)
    p.block(number)[:] = np.random.default_rng(number).integers(1, 255, PAGE, np.uint8)
    p.offer(transfer, [number])
    d.fetch(transfer, p, [BLOCKS - 1 - number])
    report = d.until(lambda r: str(transfer) in over(r))
    assert over(report)[str(transfer)] is None, over(report)
    return np.array_equal(d.block(BLOCKS - 1 - number), p.block(number))


def test_through_two_sleeps_of_each(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    assert moves(p, d, 0)
    for number, sleeper in enumerate([p, d, p, d], 1):
        sleeper.sleep()
        hears_that_it_is_gone((d if sleeper is p else p).side.agent)
        sleeper.wake()
        with pytest.raises(ArgumentError, match="must not have a worker side yet"):
            WorkerSide(sleeper.side.agent)
        assert moves(p, d, number)


def test_what_is_under_way_fails_on_both_sides(pair: tuple[Worker, Worker]) -> None:
    """A load that D has begun, and an offer of P that is not complete: both end when P's cache goes."""
    p, d = pair
    assert moves(p, d, 0)
    transfer = TransferId("own/1/under way", 0)
    p.offer(transfer, [1], final=False)
    d.fetch(transfer, p, [2])
    p.sleep()
    assert transfer in p.collect().released
    report = d.until(lambda r: str(transfer) in over(r))
    assert over(report)[str(transfer)].kind in GONE
    p.wake()
    assert moves(p, d, 3)


def test_loads_of_a_sleeper_fail_before_its_memory_goes(pair: tuple[Worker, Worker]) -> None:
    p, d = pair
    transfer = TransferId("own/1/loading", 0)
    d.fetch(transfer, p, [2])  # never offered
    d.sleep()
    report = d.collect()
    assert str(transfer) in over(report)
    assert over(report)[str(transfer)].kind is FailureKind.CANCELLED


def test_a_load_that_is_asked_of_a_sleeper_touches_no_memory(pair: tuple[Worker, Worker]) -> None:
    """Its engine takes requests meanwhile, and a load may begin as one arrives: what it leaves as it is must not be cleared."""
    p, d = pair
    d.sleep()
    for number in range(2):
        transfer = TransferId("own/1/asleep", number)
        d.fetch(transfer, p, [2])
        report = d.collect()
        assert not d.cleared and over(report)[str(transfer)].kind is FailureKind.CANCELLED
    d.wake()
    assert moves(p, d, 3) and d.cleared


def test_another_rank_is_refused() -> None:
    with PagedEngine() as p, pytest.raises(KvxferError, match=r"rank .*tp=0.*, not .*tp=1"):
        p.worker.resume(SimpleNamespace(cache=Cache((), (), (), Rank(tp=1))))  # type: ignore[arg-type]


def test_memory_that_is_still_touched_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("tcp")
    with monkeypatch.context() as patched:
        patched.setattr(worker.side.agent, "close", lambda: False)
        with pytest.raises(KvxferError, match="cannot be given back"):
            worker.side.suspend()
    worker.close()
    assert worker.report.descriptors[Rank()].cache.regions[0].nbytes == BLOCKS * PAGE
