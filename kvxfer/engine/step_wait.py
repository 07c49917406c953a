"""Tell whether an engine may wait for loads within a step, because that costs its other requests nothing, or less than it saves.

An engine that waits in a step for a load plans nothing else meanwhile. That costs nobody anything while all its requests wait for
loads as well, and nobody else has come. If some could run, they lose what it waits, and each load that comes saves a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.schedule import FetchSchedule, Load, LoadState

LOOK_S = 0.001
"""Seconds from one look at the engine's queue to the next: the longest delay for a request that comes while a load is waited for."""
LOOKS = 50
"""How often it is looked at in one wait; then the engine makes a step, in which it says what it has to say to others. In all waits of a
step together, if requests could run meanwhile."""
STEP_S = 0.01
"""Seconds that a step more costs a request. With 8 billion parameters a step takes 7 to 20 ms on a GPU."""
ASYNC_S = 0.003
"""What an async load costs an idle engine besides its bytes: vLLM sleeps for 1 ms after an empty step, and plans one more."""

_AHEAD = (LoadState.AHEAD,)
_MOVING = (*_AHEAD, LoadState.MOVING)


@dataclass(frozen=True)
class EngineQueue:
    """What an engine tells of its requests, so that loads of any length may be waited for while it has nothing else to do.

    Attributes:
        unfinished: Returns how many requests it has that are not over, whether or not they load.
        arriving: Returns whether something has come that it has not looked at yet: a request, an abort, a call.
    """

    unfinished: Callable[[], int]
    arriving: Callable[[], bool]


class StepWait:
    """Says whether the engine waits for loads and for nothing else, or for little else. One thread.

    Attributes:
        queue: The engine's requests; None: they are not known, and an engine never counts as waiting for loads only.
    """

    def __init__(self, schedule: FetchSchedule) -> None:
        self._schedule = schedule
        self.queue: EngineQueue | None = None
        self._waited = 0  # how often requests that could run have waited for a look in this step
        self._lost = 0.0  # seconds that requests which could run have waited in this step since the last news, added up

    def worth(self, load: Load) -> float:
        """Return the seconds of a step that this load is worth: the time that an async one would cost, shared by those that could run."""
        return min(ASYNC_S, STEP_S / max(1, self._others(self._count(_MOVING, load) + 1)))

    @property
    def free(self) -> bool:
        """Whether every request of the engine waits for a load that is on its way, and nobody has come."""
        return self._others(self._count(_MOVING)) == 0 and not self.arriving

    @property
    def arriving(self) -> bool:
        """Whether something has come that the engine has not looked at yet."""
        return self.queue is not None and self.queue.arriving()

    def begin_step(self) -> None:
        """Record that a step begins, in which nobody has lost anything yet."""
        self._waited, self._lost = 0, 0.0

    def wait(
        self, over: Callable[[], bool], look: Callable[[float], object], *, asking: int = 0, expected: float = math.inf
    ) -> float:
        """Wait within a step, as long as nobody comes, and as that costs no other request anything or less than it saves.

        Each load that comes saves ``STEP_S``. Requests that could run are held back too, while all of them together lose less than the
        sync loads save that are still to come. That ends once they have lost ``STEP_S`` without news, or after 50 ms of a step.

        Args:
            over: Returns whether there is nothing to wait for any more.
            look: Waits for news for this many seconds, takes them in, and returns whether there were any.
            asking: How many requests wait for other engines to answer; 0: what is waited for are loads.
            expected: The seconds after which the load should be here; ``inf``: requests that could run do not wait for it.

        Returns:
            The seconds that requests which could run have waited.
        """
        before = self._waited
        for _ in range(LOOKS if self.queue is not None else 0):
            others = self._others(asking or self._count(_MOVING))
            if over() or self.arriving or (others and not self._saves(others, expected)):
                break
            self._waited += others > 0
            self._lost = 0.0 if look(LOOK_S) else self._lost + others * LOOK_S
        return (self._waited - before) * LOOK_S

    def _saves(self, others: float, expected: float) -> bool:
        """Return whether a wait of this many seconds costs those that could run less than it saves."""
        pays = others * expected <= STEP_S * self._count(_AHEAD)
        return pays and self._lost < STEP_S and self._waited < LOOKS

    def _others(self, waiting: int) -> float:
        """Return how many requests the engine has besides those that wait; ``inf`` if that is not known."""
        return math.inf if self.queue is None else max(0, self.queue.unfinished() - waiting)

    def _count(self, states: tuple[LoadState, ...], other_than: Load | None = None) -> int:
        """Return how many requests have loads in these states."""
        return sum(x.state in states and not x.over and x is not other_than for x in self._schedule.working.values())
