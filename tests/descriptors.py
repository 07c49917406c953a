"""The descriptors of a process in which other tests have run, whose threads may still open and close theirs.

What a test's own work leaves open, which sockets there are, and how to have no descriptor left.
"""

from __future__ import annotations

import gc
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, islice

from kvxfer.testing.usage import old_objects_aside

__all__ = ["descriptors_kept", "no_descriptor_left", "open_files", "sockets"]


def descriptors_kept(act: Callable[[], object], times: int) -> int:
    """Return how many descriptors each of so many calls of ``act`` leaves open.

    Whoever leaks does so each time; what others open meanwhile is less than one a call.
    """
    with old_objects_aside():
        before = _opened()
        for _ in range(times):
            act()
        return max(0, _opened() - before) // times


@contextmanager
def no_descriptor_left(but: int = 0) -> Iterator[None]:
    """Let this process open ``but`` descriptors more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(fd) for fd in os.listdir("/proc/self/fd")} - {(spare := os.dup(0))}
    os.close(spare)
    unused = (fd for fd in count() if fd not in used)
    limit = 3 if not but else next(islice(unused, but - 1, None)) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_files() -> list[str]:
    """Return what this process has open, as the kernel names it: a path, ``socket:[12]``, ``/memfd:name (deleted)``."""
    return list(_open_files().values())


def sockets() -> Iterator[socket.socket]:
    """Yield the sockets of this process, each as a copy that is closed when the next is asked for."""
    for fd, name in _open_files().items():
        if name.startswith("socket:"):
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:  # or it has been closed since
                yield found


def _open_files() -> dict[int, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one by which they are listed, or closed since
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def _opened() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
