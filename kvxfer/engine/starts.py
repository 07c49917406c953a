"""Loads whose producers have not begun, as far as is known, and which therefore need no blocks yet.

A router may send a request to both engines at once. It may then queue at the producer for long, and blocks set aside for
it here all that time would be lost to other requests. So the producer's directory is asked, and says when its engine has
begun. If it cannot be asked, the load begins, and fails as any load would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvxfer import clock
from kvxfer.identity import Source
from kvxfer.protocol.messages import Await, Named
from kvxfer.schedule import Load, LoadState

AGAIN_S = 1.0
"""Seconds after which a producer is asked again: it may not have been there, or its answer may be lost."""


class Starts:
    """Asks producers whether they have begun, each for ``patience`` seconds at the most. One thread."""

    def __init__(self, patience: float, tell: Callable[[Source, Await], None]) -> None:
        self.patience, self._tell = patience, tell
        self._asked = 0.0

    def ask(self, loads: Iterable[Load]) -> None:
        """Ask the producers of those loads that wait, unless they have been asked a moment ago."""
        now, silent = clock.now(), dict[Source, list[Named]]()
        for load in loads:
            if load.state is LoadState.WAITING and (not load.asked_at or now - load.asked_at >= AGAIN_S):
                load.asked_at = now
                silent.setdefault(load.transfer.source, []).append(Named(load.transfer.name, load.transfer.digest))
        for source, named in silent.items():
            self._tell(source, Await(source.epoch, tuple(named)))

    def is_late(self, load: Load) -> bool:
        """Return whether a load has waited longer than its patience."""
        return clock.now() - load.came_at >= self.patience
