"""Whether NIXL's own threads come to rest, without which its agent cannot be destroyed.

UCX (1.23) lets nobody sleep on its descriptor while something waits for room in the queue of a peer of this host, and a peer that has
stopped or died makes none. NIXL's progress thread (1.5) is told to end only where it sleeps. So it spins for ever. The thread that
destroys the agent waits for it with the interpreter's lock in hand, and no thread of this process goes on.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from kvxfer import clock

LOOK_S = 0.001
RESTS = 3
"""In how many looks a thread is seen asleep that rests: now and then even while peers keep it busy. One that spins for ever was never seen
so in 20,000, but might be once, as it waits for a lock."""
LEAST = 300
"""The looks that a thread is given, however long they take on a host on which this process stands still."""


def threads() -> frozenset[str]:
    """Return the threads of this process, as the system numbers them."""
    return frozenset(os.listdir("/proc/self/task"))


def come_to_rest(some: Collection[str], within_s: float) -> bool:
    """Wait until each of these threads has rested, or has ended; return whether that is so soon.

    That is within ``within_s`` seconds, and ``LEAST`` looks.
    """
    until, looks = clock.now() + within_s, 0
    left = dict.fromkeys(some, RESTS)
    while left and (looks < LEAST or clock.now() < until):
        clock.wait(LOOK_S)
        looks += 1
        states = {t: _state(t) for t in left}
        left = {t: n for t, more in left.items() if states[t] and (n := more - (states[t] == "S"))}
    return not left


def _state(thread: str) -> str | None:
    """Return what the system says that a thread does; ``None`` if it has ended."""
    try:
        return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
