"""How many of the process's descriptors its control connections may take.

The kernel gives each new descriptor the lowest free number. So its number tells how many are in use, whoever opened them.
"""

from __future__ import annotations

import resource

__all__ = ["DescriptorLimits"]

_SHARE, _LEAST = 8, 32
"""The part of all descriptors that is left to others, and the fewest that are."""


class DescriptorLimits:
    """The numbers from which on descriptors are short, by the process's soft limit at the time this is made.

    Attributes:
        accepted: The number from which on whoever connects takes the place of another.
        dialled: The number from which on nobody is dialled any more.
    """

    def __init__(self) -> None:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if soft == resource.RLIM_INFINITY:
            soft = 1 << 30
        reserve = max(soft // _SHARE, _LEAST)
        self.accepted = max(soft - reserve, soft // 2)
        self.dialled = max(soft - reserve // 2, soft // 2)
