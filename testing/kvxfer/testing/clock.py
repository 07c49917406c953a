"""A clock that leaves out the time for which a busy host keeps a thread waiting for a processor."""

from __future__ import annotations

import time


def thread_clock() -> float:
    """Return a time in seconds that stands still while the calling thread is ready to run but gets no processor.

    It goes on while the thread runs or sleeps. If the kernel does not account for such waiting, this is the monotonic clock.
    Any thread, but only times of the same thread can be compared.
    """
    now = time.monotonic()
    try:
        with open("/proc/thread-self/schedstat") as f:
            return now - int(f.read().split()[1]) / 1e9
    except OSError:
        return now
