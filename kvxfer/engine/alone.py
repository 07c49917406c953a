"""Tell whether an engine has nothing to do but to wait for loads, so that it may wait for them within a step.

An engine that waits in a step for a load plans nothing else meanwhile. That costs nobody anything while all its requests wait for
loads as well, and nobody else has come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.schedule import FetchSchedule, Load, LoadState

__all__ = ["Alone", "EngineQueue"]

LOOK_S = 0.001
"""Seconds from one look at the engine's queue to the next: the longest delay for a request that comes while a load is waited for."""
LOOKS = 50
"""How often it is looked at in one wait; then the engine makes a step, in which it says what it has to say to others."""


@dataclass(frozen=True)
class EngineQueue:
    """What an engine tells of its requests, so that loads of any length may be waited for while it has nothing else to do.

    Attributes:
        unfinished: Returns how many requests it has that are not over, whether or not they load.
        arriving: Returns whether something has come that it has not looked at yet: a request, an abort, a call.
    """

    unfinished: Callable[[], int]
    arriving: Callable[[], bool]


class Alone:
    """Says whether the engine waits for loads and for nothing else. One thread.

    Attributes:
        queue: The engine's requests; None: they are not known, and an engine never counts as waiting for loads only.
    """

    def __init__(self, schedule: FetchSchedule) -> None:
        self._schedule = schedule
        self.queue: EngineQueue | None = None

    def with_load(self, load: Load) -> bool:
        """Return whether every other request of the engine waits for a load that is on its way, as this one is about to."""
        if self.queue is None:
            return False
        return self._moving(load) + 1 >= self.queue.unfinished()

    @property
    def now(self) -> bool:
        """Whether every request of the engine waits for a load that is on its way, and nobody has come."""
        return self._all_wait(self._moving())

    @property
    def coming(self) -> bool:
        """Whether something has come that the engine has not looked at yet."""
        return self.queue is not None and self.queue.arriving()

    def wait(self, over: Callable[[], bool], look: Callable[[float], object], asking: int = 0) -> None:
        """Wait within a step, as long as that costs no other request anything.

        Args:
            over: Returns whether there is nothing to wait for any more.
            look: Waits for news for this many seconds, and takes them in.
            asking: How many requests wait for other engines to answer; 0: what is waited for are loads.
        """
        for _ in range(LOOKS):
            if over() or not self._all_wait(asking or self._moving()):
                break
            look(LOOK_S)

    def _all_wait(self, requests: int) -> bool:
        """Return whether these are all requests of the engine, and nobody has come."""
        return self.queue is not None and requests >= self.queue.unfinished() and not self.coming

    def _moving(self, other_than: Load | None = None) -> int:
        """Return how many requests wait for loads on their way."""
        ways = LoadState.AHEAD, LoadState.MOVING
        return sum(x.state in ways and not x.over and x is not other_than for x in self._schedule.working)
