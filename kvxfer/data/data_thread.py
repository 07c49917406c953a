"""All that happens on the data thread: it owns the back end, moves parts, says how each ended.

Each part is a *job* (``jobs/``) that turns into one or more batches. Nothing here knows tokens, digests or deadlines of
transfers; the one clock is for aborts, which must end in bounded time: a batch that does not end within ``grace`` seconds
of its abort costs its link, memory that does not get quiet costs the back end (``reset``), when nothing else is moving or
too much is quarantined.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.data.checks import Checks
from kvxfer.data.command_queue import CommandQueue
from kvxfer.data.jobs import Job, Wire, make_job
from kvxfer.data.policy import lent
from kvxfer.data.results import (
    Broken,
    Connected,
    Died,
    Disconnected,
    EndpointMade,
    PieceReady,
    PieceTaken,
    Reset,
    Result,
)
from kvxfer.data.staging import Staging
from kvxfer.errors import TransportError
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Region
from kvxfer.protocol.values import LinkId, Move, Moved, PartRef, Role
from kvxfer.transport import Capabilities, Completion, Transport, Verb

__all__ = ["DataThread"]

log = logging.getLogger("kvxfer.mover")

REOPEN_S = 1.0
"""Shortest time between two openings of the back end; doubles while it cannot be opened, up to ``REOPEN_MOST_S``."""
REOPEN_MOST_S = 30.0

LOOK_S = 0.00003
"""How soon to ask again whether a device is done with what nothing else tells of: it packs a piece in twice that time."""

PATIENCE_S = 1.0
"""For how long a consumer may take nothing of what was packed for it while others wait for a slot. A piece is on its way for
milliseconds; then it waits for a consumer that has stopped."""

_UNENDED: list[Staging | None] = []
"""Staging memory in which a device is still at work when its thread ends: it and its tables must not be lent to others."""


@dataclass
class _Peer:
    """A link that is connected.

    Attributes:
        number: Tells this making of the link from earlier ones.
        peer: The back end's number for the connection.
        broken: Whether an abort took all of it along.
    """

    number: int
    peer: int
    broken: bool = False


class DataThread:
    """The data thread: ``run``, and what ``Mover`` posts to it. For the arguments see ``Mover``.

    Attributes:
        ready: Set once the back end has been made, or could not be.
        failure: Why the back end could not be made; else ``None``.
        made: What the back end can do; ``None`` until it has been made.
        staging: The staging memory that was made for it; ``None`` until then.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Transport],
        regions: tuple[Region, ...],
        stage: Callable[[Capabilities], Staging],
        post: Callable[[Result], None],
        grace: float,
        quarantine_limit: int,
    ) -> None:
        self._name = name
        self._make, self._regions, self._stage, self._post = make, regions, stage, post
        self._grace, self._limit = grace, quarantine_limit
        self.ready = threading.Event()
        self.failure: Exception | None = None
        self.made: Capabilities | None = None
        self.staging: Staging | None = None
        self._transport: Transport | None = None
        self._reopen, self._wait = 0.0, REOPEN_S
        self._asked: list[tuple[LinkId, int, Role]] = []  # for endpoints, while the back end is down
        self._unused: dict[LinkId, bytes] = {}  # endpoints made for links that are not connected
        self._peers: dict[LinkId, _Peer] = {}
        self._jobs: dict[PartRef, Job] = {}
        self._restless: dict[PartRef, Job] = {}  # those that may go on without an event of their own
        self._doubtful: set[LinkId] = set()  # something has failed on them
        self._lines: dict[tuple[LinkId, Verb], deque[Job]] = {}
        self._batches: dict[int, Job] = {}
        self._aborted: dict[PartRef, float] = {}
        self._quarantine: dict[PartRef, Job] = {}
        self._checks = Checks(regions, post)
        self._stopping = False

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of parts that have ended but whose memory the back end may still touch. Any thread."""
        return sum(job.nbytes for job in list(self._quarantine.values()))

    def run(self, inbox: CommandQueue) -> None:
        """Make the back end and do what comes in, until ``stop``; then every part has ended.

        Whatever a back end raises, be it no ``Exception``, costs its parts at the most.
        """
        try:
            try:
                self._open()
            except BaseException as e:
                self.failure = (
                    e if isinstance(e, Exception) else TransportError(f"back end {self._name!r} raised {e!r}")
                )
                self._shut()
            self.ready.set()
            while not self._stopping:
                try:
                    self._turn(inbox)
                except BaseException:
                    log.exception("the back end failed in a way it must not")
                    self._reset(_failed("it failed in a way it must not"))
            self._end()
        except BaseException as e:
            self._post(Died(_failed(f"the data thread of back end {self._name!r} has died: {e!r}")))
            raise

    def _end(self) -> None:
        """Close the back end, and tell of each part that it has ended and whether its memory is quiet."""
        quiet = self._void(Failure(FailureKind.CANCELLED, "it was closed"))
        self._checks.wait()
        self._checks.look()
        if not quiet:
            _UNENDED.append(self.staging)

    def _open(self) -> None:
        self._transport = transport = self._make()
        self.made = transport.capabilities
        kinds = {r.device.partition(":")[0] for r in self._regions}
        if self.staging is None:
            self.staging = self._stage(transport.capabilities)
        # Memory that the back end cannot move is not its business; all of it goes staged, which is memory 1.
        movable = kinds <= transport.capabilities.memory
        transport.register(self._regions if movable else (self.staging.region,))
        transport.register((self.staging.region,))

    def _turn(self, inbox: CommandQueue) -> None:
        transport = self._transport
        fd = None if transport is None else transport.fileno()
        inbox.sleep(fd, self._timeout(transport, fd))
        for call in inbox.take():
            call()
            if self._stopping:
                return
        self._checks.look()
        if self._transport is None:
            self._try_open()
            return
        for done in self._transport.poll():
            self._completed(done)
        self._inspect()
        given = -1
        while self.staging is not None and given != self.staging.given:  # a slot may be what another job waits for
            given = self.staging.given
            for job in list(self._restless.values()):
                self._advance(job)
        self._make_room()
        self._overdue()

    def _make_room(self) -> None:
        """Give up transfers whose consumers take nothing of theirs while others wait for slots.

        Once such consumers go on, they may ask for the transfers anew.
        """
        hungry = {job.ref.link for job in self._restless.values() if job.starving and job.ref.role == "producer"}
        idle = set(self.staging.idle(PATIENCE_S)) if hungry and self.staging is not None else set()
        if not idle or not hungry - idle:
            return
        for job in [j for j in self._jobs.values() if j.ref.link in idle and j.ref.role == "producer" and not j.error]:
            job.collateral = True
            why = f"its consumer took nothing for {PATIENCE_S:g} s, while others waited"
            self._stop(job, Failure(FailureKind.OVERLOADED, why))

    def _timeout(self, transport: Transport | None, fd: int | None) -> float:
        jobs = self._restless.values()
        if (
            self._checks
            or any(job.waiting_on_device for job in jobs)
            or (jobs and self.staging and self.staging.settling)
        ):
            return LOOK_S
        if transport is None:
            return 1.0 if self.failure is not None else min(max(self._reopen - time.monotonic(), 0.0), 1.0)
        active, idle = transport.poll_interval_s
        wait = 1.0 if fd is not None else (active if self._batches else idle)
        soon = self._aborted or self._quarantine or any(job.starving for job in jobs)
        return min(wait, 0.05) if soon else wait

    @property
    def _backend(self) -> Transport:
        if self._transport is None:
            raise RuntimeError("the back end is down")
        return self._transport

    def endpoint(self, link: LinkId, number: int, role: Role) -> None:
        if self.failure is not None:
            self._post(EndpointMade(link, number, b"", Failure.of(self.failure).about("it cannot be started: ")))
            return
        if self._transport is None:
            self._asked.append((link, number, role))
            return
        try:
            self._withdraw(link)
            self._unused[link] = mine = self._transport.endpoint_lending(*lent(self._transport.capabilities, role))
            self._post(EndpointMade(link, number, mine))
        except BaseException as e:
            self._post(EndpointMade(link, number, b"", Failure.of(e)))

    def _withdraw(self, link: LinkId) -> None:
        unused = self._unused.pop(link, None)
        if unused is not None:
            self._backend.withdraw(unused)

    def connect(self, link: LinkId, number: int, mine: bytes, theirs: bytes) -> None:
        try:
            self._hang_up(link)
            self._peers[link] = _Peer(number, self._backend.connect(mine, theirs))
            self._unused.pop(link, None)
            self._post(Connected(link, number))
        except BaseException as e:
            self._post(Connected(link, number, Failure.of(e)))

    def disconnect(self, link: LinkId) -> None:
        try:
            self._withdraw(link)
            self._hang_up(link)
        except BaseException as e:
            log.exception("a link could not be closed")
            self._reset(Failure.of(e).about("a link could not be closed: "))
        self._post(Disconnected(link))

    def _hang_up(self, link: LinkId) -> None:
        """Close a link, and end what was moving on it."""
        known = self._peers.pop(link, None)
        if known is None:
            return
        try:
            self._backend.disconnect(known.peer)
        except BaseException as e:
            log.warning("closing the link to %s: %s", link, e)
        for done in self._backend.poll():
            self._completed(done)
        for job in [j for j in self._jobs.values() if j.ref.link == link]:
            self._aborted.setdefault(job.ref, time.monotonic() + self._grace)
            job.stop(Failure(FailureKind.PEER_LOST, "the link was closed"))
            self._advance(job)
        caps = self._backend.capabilities
        for ref in [r for r, j in self._quarantine.items() if r.link == link and j.calmed_by_close(caps)]:
            self._calm(ref)
        for verb in Verb:
            self._lines.pop((link, verb), None)

    def _break(self, link: LinkId, why: Failure) -> None:
        """Report that a link is of no more use to anyone; whoever made it must make it anew."""
        known = self._peers.get(link)
        if known is None or known.broken:
            return
        known.broken = True
        for job in self._jobs.values():
            if job.ref.link == link and job.error is None:
                job.collateral = True
        self._post(Broken(link, known.number, why))

    def _inspect(self) -> None:
        """Look at the links on which something has failed.

        Those that are lost are reported broken, and all that moves on them ends with them.
        """
        doubtful, self._doubtful = self._doubtful, set()
        for link in doubtful:
            self._doubt(link)

    def _doubt(self, link: LinkId) -> None:
        known = self._peers.get(link)
        why = None if known is None or self._transport is None else self._transport.lost(known.peer)
        if why is not None:
            self._break(link, Failure(FailureKind.PEER_LOST, why))

    def move(self, action: Move) -> None:
        try:
            self._begin(action)
        except BaseException as e:
            if action.ref in self._jobs:
                raise
            log.exception("a part could not be begun")
            self._post(Moved(action.ref, Failure.of(e), True, 0))

    def _begin(self, action: Move) -> None:
        ref = action.ref
        self._doubt(ref.link)
        known = self._peers.get(ref.link)
        if known is None or known.broken or self._transport is None:
            self._post(Moved(ref, Failure(FailureKind.PEER_LOST, "the link is broken"), True, 0, collateral=True))
            return
        wire = Wire(self._transport, known.peer, self._regions, self.staging, self._batches)
        begun = time.monotonic()
        job = make_job(action, wire, self._post_slot)
        job.begun = begun
        self._jobs[ref] = job
        if action.verb is not Verb.WRITE and (action.verb is not Verb.READ or ref.role == "producer"):
            job.line = self._lines.setdefault((ref.link, action.verb), deque())
            job.line.append(job)
        self._advance(job)
        if ref in self._jobs:
            self._checks.get_ready(action)

    def _post_slot(self, ref: PartRef, piece: int, offset: int, nbytes: int) -> None:
        self._post(PieceReady(ref, piece, offset, nbytes) if offset >= 0 else PieceTaken(ref, piece))

    def slot(self, ref: PartRef, piece: int, offset: int, nbytes: int) -> None:
        job = self._jobs.get(ref)
        if job is not None:
            job.slot(piece, offset, nbytes)
            self._advance(job)

    def abort(self, ref: PartRef) -> None:
        job = self._jobs.get(ref)
        if job is not None and ref not in self._aborted:
            self._stop(job, Failure(FailureKind.CANCELLED, "aborted"))

    def _stop(self, job: Job, why: Failure) -> None:
        """End a job early, in bounded time."""
        ref = job.ref
        self._aborted.setdefault(ref, time.monotonic() + self._grace)
        job.stop(why)
        if job.batches and self._backend.capabilities.abort == "peer":
            self._break(ref.link, _failed("a transfer was given up, which ends all that moves on its link"))
        for batch in list(job.batches):
            self._backend.abort(batch)
        self._advance(job)

    def remote_writes_ended(self, ref: PartRef) -> None:
        job = self._jobs.get(ref) or self._quarantine.get(ref)
        if job is None:
            return
        job.stop(Failure(FailureKind.CANCELLED, "the peer has ended its half"))
        job.remote_writes_ended()
        self._advance(job)
        if ref in self._quarantine and job.quiet:
            self._calm(ref)

    def _completed(self, done: Completion) -> None:
        job = self._batches.pop(done.batch, None)
        if job is None:
            return
        if done.error is not None:
            self._doubtful.add(job.ref.link)
        try:
            job.completed(done)
        except BaseException as e:
            job.stop(Failure.of(e))
        self._advance(job)

    def _advance(self, job: Job) -> None:
        """Let a job go on, and then those that wait behind it for their turn."""
        self._progress(job)
        line = job.line
        while line and not line[0].submitting:
            line.popleft()
            if line:
                self._progress(line[0])

    def _progress(self, job: Job) -> None:
        """Let a job go on; report its end."""
        if job.ref not in self._jobs:
            return
        try:
            job.advance()
        except BaseException as e:
            job.stop(Failure.of(e))
            for batch in list(job.batches):
                self._backend.abort(batch)
        if not job.ended:
            if job.restless:
                self._restless[job.ref] = job
            else:
                self._restless.pop(job.ref, None)
            return
        del self._jobs[job.ref]
        self._restless.pop(job.ref, None)
        self._aborted.pop(job.ref, None)
        known = self._peers.get(job.ref.link)
        closing = job.calmed_by_close(self._backend.capabilities)
        if closing and (known is None or known.peer != job.wire.peer):
            job.calm()  # what was to make it quiet has happened
        if not job.quiet:
            self._quarantine[job.ref] = job
            if closing and not job.lends_memory:  # of what was lent, the peer will speak
                self._break(job.ref.link, _failed("memory of a failed transfer has to be made quiet"))
        took = time.monotonic() - job.begun
        self._checks.end(Moved(job.ref, job.error, job.quiet, 0 if job.error else job.nbytes, job.collateral, took))

    def _overdue(self) -> None:
        now = time.monotonic()
        for ref, deadline in list(self._aborted.items()):
            if now >= deadline and ref in self._jobs:
                log.warning("a batch for %s did not end within %g s of its abort; closing its link", ref, self._grace)
                if ref.link not in self._peers:
                    self._reset(_failed("a batch did not end when its link was closed"))
                    return
                self._aborted[ref] = now + self._grace
                self._break(ref.link, _failed("a batch did not end when it was aborted"))
                self._hang_up(ref.link)
        if self._quarantine and self._backend.capabilities.quiet == "backend_reset":
            if not self._jobs or self.quarantined_bytes > self._limit:
                self._reset(_failed("memory of failed transfers has to be made quiet"))

    def _calm(self, ref: PartRef) -> None:
        self._quarantine.pop(ref).calm()
        self._post(Moved(ref, Failure(FailureKind.CANCELLED, "it ended earlier"), True, 0))

    def _reset(self, why: Failure) -> None:
        """Close the back end, which makes all memory quiet, and make it anew as soon as may be."""
        log.warning("resetting back end %s: %s", self._name, why.detail)
        if self._void(why.about("the back end was reset: ")) and self.staging is not None:
            self.staging.reset()  # else slots that were in use stay out of use, as the cache's blocks do
        self._post(Reset(self._name, why))
        self._try_open()

    def _void(self, why: Failure) -> bool:
        """Close the back end, which ends all parts; return whether all memory is quiet."""
        never = self._transport is not None and self._transport.capabilities.quiet == "never"
        self._shut()
        never |= not self._device_done()
        for job in list(self._jobs.values()):
            job.stop(why)
            self._post(Moved(job.ref, job.error, not never, 0, collateral=True))
        self._checks.forget()
        for known in (self._jobs, self._restless, self._lines, self._batches, self._aborted, self._peers, self._unused):
            known.clear()
        if not never:
            for ref in list(self._quarantine):
                self._calm(ref)
        return not never

    def _try_open(self) -> None:
        """Open the back end, unless that was tried a moment ago, or it could not be opened to begin with.

        Then links that have been asked for can be made, or fail.
        """
        now = time.monotonic()
        if now < self._reopen or self.failure is not None:
            return
        self._reopen, self._wait = now + self._wait, min(2 * self._wait, REOPEN_MOST_S)
        asked, self._asked = self._asked, []
        try:
            self._open()
            self._wait = REOPEN_S
            for link, number, role in asked:
                self.endpoint(link, number, role)
        except BaseException as e:
            log.exception("the back end cannot be opened; trying again in %g s", self._reopen - now)
            self._shut()
            for link, number, _ in asked:
                self._post(EndpointMade(link, number, b"", Failure.of(e).about("it cannot be opened: ")))

    def _device_done(self) -> bool:
        """Wait until the device neither packs nor unpacks, for ``grace`` seconds at most; return whether it is so.

        A device that has failed does neither.
        """
        try:
            done = self.staging is None or self.staging.wait(time.monotonic() + self._grace)
        except BaseException:
            log.exception("the device failed while it packed or unpacked")
            return True
        if not done:
            log.error("the device has not packed or unpacked in %g s what it was given", self._grace)
        return done

    def stop(self) -> None:
        """End ``run``."""
        self._stopping = True

    def _shut(self) -> None:
        if self._transport is not None:
            try:
                self._transport.close()
            except BaseException:
                log.exception("the back end did not close cleanly")
            self._transport = None


def _failed(detail: str) -> Failure:
    return Failure(FailureKind.BACKEND_FAILED, detail)
