"""Parts of which nothing moves any more, and what each still waits for.

One that has arrived may wait for its checksum, if a device makes it: its end is reported with that. It wakes two threads fewer than
``hasher.py``, to which a checksum that fails here is left. One that has failed may leave memory behind that the back end, its peer
or the device still touches. Its end is reported at once, and a second time when the memory is quiet.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

import msgspec

from kvxfer import clock, memory
from kvxfer.data.jobs import Job
from kvxfer.failures import Failure, FailureKind
from kvxfer.fence import Fence
from kvxfer.geometry import Region
from kvxfer.logs import logger
from kvxfer.memory import Checksum, Space
from kvxfer.protocol.values import LinkId, Move, Moved, PartRef
from kvxfer.transport import Capabilities, Transport

log = logger("kvxfer.data")

LOOK_S = 0.00003
"""Seconds between two checks of whether a device is done, if nothing else tells; it packs a piece in twice that time."""


@dataclass(frozen=True)
class Limits:
    """When a link, or the back end, is given up."""

    grace: float  # the most seconds in which a batch must end after its abort
    quarantine: int  # the most bytes of memory that may be not quiet; beyond, the back end is reset


class WaitsFor(enum.Enum):
    """What a part waits for that has ended; the value is after how many seconds to look again."""

    CHECKSUM = LOOK_S
    BACKEND = 0.05  # or the peer, through it
    DEVICE = 0.01  # its back end is closed
    NOTHING = inf  # its back end could not be closed, and may touch its memory for ever


@dataclass(slots=True)
class _Ended:
    """A part that has ended."""

    waits: WaitsFor
    job: Job
    work: list[Fence] = field(default_factory=list)  # what the device has still to do
    moved: Moved | None = None  # its end, to be reported with the checksum
    checksum: Checksum | None = None


class PartEnds:
    """The parts of a data thread that have ended and wait for something. They outlive the back end that moved them.

    Used by the data thread only, but for ``unquiet_bytes``. ``post`` is called with each end of a part; it must not block.
    """

    def __init__(self, regions: tuple[Region, ...], limits: Limits, post: Callable[[Moved], None]) -> None:
        self._regions, self._limits, self._post = regions, limits, post
        self._space: Space | None = None
        self._prepared: dict[PartRef, Callable[[Fence | None], Checksum]] = {}  # of parts that are on their way
        self._ended: dict[PartRef, _Ended] = {}
        self._failed: dict[int, Job] = {}  # by batch: parts that may still be touched because it has failed
        self._patient_until = 0.0  # until when to wait for those to get quiet by themselves

    @property
    def wait_s(self) -> float:
        """The seconds after which to look again."""
        return min((ended.waits.value for ended in self._ended.values()), default=inf)

    @property
    def unquiet_bytes(self) -> int:
        """Bytes of parts that have ended and whose memory may still be touched. Any thread."""
        return sum(e.job.nbytes for e in list(self._ended.values()) if e.waits is not WaitsFor.CHECKSUM)

    # --- while a back end is open ------------------------------------------------------------------------------------

    def prepare(self, action: Move) -> None:
        """Prepare a part's checksum while it is on its way."""
        if action.check is None:
            return
        try:
            self._space = space = self._space or memory.space(self._regions)
            if space.by_itself:
                self._prepared[action.ref] = space.prepare_checksum(action.check, "destination")
        except BaseException:
            log.exception("a checksum could not be prepared")

    def add(self, job: Job, moved: Moved) -> None:
        begin = self._prepared.pop(moved.ref, None)
        if not moved.quiet:
            self._ended[moved.ref] = _Ended(WaitsFor.BACKEND, job)
        elif begin is not None and moved.failure is None:
            try:
                self._ended[moved.ref] = _Ended(WaitsFor.CHECKSUM, job, moved=moved, checksum=begin(None))
                return
            except BaseException:
                log.exception("a checksum could not be begun")
        self._post(moved)

    def unquiet(self, ref: PartRef) -> Job | None:
        """Return a part that waits for the back end; ``None`` if it does not."""
        ended = self._ended.get(ref)
        return ended.job if ended is not None and ended.waits is WaitsFor.BACKEND else None

    def failed(self, batch: int, job: Job) -> None:
        """Record that a batch of a part has failed and may still touch its memory."""
        self._failed[batch] = job
        self._patient_until = clock.now() + self._limits.grace

    def quieted(self, batch: int) -> None:
        """Record that a failed batch no longer touches memory."""
        job = self._failed.pop(batch, None)
        if job is not None and all(other is not job for other in self._failed.values()):
            self.calm(job)

    def calm(self, job: Job) -> None:
        """Take in that the memory of a part is quiet; report it if the part has ended."""
        job.calm()
        self._failed = {batch: other for batch, other in self._failed.items() if other is not job}
        if self.unquiet(job.ref) is job:
            self._quiet(job.ref)

    def link_closed(self, link: LinkId, can: Capabilities) -> None:
        """Take in that a link has ended, which makes the memory of some of its parts quiet."""
        for job in self._unquiet():
            if job.ref.link == link and job.calmed_by_close(can):
                self.calm(job)

    def needs_reset(self, can: Capabilities, busy: bool, told: Callable[[Job], bool]) -> bool:
        """Return whether the back end has to be reset now, because nothing else makes the memory quiet.

        A reset waits while parts are moving, or memory may get quiet by itself, unless too much is not quiet.

        Args:
            can: The back end's capabilities.
            busy: Whether parts are moving.
            told: Returns whether the peer will say when it is done with the memory that a part has lent it.
        """
        if can.quiet not in ("later", "backend_reset") or not (unquiet := self._unquiet()):
            return False
        waits = busy or (can.quiet == "later" and clock.now() < self._patient_until)
        waits = waits or all(map(told, unquiet))
        return not waits or sum(job.nbytes for job in unquiet) > self._limits.quarantine

    # --- the rest of its life ------------------------------------------------------------------------------------------

    def backend_closed(self, jobs: Sequence[Job], work: Sequence[Fence]) -> None:
        """Take in that the back end is closed and touches nothing any more.

        Args:
            jobs: The parts that have ended with that, while the device was at work.
            work: What the device has still to do. It was done with the parts that had ended before.
        """
        self._forget_batches()
        for job in self._unquiet():
            self.calm(job)
        if work:
            self._keep(jobs, WaitsFor.DEVICE, work)

    def backend_stuck(self, jobs: Sequence[Job]) -> None:
        """Take in that the back end could not be closed. What it may touch is never used again."""
        self._forget_batches()
        self._keep([*self._unquiet(), *jobs], WaitsFor.NOTHING, ())

    def look(self) -> None:
        """Report the parts whose checksums are made, and those that the device is done with."""
        for ref, ended in list(self._ended.items()):
            if ended.waits is WaitsFor.CHECKSUM:
                self._look_at_checksum(ref, ended)
            elif ended.waits is WaitsFor.DEVICE:
                while ended.work and _done(ended.work[-1]):
                    ended.work.pop()
                if not ended.work:
                    self._quiet(ref)

    def wait(self) -> None:
        """Wait until no checksum is being made."""
        for ended in self._ended.values():
            if ended.checksum is not None:
                with suppress(Exception):  # nobody needs the results any more
                    ended.checksum.value  # noqa: B018  (waits)

    def _look_at_checksum(self, ref: PartRef, ended: _Ended) -> None:
        moved, checksum = ended.moved, ended.checksum
        assert moved is not None and checksum is not None
        try:
            if not checksum.fence.passed():
                return
            moved = msgspec.structs.replace(moved, checksum=checksum.value)
        except BaseException:
            log.exception("a checksum failed")
        del self._ended[ref]
        self._post(moved)

    def _quiet(self, ref: PartRef) -> None:
        """Report that the memory of a failed part is quiet now."""
        del self._ended[ref]
        self._post(Moved(ref, Failure(FailureKind.CANCELLED, "it ended earlier"), True, 0))

    def _unquiet(self) -> list[Job]:
        return [ended.job for ended in self._ended.values() if ended.waits is WaitsFor.BACKEND]

    def _keep(self, jobs: Iterable[Job], waits: WaitsFor, work: Sequence[Fence]) -> None:
        rest = list(work)
        self._ended |= {job.ref: _Ended(waits, job, rest) for job in jobs}

    def _forget_batches(self) -> None:
        self._prepared.clear()
        self._failed.clear()


def _done(fence: Fence) -> bool:
    """Return whether work is done; the work of a device that has failed is."""
    try:
        return fence.passed()
    except BaseException:
        log.exception("the device failed while it packed or unpacked")
        return True


def shut(transport: Transport) -> bool:
    """Close a back end, whatever it raises; return whether it has closed, so that it touches no memory any more."""
    try:
        transport.close()
        return True
    except BaseException:
        log.exception("the back end did not close cleanly")
        return False


def unmoved(ref: PartRef) -> Moved:
    """Return the end of a part that has not begun because its link does not exist."""
    return Moved(ref, Failure(FailureKind.PEER_LOST, "the link is broken"), True, 0, collateral=True)


def backend_failed(detail: str) -> Failure:
    """Return a failure of a back end."""
    return Failure(FailureKind.BACKEND_FAILED, detail)
