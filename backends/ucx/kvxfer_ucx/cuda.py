"""The little of CUDA's driver that a UCX process needs and UCX does not do itself."""

from __future__ import annotations

import ctypes
from functools import cache

from kvxfer.errors import TransportError


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def devices() -> int:
    """Return the number of CUDA devices that this process may use; 0 without a driver.

    Makes no context.
    """
    driver, count = _driver(), ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def use(device: int) -> None:
    """Give the calling thread a CUDA context, of this device, if it has none: UCX copies in the current one.

    Raises:
        TransportError: There is no such device, or its context cannot be had.
    """
    driver = _driver()
    if driver is None:
        raise TransportError(f"memory on cuda:{device} was registered in a process without a CUDA driver")
    context = ctypes.c_void_p()
    if driver.cuCtxGetCurrent(ctypes.byref(context)) == 0 and context.value is not None:
        return
    handle = ctypes.c_int()
    for result in (
        driver.cuDeviceGet(ctypes.byref(handle), device),
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle),
        driver.cuCtxSetCurrent(context),
    ):
        if result != 0:
            raise TransportError(f"the context of cuda:{device} cannot be had: CUDA driver error {result}")
