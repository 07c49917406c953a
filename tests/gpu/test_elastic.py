"""An elastic cache in a GPU's memory: pages mapped and unmapped by the driver while blocks move, as kvcached does."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from kvxfer import memory
from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.geometry import Cache, Group, Region, View
from kvxfer.identity import TransferId
from kvxfer.memory import with_elastic
from kvxfer.protocol.values import Ended, Released
from kvxfer.values import BlockTable, Fetch, Offer
from tests.conftest import require

torch = pytest.importorskip("torch")
driver = pytest.importorskip("cuda.bindings.driver")

pytestmark = pytest.mark.gpu

PAGE, BLOCKS, TOKENS, SPARE, DEVICE = 2 << 20, 16, 4, 6, "cuda:0"


def done(result: Any) -> Any:
    error, *values = result
    assert error == driver.CUresult.CUDA_SUCCESS, error
    return values[0] if values else None


class ElasticCuda:
    """Reserved addresses, each page of which is the one zero page until it gets another one."""

    def __init__(self) -> None:
        torch.zeros(1, device=DEVICE)  # makes the context
        self._what = driver.CUmemAllocationProp()
        self._what.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._what.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._who = driver.CUmemAccessDesc()
        self._who.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._who.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.address = int(done(driver.cuMemAddressReserve(BLOCKS * PAGE, 0, 0, 0)))
        self._zero, *self._free = (done(driver.cuMemCreate(PAGE, self._what, 0)) for _ in range(BLOCKS + SPARE + 1))
        self._held: dict[int, Any] = {}
        for page in range(BLOCKS):
            self._map(page, self._zero)

    def _map(self, page: int, handle: Any) -> None:
        at = self.address + page * PAGE
        done(driver.cuMemMap(at, PAGE, 0, handle, 0))
        done(driver.cuMemSetAccess(at, PAGE, [self._who], 1))

    def _replace(self, page: int, handle: Any) -> None:
        torch.cuda.synchronize()
        done(driver.cuMemUnmap(self.address + page * PAGE, PAGE))
        self._map(page, handle)

    def map(self, page: int) -> None:
        self._held[page] = self._free.pop(0)
        self._replace(page, self._held[page])

    def unmap(self, page: int) -> None:
        self._free.append(self._held.pop(page))
        self._replace(page, self._zero)

    def page(self, page: int) -> Any:
        from kvxfer.memory.cuda.space import wrap

        return wrap(self.address + page * PAGE, PAGE, DEVICE)

    def close(self) -> None:
        torch.cuda.synchronize()
        done(driver.cuMemUnmap(self.address, BLOCKS * PAGE))
        done(driver.cuMemAddressFree(self.address, BLOCKS * PAGE))
        for handle in (self._zero, *self._free, *self._held.values()):
            done(driver.cuMemRelease(handle))


class Side:
    """An agent over elastic memory, and its directory."""

    def __init__(self, backend: str, elastic: bool | None) -> None:
        config = Config(backend=backend, transfer_timeout=30.0, elastic=elastic)
        self.memory = ElasticCuda()
        view = View("kv", 0, ("a",), (0,), BLOCKS, PAGE, PAGE, "test")
        cache = Cache((Region(self.memory.address, BLOCKS * PAGE, DEVICE),), (Group(TOKENS),), (view,))
        self.agent = Agent(cache, config, "elastic")
        self.directory = Directory(config, "elastic")
        self.directory.publish((self.agent.member,))
        self.seen: list[Any] = []

    def wait(self, sort: type, count: int) -> Any:
        until = time.monotonic() + 60
        while len(found := [e for e in self.seen if isinstance(e, sort)]) < count:
            assert time.monotonic() < until, self.seen
            self.seen += self.agent.events()
            time.sleep(0.0005)
        return found[count - 1]

    def close(self) -> None:
        self.agent.close()
        self.directory.close()
        self.memory.close()


def moves(p: Side, d: Side, number: int, dice: random.Random) -> bool:
    """Blocks move whose pages have just been mapped, and are unmapped again. Whether all bytes came right."""
    count = dice.randint(1, 4)
    theirs, mine = dice.sample(range(BLOCKS), count), dice.sample(range(BLOCKS), count)
    for side, blocks in ((p, theirs), (d, mine)):
        for block in blocks:
            side.memory.map(block)
    for i, block in enumerate(theirs):
        p.memory.page(block).fill_(1 + (number * 4 + i) % 250)
    for block in mine:
        d.memory.page(block).fill_(255)
    torch.cuda.synchronize()
    transfer = TransferId("own/1/elastic", number)
    tokens = count * TOKENS
    p.agent.offer(Offer(transfer, b"d", 0, tokens, BlockTable.of([theirs]), True))
    d.agent.fetch(Fetch(str(number), transfer, b"d", p.directory.source, BlockTable.of([mine]), 0, tokens))
    outcome = d.wait(Ended, number + 1).outcome
    assert outcome.delivered, outcome
    torch.cuda.synchronize()
    right = all(bool((d.memory.page(block) == 1 + (number * 4 + i) % 250).all()) for i, block in enumerate(mine))
    for side, blocks in ((p, theirs), (d, mine)):
        side.wait(Released, number + 1)
        for block in blocks:
            side.memory.unmap(block)
    return right


@pytest.mark.parametrize("backend", ["cuda_ipc", "zmq", "nixl", "ucx"])
def test_pages_come_and_go_under_load(backend: str) -> None:
    require(backend)
    p, d, dice = Side(backend, None), Side(backend, None), random.Random(backend)
    try:
        for number in range(100):
            assert moves(p, d, number, dice), f"transfer {number} brought other bytes"
        stats = d.agent.stats()
        assert (stats.direct, stats.staged) == (0, 100)
    finally:
        d.close()
        p.close()


def test_it_is_found_out() -> None:
    mapped, plain = ElasticCuda(), torch.zeros(4096, dtype=torch.uint8, device=DEVICE)
    regions = [Region(mapped.address, PAGE, DEVICE), Region(plain.data_ptr(), 4096, DEVICE)]
    assert [r.elastic for r in with_elastic(regions)] == [True, False]
    assert [r.elastic for r in with_elastic(regions, False)] == [False, False]
    staging = memory.allocate(1 << 20, DEVICE)
    assert not with_elastic(staging.regions)[0].elastic
    mapped.close()


def test_staging_keeps_its_pages_where_tensors_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch gives may be mapped by pages, with expandable segments; staging memory is then the driver's."""
    from kvxfer.memory.cuda import space

    answers = iter([True, False])
    monkeypatch.setattr(space, "is_mapped", lambda address: next(answers))
    staging = memory.allocate(1 << 20, DEVICE)
    assert not with_elastic(staging.regions)[0].elastic
    assert not np.any(space.wrap(staging.region.address, 1 << 20, DEVICE).cpu().numpy())
