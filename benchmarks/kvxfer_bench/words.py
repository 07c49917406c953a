"""Caches of 64-bit words, ``[layer, block, token, head, word]``, in the memory of a host or a GPU, written and read by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]


class Words(Protocol):
    """A cache that this process owns. One thread writes and reads it with these methods."""

    address: int
    nbytes: int
    device: str

    def put(self, blocks: Sequence[int], values: Array | int) -> None:
        """Write ``[layer, len(blocks), token, head, word]``, or one value everywhere. The write is complete on return."""

    def get(self, blocks: Sequence[int]) -> Array:
        """Return a copy of what blocks hold, ``[layer, len(blocks), token, head, word]``."""


class HostWords:
    """Words in host memory."""

    device = "cpu"

    def __init__(self, shape: Sequence[int]) -> None:
        self._words = np.zeros(shape, np.int64)
        self.address, self.nbytes = self._words.ctypes.data, self._words.nbytes

    def put(self, blocks: Sequence[int], values: Array | int) -> None:
        self._words[:, blocks] = values

    def get(self, blocks: Sequence[int]) -> Array:
        return self._words[:, blocks]


class DeviceWords:
    """Words in a GPU's memory."""

    def __init__(self, shape: Sequence[int], device: str) -> None:
        import torch

        self.device, self._torch = device, torch
        self._words = torch.zeros(tuple(shape), dtype=torch.int64, device=device)
        self.address, self.nbytes = self._words.data_ptr(), self._words.nbytes

    def put(self, blocks: Sequence[int], values: Array | int) -> None:
        given = values if isinstance(values, int) else self._torch.from_numpy(values).to(self.device)
        self._words[:, self._index(blocks)] = given
        self._torch.cuda.synchronize(self.device)

    def get(self, blocks: Sequence[int]) -> Array:
        return np.asarray(self._words[:, self._index(blocks)].cpu().numpy())

    def _index(self, blocks: Sequence[int]) -> Any:
        return self._torch.tensor(list(blocks), device=self.device)


def words(shape: Sequence[int], device: str) -> Words:
    """Make a cache of zeroes on ``device``, which is ``cpu`` or like ``cuda:0``."""
    return HostWords(shape) if device == "cpu" else DeviceWords(shape, device)


def device_mib() -> float:
    """Return the GPU memory in use by all processes on all GPUs. Memory of a dead peer counts as long as any process maps it."""
    import torch

    each = (torch.cuda.mem_get_info(device) for device in range(torch.cuda.device_count()))
    return round(float(sum(total - free for free, total in each)) / (1 << 20), 2)
