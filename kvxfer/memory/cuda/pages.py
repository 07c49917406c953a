"""How CUDA memory is mapped, and memory that is not mapped by pages: what PyTorch's allocator does not say.

``cudaMalloc`` gives an address pages that never change. Virtual memory management (``cuMemMap``) maps them later and may map others in
their place: kvcached, vLLM's sleep mode and PyTorch's expandable segments do. Through the driver, by ctypes: any thread.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from kvxfer.errors import KvxferError

_MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE in cuda.h


class FixedMemory:
    """Memory by ``cuMemAlloc``, on the device whose context is current; freed with this object.

    Raises:
        KvxferError: The device has not that much left.
    """

    def __init__(self, nbytes: int) -> None:
        self.address = 0
        address = ctypes.c_uint64()
        code = _driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes))
        if code:
            raise KvxferError(f"CUDA cannot allocate {nbytes} bytes (error {code})")
        self.address = address.value

    def __del__(self) -> None:
        if self.address:
            # At exit the context may be gone, and the memory with it.
            _driver().cuMemFree_v2(ctypes.c_uint64(self.address))


def is_mapped(address: int) -> bool:
    """Tell whether device memory is mapped by pages, which may be replaced, or not mapped at the moment."""
    try:
        driver = _driver()
    except OSError:
        return False  # no driver, no CUDA memory
    handle = ctypes.c_uint64()
    if not driver.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(address)):
        driver.cuMemRelease(handle)
        return True
    kind = ctypes.c_uint()
    return bool(driver.cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address)))


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
