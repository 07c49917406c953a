"""Host memory whose pages come and go, as an elastic cache's do."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from typing import Any

import numpy as np

__all__ = ["PAGE", "ElasticPages", "second_mapping"]

PAGE = mmap.PAGESIZE
_MAP_FIXED, _READ_WRITE = 0x10, mmap.PROT_READ | mmap.PROT_WRITE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


class ElasticPages:
    """A reservation of ``pages`` pages that are all the zero page at first; real ones come from a pool of shared memory.

    Args:
        pages: How many.
        spare: How many more the pool has.
        nbytes: Of a page, a multiple of ``PAGE``.
        dice: Which page of the pool is handed out next, be it the one that was there a moment ago; by default the one that has been
            free for longest.

    Attributes:
        address: Of the first byte.
        bytes: All of it, as uint8.
    """

    device = "cpu"

    def __init__(self, pages: int, spare: int, nbytes: int = PAGE, dice: random.Random | None = None) -> None:
        self._nbytes, self._dice = nbytes, dice
        self._pool = os.memfd_create("pages")
        os.ftruncate(self._pool, (pages + spare + 1) * nbytes)  # the last one is the zero page
        self._zero = pages + spare
        self._free = list(range(pages + spare))
        self._mapped: dict[int, int] = {}
        self._reserved = mmap.mmap(-1, pages * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = np.frombuffer(self._reserved, np.uint8)
        self.address = self.bytes.ctypes.data
        for page in range(pages):
            self._map(page, self._zero)

    def map(self, page: int) -> None:
        """Give a page memory of its own, with the bytes of whoever had that before."""
        at = 0 if self._dice is None else self._dice.randrange(len(self._free))
        self._mapped[page] = self._free.pop(at)
        self._map(page, self._mapped[page])

    def unmap(self, page: int) -> None:
        """Take its memory back; it is the zero page again."""
        self._free.append(self._mapped.pop(page))
        self._map(page, self._zero)

    def unused(self) -> list[int]:
        """Return the pages that are the zero page."""
        return [page for page in range(self.bytes.nbytes // self._nbytes) if page not in self._mapped]

    def zero(self) -> bytes:
        """Return what the zero page holds: zeros, unless somebody has written where no memory was."""
        return os.pread(self._pool, self._nbytes, self._zero * self._nbytes)

    def put(self, array: np.ndarray) -> Any:
        """Return an array of host memory in this sort of memory, and..."""
        return array

    def get(self, part: Any) -> np.ndarray:
        """...the other way round."""
        return np.asarray(part)

    def settle(self) -> None:
        """Wait until what was written is there."""

    def close(self) -> None:
        os.close(self._pool)

    def _map(self, page: int, place: int) -> None:
        at = self.address + page * self._nbytes
        got = _libc.mmap(at, self._nbytes, _READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, self._pool, place * self._nbytes)
        assert got == at, os.strerror(ctypes.get_errno())


def second_mapping(address: int, nbytes: int) -> int:
    """Return where the pages that memory has now are mapped as well, whatever becomes of the first mapping."""
    out = mmap.mmap(-1, nbytes)
    base = np.frombuffer(out, np.uint8).ctypes.data
    _kept.append(out)
    for at in range(0, nbytes, PAGE):  # of a shared mapping, with an old size of zero: see mremap(2)
        got = _libc.mremap(address + at, 0, PAGE, 3, base + at)
        assert got == base + at, os.strerror(ctypes.get_errno())
    return base


_kept: list[mmap.mmap] = []
