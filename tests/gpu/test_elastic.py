"""An elastic cache in a GPU's memory: pages mapped and unmapped by the driver while blocks move, as kvcached does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvxfer import memory
from kvxfer.errors import KvxferError
from kvxfer.geometry import Region
from kvxfer.memory import with_elastic
from tests.conftest import require
from tests.data.elastic_cache import LAYOUTS, ROWS_A_PAGE, Room

torch = pytest.importorskip("torch")
driver = pytest.importorskip("cuda.bindings.driver")

pytestmark = pytest.mark.gpu

PAGE, DEVICE = 2 << 20, "cuda:0"


def done(result: Any) -> Any:
    error, *values = result
    assert error == driver.CUresult.CUDA_SUCCESS, error
    return values[0] if values else None


class CudaPages:
    """Reserved addresses, each page of which is the one zero page until it gets another one; see ``ElasticPages``."""

    device = DEVICE

    def __init__(self, pages: int, spare: int, nbytes: int = PAGE, dice: random.Random | None = None) -> None:
        from kvxfer.memory.cuda.space import wrap

        torch.zeros(1, device=DEVICE)  # makes the context
        self._what = driver.CUmemAllocationProp()
        self._what.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._what.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._who = driver.CUmemAccessDesc()
        self._who.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._who.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._pages, self._nbytes, self._dice = pages, nbytes, dice or random.Random(0)
        self.address = int(done(driver.cuMemAddressReserve(pages * self._nbytes, 0, 0, 0)))
        self._zero, *self._free = (
            done(driver.cuMemCreate(self._nbytes, self._what, 0)) for _ in range(pages + spare + 1)
        )
        self._held: dict[int, Any] = {}
        for page in range(pages):
            self._map(page, self._zero)
        self.bytes = wrap(self.address, pages * self._nbytes, DEVICE)
        self.bytes[: self._nbytes] = 0

    def map(self, page: int) -> None:
        self._held[page] = self._free.pop(self._dice.randrange(len(self._free)))
        self._replace(page, self._held[page])

    def unmap(self, page: int) -> None:
        self._free.append(self._held.pop(page))
        self._replace(page, self._zero)

    def unused(self) -> list[int]:
        return [page for page in range(self._pages) if page not in self._held]

    def zero(self) -> bytes:
        page = self.unused()[0]
        return self.bytes[page * self._nbytes : (page + 1) * self._nbytes].cpu().numpy().tobytes()

    def put(self, array: np.ndarray) -> Any:
        return torch.from_numpy(array.copy()).to(DEVICE)

    def get(self, part: Any) -> np.ndarray:
        found: np.ndarray = part.cpu().numpy()
        return found

    def close(self) -> None:
        torch.cuda.synchronize()
        done(driver.cuMemUnmap(self.address, self._pages * self._nbytes))
        done(driver.cuMemAddressFree(self.address, self._pages * self._nbytes))
        for handle in (self._zero, *self._free, *self._held.values()):
            done(driver.cuMemRelease(handle))

    def _replace(self, page: int, handle: Any) -> None:
        torch.cuda.synchronize()
        done(driver.cuMemUnmap(self.address + page * self._nbytes, self._nbytes))
        self._map(page, handle)

    def _map(self, page: int, handle: Any) -> None:
        at = self.address + page * self._nbytes
        done(driver.cuMemMap(at, self._nbytes, 0, handle, 0))
        done(driver.cuMemSetAccess(at, self._nbytes, [self._who], 1))


@pytest.fixture
def room() -> Iterator[Callable[..., Room]]:
    made: list[Room] = []

    def make(*args: Any, row: int = PAGE // ROWS_A_PAGE, **more: Any) -> Room:
        made.append(Room(*args, row=row, pages=CudaPages, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("backend", ["cuda_ipc", "zmq", "nixl", "ucx"])
def test_pages_come_and_go_under_load(room: Callable[..., Room], backend: str, layouts: Any) -> None:
    require(backend)
    engines = room(backend, layouts, elastic=(None, None))
    assert engines.move(100) == []
    assert engines.staged


@pytest.mark.parametrize("backend", ["nixl", "ucx"])
def test_forced_to_register_it(room: Callable[..., Room], backend: str) -> None:
    """What docs/elastic-caches.md says was seen, on a machine without a network card: right bytes, straight."""
    require(backend)
    engines = room(backend, elastic=(False, False), row=PAGE)  # shorter rows are packed in any case
    assert engines.move(100) == []
    assert not engines.staged


def test_a_back_end_that_exports_allocations_refuses_it(room: Callable[..., Room]) -> None:
    require("cuda_ipc")
    with pytest.raises(KvxferError, match="cannot be shared"):
        room("cuda_ipc", elastic=(False, False))


def test_it_is_found_out() -> None:
    mapped, plain = CudaPages(16, 0), torch.zeros(4096, dtype=torch.uint8, device=DEVICE)
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
