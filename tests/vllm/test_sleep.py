"""What vLLM's worker hooks do with a cache that goes and comes back, with real agents over pages that are unmapped meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.engine import Step
from kvxfer.failures import Failure
from kvxfer.geometry import Cache, Group, Region, View
from kvxfer.identity import TransferId
from kvxfer.schedule import StepCommands
from kvxfer.values import BlockTable, Fetch, Offer
from kvxfer_vllm.metadata import StepMetadata
from kvxfer_vllm.worker import WorkerHooks
from tests.data.elastic_pages import PAGE, ElasticPages
from tests.engine.small import over

BLOCKS, TOKENS = 8, 4


class Worker:
    """A worker of vLLM with kvxfer's hooks, and the directory of its engine."""

    def __init__(self, backend: str) -> None:
        self.pages = ElasticPages(BLOCKS, BLOCKS)
        config = Config(backend=backend, transfer_timeout=20.0, peer_timeout=20.0, staging_bytes=1 << 20)
        view = View("kv", 0, ("a",), (0,), BLOCKS, PAGE, PAGE, "test")
        cache = Cache((Region(self.pages.address, BLOCKS * PAGE),), (Group(TOKENS),), (view,))
        vllm: Any = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(engine_id="sleeper"),
            parallel_config=SimpleNamespace(use_ubatching=False, pipeline_parallel_size=1),
        )
        blocks: Any = SimpleNamespace(num_blocks=BLOCKS)
        layout: Any = SimpleNamespace(cache=cache, table=lambda logical: logical)
        self.hooks = WorkerHooks(config, vllm, blocks)
        self.hooks.start(Agent(cache, config, "sleeper"), layout, copy=lambda src, dst: None)
        self.directory = Directory(config, "sleeper")
        self.failed: set[str] = set()
        self.over: set[str] = set()
        self.map()
        self.publish()

    def map(self) -> None:
        for page in range(BLOCKS):
            self.pages.map(page)

    def unmap(self) -> None:
        for page in range(BLOCKS):
            self.pages.unmap(page)

    def publish(self) -> None:
        """As the scheduler side does with what vLLM hands on from the worker at start, and on waking."""
        handshake = self.hooks.handshake()
        assert handshake is not None
        self.directory.publish((handshake.descriptor,))

    def collect(self) -> None:
        self.hooks.collect(StepMetadata())
        over = self.ended()
        self.over |= over.keys()
        self.failed |= {name for name, failure in over.items() if failure is not None}

    def ended(self) -> Mapping[str, Failure | None]:
        """The loads that have ended, as the next report says."""
        found = self.hooks.report()
        return {} if found is None else over(found.report)

    def offer(self, transfer: TransferId, block: int, final: bool = True) -> None:
        offer = Offer(transfer, b"d", 0, TOKENS, BlockTable.of([[block]]), final)
        self.hooks.after_forward(StepMetadata(Step(StepCommands(offers=(offer,)))))

    def load(self, transfer: TransferId, source: Worker, block: int) -> None:
        table = BlockTable.of([[block]])
        fetch = Fetch(str(transfer), transfer, b"d", source.directory.source, table, 0, TOKENS)
        self.hooks.load(StepMetadata(Step(StepCommands(fetches=(fetch,)))))

    def block(self, block: int) -> np.ndarray:
        return self.pages.bytes.reshape(BLOCKS, PAGE)[block]

    def close(self) -> None:
        self.hooks.close()
        self.directory.close()
        self.pages.close()


@pytest.fixture(params=["tcp", "cma"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Worker, Worker]]:
    p, d = Worker(request.param), Worker(request.param)
    yield p, d
    p.close()
    d.close()


def until(true: Callable[[], bool], *workers: Worker) -> None:
    end = time.monotonic() + 15  # sooner than a load that nobody ends
    while not true():
        assert time.monotonic() < end, [(w.over, w.failed) for w in workers]
        for worker in workers:
            worker.collect()
        time.sleep(0.005)


def moves(p: Worker, d: Worker, number: int) -> bool:
    transfer = TransferId("own/1/sleep", number)
    block = number % BLOCKS
    p.block(block)[:] = np.random.default_rng(number).integers(1, 255, PAGE, np.uint8)
    p.offer(transfer, block)
    d.load(transfer, p, BLOCKS - 1 - block)
    until(lambda: str(transfer) in d.over, p, d)
    return str(transfer) not in d.failed and np.array_equal(d.block(BLOCKS - 1 - block), p.block(block))


def test_two_sleeps_of_each_amid_loads(pair: tuple[Worker, Worker]) -> None:
    """What is under way when one goes to sleep ends, as a failed load, before its memory is unmapped or soon after at the other."""
    p, d = pair
    assert moves(p, d, 0)
    for number, sleeper in enumerate([p, d, p, d], 1):
        under_way = TransferId("own/1/under way", number)
        p.offer(under_way, 0, final=False)
        d.load(under_way, p, 1)
        sleeper.hooks.suspend()
        sleeper.unmap()
        until(lambda name=str(under_way): name in d.failed, p, d)  # type: ignore[misc]
        sleeper.map()
        sleeper.hooks.resume()
        sleeper.publish()
        assert moves(p, d, 10 * number)
    assert len(d.failed) == 4


def test_a_cache_that_vllm_discards_goes_to_sleep_next(pair: tuple[Worker, Worker]) -> None:
    """vLLM says so for each of the two; and wakes weights, of which we hear nothing, before the cache."""
    p, d = pair
    p.hooks.suspend()
    p.unmap()
    p.hooks.suspend()
    p.map()
    p.hooks.resume()
    awake = p.hooks.handshake()
    p.hooks.resume()
    assert p.hooks.handshake() == awake, "peers would look for an agent that is gone"
    p.publish()
    assert moves(p, d, 1)
