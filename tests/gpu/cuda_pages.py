"""Device memory whose pages come and go: see ``tests.data.elastic_pages`` for the same in host memory."""

from __future__ import annotations

import random
from collections.abc import Container
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch

from kvxfer.memory.cuda.space import wrap

__all__ = ["PAGE", "CudaPages", "ExpandableSegments", "Exported", "KvcachedPages", "second_mapping"]

driver: Any = import_module("cuda.bindings.driver")  # which comes with torch where CUDA is

PAGE = 2 << 20

Exported = Literal["none", "posix", "fabric"]
"""By which handles other processes could get at the pages: kvcached and vLLM's sleep mode ask for none."""

_HANDLES = {
    "none": driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE,
    "posix": driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    "fabric": driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC,
}


def done(result: Any) -> Any:
    error, *values = result
    assert error == driver.CUresult.CUDA_SUCCESS, error
    return values[0] if values else None


class _Pages:
    """How bytes are put into a device's memory and got from there."""

    def __init__(self, device: str) -> None:
        self.device = device
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # makes the context

    def put(self, array: np.ndarray) -> Any:
        return torch.from_numpy(array.copy()).to(self.device)

    def get(self, part: Any) -> np.ndarray:
        found: np.ndarray = part.cpu().numpy()
        return found

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)


class _ZeroPages(_Pages):
    """Pages of which those that are not held are all the one zero page."""

    bytes: Any
    _pages: int
    _nbytes: int
    _held: Container[int]

    def unused(self) -> list[int]:
        return [page for page in range(self._pages) if page not in self._held]

    def zero(self) -> bytes:
        page = self.unused()[0]
        return self.bytes[page * self._nbytes : (page + 1) * self._nbytes].cpu().numpy().tobytes()


class CudaPages(_ZeroPages):
    """Reserved addresses, each page of which is the one zero page until it gets another one; see ``ElasticPages``."""

    def __init__(
        self,
        pages: int,
        spare: int,
        nbytes: int = PAGE,
        dice: random.Random | None = None,
        *,
        device: str = "cuda:0",
        exported: Exported = "none",
    ) -> None:
        super().__init__(device)
        self._what, self._who = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
        self._what.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._what.requestedHandleTypes = _HANDLES[exported]
        for location in (self._what.location, self._who.location):
            location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            location.id = torch.device(device).index
        self._who.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._pages, self._nbytes, self._dice = pages, nbytes, dice or random.Random(0)
        self.address = int(done(driver.cuMemAddressReserve(pages * self._nbytes, 0, 0, 0)))
        self._zero, *self._free = (
            done(driver.cuMemCreate(self._nbytes, self._what, 0)) for _ in range(pages + spare + 1)
        )
        self._held: dict[int, Any] = {}
        for page in range(pages):
            self._map(page, self._zero)
        self.bytes = wrap(self.address, pages * self._nbytes, device)
        self.bytes[: self._nbytes] = 0

    def map(self, page: int) -> None:
        self._held[page] = self._free.pop(self._dice.randrange(len(self._free)))
        self._replace(page, self._held[page])

    def unmap(self, page: int) -> None:
        self._free.append(self._held.pop(page))
        self._replace(page, self._zero)

    def close(self) -> None:
        self.settle()
        done(driver.cuMemUnmap(self.address, self._pages * self._nbytes))
        done(driver.cuMemAddressFree(self.address, self._pages * self._nbytes))
        for handle in (self._zero, *self._free, *self._held.values()):
            done(driver.cuMemRelease(handle))

    def _replace(self, page: int, handle: Any) -> None:
        self.settle()
        done(driver.cuMemUnmap(self.address + page * self._nbytes, self._nbytes))
        self._map(page, handle)

    def _map(self, page: int, handle: Any) -> None:
        at = self.address + page * self._nbytes
        done(driver.cuMemMap(at, self._nbytes, 0, handle, 0))
        done(driver.cuMemSetAccess(at, self._nbytes, [self._who], 1))


def second_mapping(address: int, nbytes: int, page: int) -> int:
    """Return where the pages that device memory has now are mapped as well, whatever becomes of the first mapping."""
    who = driver.CUmemAccessDesc()
    who.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    who.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    base = int(done(driver.cuMemAddressReserve(nbytes, 0, 0, 0)))
    for at in range(0, nbytes, page):
        handle = done(driver.cuMemRetainAllocationHandle(address + at))
        done(driver.cuMemMap(base + at, page, 0, handle, 0))
        done(driver.cuMemRelease(handle))
    done(driver.cuMemSetAccess(base, nbytes, [who], 1))
    return base


class ExpandableSegments(_Pages):
    """A tensor of PyTorch's, whose process has expandable segments: other tensors' pages come and go beside it, in its segment."""

    def __init__(
        self, pages: int, spare: int, nbytes: int = PAGE, dice: random.Random | None = None, *, device: str = "cuda:0"
    ) -> None:
        super().__init__(device)
        self.bytes = torch.zeros(pages * nbytes, dtype=torch.uint8, device=device)
        self.address = self.bytes.data_ptr()
        self._nbytes = nbytes
        self._beside: dict[int, Any] = {}
        assert torch.cuda.memory_snapshot()[0]["is_expandable"]

    def map(self, page: int) -> None:
        self._beside[page] = torch.full((self._nbytes,), 0xEE, dtype=torch.uint8, device=self.device)

    def unmap(self, page: int) -> None:
        del self._beside[page]
        torch.cuda.empty_cache()

    def unused(self) -> list[int]:
        return []

    def zero(self) -> bytes:
        return b""

    def close(self) -> None:
        self.settle()


class KvcachedPages(_ZeroPages):
    """What kvcached's own allocator reserves, maps and unmaps, without an engine."""

    def __init__(
        self, pages: int, spare: int, nbytes: int = PAGE, dice: random.Random | None = None, *, device: str = "cuda:0"
    ) -> None:
        super().__init__(device)
        self._allocator: Any = import_module("kvcached.vmm_ops")
        self._allocator.init_kvcached(device, nbytes, True)
        [tensor] = self._allocator.create_kv_tensors(pages * nbytes, 1, device, 1, 1)
        self.bytes = tensor.view(torch.uint8).flatten()
        self.address = self.bytes.data_ptr()
        self._pages, self._nbytes = pages, nbytes
        self._held: set[int] = set()
        self.bytes[:nbytes] = 0

    def map(self, page: int) -> None:
        assert self._allocator.map_to_kv_tensors([page * self._nbytes])
        self._held.add(page)

    def unmap(self, page: int) -> None:
        self.settle()
        assert self._allocator.unmap_from_kv_tensors([page * self._nbytes])
        self._held.remove(page)

    def close(self) -> None:
        self.settle()
        self._allocator.shutdown_kvcached()
