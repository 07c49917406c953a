"""ucxx by itself, for ``kvxfer bench transfer``: its synchronous layer, one tagged message a run."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

from kvxfer.geometry.plan import Ints
from kvxfer.geometry.region import Region
from kvxfer_ucx import cuda
from kvxfer_ucx.library import load
from kvxfer_ucx.options import Options, make_context

__all__ = ["UcxRaw"]


class _OnGpu:
    """A run in a GPU's memory, as ucxx takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _on_host(address: int, nbytes: int) -> Any:
    return (ctypes.c_uint8 * nbytes).from_address(address)


class UcxRaw:
    """Fulfils ``kvxfer_bench.raw.Raw``."""

    two_sided = True

    def __init__(self, sends: bool, region: Region, options: Mapping[str, Any]) -> None:
        self._sends, self._region, self._on_gpu = sends, region, region.device != "cpu"
        if self._on_gpu:
            cuda.use(int(region.device.partition(":")[2] or 0))
        self._library = load()
        ucxx = self._library.ucxx
        chosen = Options.parse(options)
        self._context = make_context(self._library, chosen, chosen.settings())
        self._worker = ucxx.UCXWorker(self._context)
        self._endpoint: Any = None

    def endpoint(self) -> bytes:
        return bytes(self._worker.address)

    def connect(self, theirs: bytes) -> None:
        ucxx = self._library.ucxx
        self._endpoint = ucxx.UCXEndpoint.create_from_worker_address(
            self._worker, ucxx.UCXAddress.create_from_buffer(theirs), True
        )
        word = bytearray(1)
        array = self._library.array(word)
        self._finish([self._post(array)])

    def move(self, here: Ints, there: Ints, lengths: Ints) -> None:
        address, array, run = self._region.address, self._library.array, _OnGpu if self._on_gpu else _on_host
        runs = zip(here.tolist(), lengths.tolist(), strict=True)
        self._finish([self._post(array(run(address + at, n))) for at, n in runs])

    def _post(self, array: Any) -> Any:
        tag = self._library.ucxx.UCXXTag(1)
        return (self._endpoint.tag_send if self._sends else self._endpoint.tag_recv)(array, tag)

    def _finish(self, requests: list[Any]) -> None:
        for request in requests:
            while not request.completed:
                if not self._worker.progress():
                    os.sched_yield()  # where cores are scarce the peer, who has the next move, may be waiting for this one
            request.check_error()

    def close(self) -> None:
        self._endpoint.close_blocking()
        self._endpoint = self._worker = self._context = None
