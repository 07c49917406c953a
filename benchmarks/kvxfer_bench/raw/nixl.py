"""NIXL by itself, for ``kvxfer bench transfer``: one READ a transfer, made and posted each time, one descriptor a run.

Its steps are those that NIXL's own benchmark tells apart: a request is prepared, posted, and under way until it is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from kvxfer.geometry.plan import Ints
from kvxfer.geometry.region import Region
from kvxfer_nixl.agent import DescriptorRows, LibraryAgent
from kvxfer_nixl.options import Options
from kvxfer_nixl.space import nixl_device

__all__ = ["NixlRaw"]


class NixlRaw:
    """Fulfils ``kvxfer_bench.raw.Raw``."""

    two_sided = False

    def __init__(self, sends: bool, region: Region, options: Mapping[str, Any]) -> None:
        chosen = Options.parse(options)
        self._agent = LibraryAgent(f"raw-{os.getpid()}", chosen, chosen.ucx_settings)
        self._address = region.address
        self._cuda, self._device = nixl_device(region.device)
        self._memory = self._agent.register([region], self._cuda, self._device)

    def endpoint(self) -> bytes:
        return msgspec.msgpack.encode((self._address, self._cuda, self._device, self._agent.metadata(self._memory)))

    def connect(self, theirs: bytes) -> None:
        self._there, self._cuda_there, self._device_there, metadata = msgspec.msgpack.decode(theirs)
        self._peer = self._agent.add(metadata)

    def move(self, here: Ints, there: Ints, lengths: Ints) -> dict[str, float]:
        agent = self._agent
        begun = time.perf_counter()
        local = self._cuda, _rows(self._address + here, lengths, self._device)
        remote = self._cuda_there, _rows(self._there + there, lengths, self._device_there)
        handle = agent.prepare("read", local, remote, self._peer)
        prepared = time.perf_counter()
        done = agent.post(handle)
        posted = time.perf_counter()
        while not done:
            os.sched_yield()  # where cores are scarce the side that has the next move may be waiting for this one
            done = agent.done(handle)
        ended = time.perf_counter()
        agent.release(handle)
        return {"prepare": prepared - begun, "post": posted - prepared, "transfer": ended - posted}

    def close(self) -> None:
        self._agent.close()


def _rows(addresses: Ints, lengths: Ints, device: int) -> DescriptorRows:
    return np.column_stack((addresses, lengths, np.full(len(lengths), device))).astype(np.uint64)
