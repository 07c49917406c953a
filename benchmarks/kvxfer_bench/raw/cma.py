"""``process_vm_readv`` by itself, for ``kvxfer bench transfer``: as many runs in a call as the kernel takes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from kvxfer.geometry.plan import Ints
from kvxfer.geometry.region import Region
from kvxfer_cma.ptrace import allow_any
from kvxfer_cma.vm import IOV_MAX

__all__ = ["CmaRaw"]


class CmaRaw:
    """Fulfils ``kvxfer_bench.raw.Raw``."""

    two_sided = False

    def __init__(self, sends: bool, region: Region, options: Mapping[str, Any]) -> None:
        allow_any()
        self._address = region.address
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._read.restype = ctypes.c_ssize_t

    def endpoint(self) -> bytes:
        return msgspec.msgpack.encode((os.getpid(), self._address))

    def connect(self, theirs: bytes) -> None:
        self._pid, self._there = msgspec.msgpack.decode(theirs)

    def move(self, here: Ints, there: Ints, lengths: Ints) -> None:
        tables = [
            np.ascontiguousarray(np.column_stack((at, lengths))) for at in (self._address + here, self._there + there)
        ]
        for i in range(0, len(lengths), IOV_MAX):
            n, whole = len(lengths[i : i + IOV_MAX]), int(lengths[i : i + IOV_MAX].sum())
            local, remote = (ctypes.c_void_p(table.ctypes.data + 16 * i) for table in tables)
            got = self._read(self._pid, local, ctypes.c_ulong(n), remote, ctypes.c_ulong(n), ctypes.c_ulong(0))
            if got != whole:
                raise OSError(ctypes.get_errno(), f"process_vm_readv moved {got} of {whole} bytes")

    def close(self) -> None:
        pass
