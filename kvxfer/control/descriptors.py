"""How many of the process's descriptors its control connections may take."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

_SHARE, _MIN = 8, 32
"""The part of all descriptors that is left to others, and the fewest that are."""
_MAX_UNHEARD = 1024


class DescriptorLimits:
    """The numbers of descriptors in use from which on they are short, by the process's soft limit at the time this is made.

    Attributes:
        accepted: The number from which on a newcomer takes the place of another.
        dialled: The number from which on nobody is dialled any more.
        unheard: The most connections of one thread that were dialled and over which nothing has come. Requests that name addresses
            can have that many made.
    """

    unheard = _MAX_UNHEARD

    def __init__(self) -> None:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if soft == resource.RLIM_INFINITY:
            soft = 1 << 30
        reserve = max(soft // _SHARE, _MIN)
        self.accepted = max(soft - reserve, soft // 2)
        self.dialled = max(soft - reserve // 2, soft // 2)
        self.unheard = min(max(soft // 4, _MIN), _MAX_UNHEARD)

    @property
    def short(self) -> bool:
        """Whether a newcomer should take the place of another."""
        return _in_use() > self.accepted

    @property
    def spent(self) -> bool:
        """Whether nobody may be dialled any more."""
        return _in_use() > self.dialled


def _in_use() -> int:
    """Return how many descriptors are open, by any part of the process; 0 if the kernel does not tell."""
    with suppress(OSError):
        # Linux 6.2 and later say it as the folder's size; to count is slow where there are many.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    return 0
