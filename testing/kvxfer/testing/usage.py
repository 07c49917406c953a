"""How much memory, how many descriptors and threads this process uses, measured so that a leak shows and nothing else does. Any thread."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator

# What glibc's ``malloc.h`` says: an option, and that freed memory at the end of a heap is given back if there is as much of it.
M_TRIM_THRESHOLD, TRIM_BYTES = -1, 128 << 10

_libc = ctypes.CDLL(None)
_libc.malloc.argtypes, _libc.malloc.restype, _libc.free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]
_mallinfo = getattr(_libc, "mallinfo2", None)  # glibc's
_trim = getattr(_libc, "malloc_trim", None)  # glibc's


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


if _mallinfo is not None:
    _mallinfo.restype = _Mallinfo


def resident() -> int:
    """Return the bytes of memory in use.

    Garbage, and freed memory that the allocator keeps, is given back first: a leak would be served from there, unnoticed. Pages of files do
    not count: a system that is short of memory takes them away while others leak.
    """
    gc.collect()
    if _trim is not None:
        # The heaps of most threads are trimmed at their ends only when something large is freed, and by default only if there are tens of
        # megabytes. Any thread may have such a heap: it gets one when there was no memory for it once.
        _libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
        _libc.free(_libc.malloc(TRIM_BYTES))
        _trim(ctypes.c_size_t(0))
    with open("/proc/self/status") as f:
        return 1024 * sum(int(line.split()[1]) for line in f if line.startswith(("RssAnon:", "RssShmem:")))


def allocated() -> int:
    """Return the bytes that Python's and C's heaps have given out, whether they have been touched or not."""
    gc.collect()
    python = 64 * sys.getallocatedblocks()
    if _mallinfo is None:
        return python
    info = _mallinfo()
    return python + int(info.uordblks) + int(info.hblkhd)


def descriptors_open() -> int:
    """Return how many descriptors are open."""
    return len(os.listdir("/proc/self/fd"))


def children() -> set[int]:
    """Return the processes that threads of this one have started and that are still there."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as f:
            found |= set(map(int, f.read().split()))
    return found


def threads_running() -> int:
    """Return how many threads there are, Python's and others."""
    return len(os.listdir("/proc/self/task"))


@contextlib.contextmanager
def old_objects_aside() -> Iterator[None]:
    """Have the collector scan only objects made from now on; use it in a ``with``, or as the decorator of a clause.

    What leaks is made while the clause runs. A process that has imported engines holds millions of older objects, and each
    collection that scans them takes longer than everything that the clause does between two collections.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
