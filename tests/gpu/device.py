"""Caches of ``tests/geometry/layouts.py`` in a GPU's memory, and how much of it this process has."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np
import pynvml
import torch

from kvxfer import memory
from kvxfer.geometry import Region
from tests.geometry.layouts import Store


class OnDevice:
    """A copy of a store's memory."""

    def __init__(self, store: Store, device: str) -> None:
        self.image: Any = torch.from_numpy(store.image.copy()).to(device)
        base = self.image.data_ptr()
        regions = tuple(
            Region(base + start, r.nbytes, device)
            for start, r in zip(store.cache.starts, store.cache.regions, strict=True)
        )
        self.cache = msgspec.structs.replace(store.cache, regions=regions)
        self.space = memory.space(regions) if regions else None

    def bytes(self) -> np.ndarray:
        if self.image.is_cuda:
            torch.cuda.synchronize(self.image.device)
        return self.image.cpu().numpy()


def used() -> tuple[int, ...]:
    """Return how many bytes of each GPU this process has: others, of tests that run beside this one, take and free some all the time."""
    pynvml.nvmlInit()
    handles = (pynvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in range(torch.cuda.device_count()))
    here = (pynvml.nvmlDeviceGetComputeRunningProcesses(handle) for handle in handles)
    return tuple(sum(each.usedGpuMemory for each in processes if each.pid == os.getpid()) for processes in here)
