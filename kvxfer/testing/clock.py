"""Time as a thread has it: what a busy host keeps from it does not count against what is tested."""

from __future__ import annotations

import time

__all__ = ["thread_clock"]


def thread_clock() -> float:
    """Return a time in seconds that stands still while the calling thread could run and gets no processor.

    It goes on while the thread runs or sleeps. Where the kernel keeps no account of that, it is the monotonic clock. Any thread;
    compare times of one thread only.
    """
    now = time.monotonic()
    try:
        with open("/proc/thread-self/schedstat") as f:
            return now - int(f.read().split()[1]) / 1e9
    except OSError:
        return now
