"""Host memory whose pages come and go, as an elastic cache's do."""

from __future__ import annotations

import ctypes
import mmap
import os

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

    Attributes:
        address: Of the first byte.
        bytes: All of it, as uint8.
    """

    def __init__(self, pages: int, spare: int) -> None:
        self._pool = os.memfd_create("pages")
        os.ftruncate(self._pool, (pages + spare + 1) * PAGE)  # the last one is the zero page
        self._zero = pages + spare
        self._free = list(range(pages + spare))
        self._mapped: dict[int, int] = {}
        self._reserved = mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = np.frombuffer(self._reserved, np.uint8)
        self.address = self.bytes.ctypes.data
        for page in range(pages):
            self._map(page, self._zero)

    def map(self, page: int) -> None:
        """Give a page memory of its own, other than what it had last, with the bytes of whoever had that before."""
        self._mapped[page] = self._free.pop(0)
        self._map(page, self._mapped[page])

    def unmap(self, page: int) -> None:
        """Take its memory back; it is the zero page again."""
        self._free.append(self._mapped.pop(page))
        self._map(page, self._zero)

    def close(self) -> None:
        os.close(self._pool)

    def _map(self, page: int, place: int) -> None:
        at = self.address + page * PAGE
        got = _libc.mmap(at, PAGE, _READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, self._pool, place * PAGE)
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
