"""Parts whose back end has been closed while the device was still at work in their memory: they are quiet once it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvxfer.data.ends import quieted
from kvxfer.data.jobs import Job
from kvxfer.fence import Fence
from kvxfer.logs import logger
from kvxfer.protocol.values import Moved

__all__ = ["AfterWork"]

log = logger("kvxfer.data")


class AfterWork:
    """Parts that only the device may still touch. Used by the data thread only, but for ``nbytes``.

    ``post`` is called with the second ``Moved`` of a part, once its memory is quiet; it must not block.
    """

    def __init__(self, post: Callable[[Moved], None]) -> None:
        self._post = post
        self._waiting: list[tuple[list[Job], list[Fence]]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def nbytes(self) -> int:
        """Bytes of these parts. Any thread."""
        return sum(job.nbytes for jobs, _ in list(self._waiting) for job in jobs)

    def put(self, jobs: Sequence[Job], work: Sequence[Fence]) -> None:
        """Add parts that have ended and that are quiet once all this work of the device is done."""
        if jobs:
            self._waiting.append((list(jobs), list(work)))

    def look(self) -> None:
        """Report the parts that are quiet now."""
        for waiting in list(self._waiting):
            jobs, work = waiting
            while work and _done(work[-1]):
                work.pop()
            if not work:
                self._waiting.remove(waiting)
                for job in jobs:
                    self._post(quieted(job.ref))


def _done(fence: Fence) -> bool:
    """Return whether work is done; that of a device that has failed is."""
    try:
        return fence.passed()
    except BaseException:
        log.exception("the device failed while it packed or unpacked")
        return True
