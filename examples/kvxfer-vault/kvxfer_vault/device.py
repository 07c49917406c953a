"""A device of our own: memory that is reached through a lock, by those who know its handle, one caller at a time."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

DEVICE = "vault:0"
ROOM = 1 << 40
"""Handles are this far apart, so that a handle plus an offset still says which memory is meant."""

_lock = threading.Lock()
_handles = itertools.count(ROOM, ROOM)
_memories: "WeakValueDictionary[int, Memory]" = WeakValueDictionary()


class Memory:
    """Memory of the device, which is freed with this object."""

    def __init__(self, nbytes: int) -> None:
        self.handle, self._content = next(_handles), np.zeros(nbytes, np.uint8)
        _memories[self.handle] = self

    @contextmanager
    def opened(self) -> Iterator[np.ndarray]:
        """Give the bytes to one caller at a time."""
        with _lock:
            yield self._content


def memory_at(address: int) -> tuple[Memory, int]:
    """Return the memory that a handle plus an offset is of, and the offset."""
    return _memories[address // ROOM * ROOM], address % ROOM


class Tensor:
    """What engines on this device compute with. It has the methods of torch's by which kvxfer reads a tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: str = "float32") -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.device = SimpleNamespace(type="vault", index=0)
        self.memory = Memory(prod(shape) * self.dtype.itemsize)

    def data_ptr(self) -> int:
        return self.memory.handle

    def element_size(self) -> int:
        return self.dtype.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def __getitem__(self, index: Any) -> np.ndarray:
        with self.memory.opened() as content:
            return np.array(content.view(self.dtype).reshape(self.shape)[index])

    def __setitem__(self, index: Any, values: Any) -> None:
        with self.memory.opened() as content:
            content.view(self.dtype).reshape(self.shape)[index] = values
