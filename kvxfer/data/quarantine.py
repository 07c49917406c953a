"""Parts that have ended but whose memory a back end may still touch, and when the back end is given up because of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.data.ends import quieted
from kvxfer.data.jobs import Job
from kvxfer.protocol.values import LinkId, Moved, PartRef
from kvxfer.transport import Capabilities

__all__ = ["Limits", "Quarantine"]


@dataclass(frozen=True)
class Limits:
    """When a link, or the back end, is given up.

    Attributes:
        grace: The most seconds in which a batch must end after its abort.
        quarantine: The most bytes of memory that may be not quiet; beyond, the back end is reset.
    """

    grace: float
    quarantine: int


class Quarantine:
    """The parts in quarantine while one opened back end lives. Used by the data thread only.

    ``parts`` outlive this object if a back end never lets go. ``post`` is called with the second ``Moved`` of a part, once its
    memory is quiet; it must not block.
    """

    def __init__(
        self, parts: dict[PartRef, Job], can: Capabilities, limits: Limits, post: Callable[[Moved], None]
    ) -> None:
        self._parts, self._can, self._limits, self._post = parts, can, limits, post
        self._batches: dict[int, Job] = {}  # batches that have failed without being quiet
        self._patient_until = 0.0  # until when to wait for those to get quiet by themselves

    def __bool__(self) -> bool:
        return bool(self._parts)

    def get(self, ref: PartRef) -> Job | None:
        """Return a part that is in quarantine; ``None`` if it is not."""
        return self._parts.get(ref)

    def put(self, job: Job) -> None:
        """Add a part that has ended and is not quiet."""
        self._parts[job.ref] = job

    def failed(self, batch: int, job: Job) -> None:
        """Record that a batch of a part has failed and may still touch its memory."""
        self._batches[batch] = job
        self._patient_until = time.monotonic() + self._limits.grace

    def quieted(self, batch: int) -> None:
        """Record that a failed batch no longer touches memory."""
        job = self._batches.pop(batch, None)
        if job is None or any(other is job for other in self._batches.values()):
            return
        if job.ref in self._parts:
            self.release(job.ref)
        else:
            job.calm()

    def release(self, ref: PartRef) -> None:
        """Report that the memory of a part that has ended is now quiet."""
        self.calm(self._parts.pop(ref))
        self._post(quieted(ref))

    def calm(self, job: Job) -> None:
        """Take in that the memory of a part is quiet."""
        job.calm()
        for batch in [b for b, other in self._batches.items() if other is job]:
            del self._batches[batch]

    def link_closed(self, link: LinkId) -> None:
        """Release the parts whose memory is made quiet by the end of their link."""
        for ref in [r for r, job in self._parts.items() if r.link == link and job.calmed_by_close(self._can)]:
            self.release(ref)

    def release_all(self) -> None:
        """Release every part, since the back end is closed and touches nothing any more."""
        for ref in list(self._parts):
            self.release(ref)

    def needs_reset(self, busy: bool, told: Callable[[Job], bool]) -> bool:
        """Return whether the back end has to be reset now, since nothing else makes the memory quiet.

        A reset waits while parts are moving, or memory may get quiet by itself, unless too much is in quarantine.

        Args:
            busy: Whether parts are moving.
            told: Returns whether the peer will say when it is done with the memory that a part has lent it.
        """
        if not self._parts or self._can.quiet not in ("later", "backend_reset"):
            return False
        waits = busy or (self._can.quiet == "later" and time.monotonic() < self._patient_until)
        waits = waits or all(map(told, self._parts.values()))
        return not waits or sum(job.nbytes for job in self._parts.values()) > self._limits.quarantine
