"""How far the parts of a data thread have got, and what those that stand still wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvxfer import clock
from kvxfer.data.jobs import Job
from kvxfer.logs import logger
from kvxfer.protocol.values import HeldUp, Moving, PartRef
from kvxfer.security import RateLimitedWarnings
from kvxfer.transport import Verb

log = logger("kvxfer.data")

LOOK_S = 0.5
"""Seconds from one look at how far parts have got to the next."""
COMPLAIN_S = 10.0
"""The least seconds between two lines of the log about a device."""


class PartProgress:
    """What was told last of how far parts have got. Used by the data thread only.

    Attributes:
        due: When to look next, by ``kvxfer.clock``.
    """

    def __init__(self, post: Callable[[Moving], None]) -> None:
        self._post, self.due = post, 0.0
        self._moved: dict[PartRef, int] = {}
        self._held_up: dict[PartRef, HeldUp] = {}
        self._complain = RateLimitedWarnings(log, COMPLAIN_S)

    def look(self, jobs: Iterable[Job]) -> None:
        """Tell how far parts have got that began before a moment: those that come to this side, and those that it writes.

        What has got no further is not told again. A peer cannot see that a write has begun, so that is told, too.
        """
        now = clock.now()
        self.due = now + LOOK_S
        late = [job for job in jobs if job.begun < now - LOOK_S]
        seen = {job.ref: job.bytes_so_far() for job in late if _worth_telling(job)}
        moved = tuple(
            (ref, nbytes)
            for ref, nbytes in seen.items()
            if nbytes > self._moved.get(ref, 0 if ref.role == "consumer" else -1)
        )
        held_up = {job.ref: why for job in late if (why := job.held_up(now)) is not None}
        news = tuple((ref, why) for ref, why in held_up.items() if self._held_up.get(ref) is not why)
        for ref, why in news:
            if why is HeldUp.DEVICE:
                self._complain("the device of this engine has not finished a piece of %s for seconds", ref.transfer)
        over = tuple((ref, None) for ref in self._held_up if ref not in held_up)
        self._moved, self._held_up = seen, held_up
        if moved or news or over:
            self._post(Moving(moved, (*news, *over)))


def _worth_telling(job: Job) -> bool:
    """Return whether this side tells how far a part has got: what it writes, and what has begun to come. Many parts only wait."""
    return job.submitted > 0 if job.ref.role == "consumer" else job.action.verb is Verb.WRITE
