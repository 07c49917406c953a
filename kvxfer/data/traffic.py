"""The traffic over one opened back end: its links, and the parts that move on them. Used by the data thread only.

Each part is a *job* (``jobs/``) that turns into one or more batches. Nothing here knows tokens, digests or deadlines of
transfers. Time matters only for aborts, which must end in bounded time. If a batch does not end within ``grace`` seconds of its
abort, its link is closed, and if memory does not get quiet, the back end may be reset (``part_ends.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvxfer import clock
from kvxfer.data.commands import Connect, Connected, LinkBroken, Result, SlotNews
from kvxfer.data.jobs import SHARED, Direct, Job, LinkContext, make_job, shares, submit_together
from kvxfer.data.part_ends import LOOK_S, Limits, PartEnds, backend_failed, shut, unmoved
from kvxfer.data.policy import lent
from kvxfer.data.progress import PartProgress
from kvxfer.data.slot_queue import SlotQueue
from kvxfer.data.staging import Staging
from kvxfer.errors import TransportError
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Region
from kvxfer.logs import logger
from kvxfer.protocol.parts import most_bytes
from kvxfer.protocol.values import LinkId, Move, Moved, PartRef, Role
from kvxfer.security import Security
from kvxfer.transport import Completion, Fence, Quieted, Transport, Verb
from kvxfer.transport.contract import MAX_ENDPOINT

log = logger("kvxfer.data")


class Traffic:
    """The links of an opened back end, and the parts on them. ``ends`` outlives it; for the other arguments see ``DataThread``."""

    def __init__(
        self,
        transport: Transport,
        regions: tuple[Region, ...],
        staging: Staging,
        post: Callable[[Result], None],
        ends: PartEnds,
        limits: Limits,
        security: Security,
    ) -> None:
        self._transport, self._can = transport, transport.capabilities
        self._most, self._staging = most_bytes(regions), staging
        self._ends, self._post, self._limits, self._security = ends, post, limits, security
        self._unused: dict[LinkId, bytes] = {}  # endpoints made for links that are not connected
        self._links: dict[LinkId, LinkContext] = {}  # links that are connected
        self._suspect_links: set[LinkId] = set()  # links on which something has failed
        self._jobs: dict[PartRef, Job] = {}
        self._awaiting_device: dict[PartRef, Job] = {}  # jobs that wait for the device
        self._awaiting_slot = SlotQueue(staging)
        self._lines: dict[tuple[LinkId, Verb], deque[Job]] = {}
        self._short: dict[LinkId, list[Direct]] = {}  # jobs to begin at the end of the turn, those of a link together
        self._batches: dict[int, Sequence[Job]] = {}
        self._aborted: dict[PartRef, float] = {}
        self._part_progress = PartProgress(post)

    # --- links -----------------------------------------------------------------------------------------------------

    def endpoint(self, link: LinkId, role: Role) -> bytes:
        """Return a fresh endpoint for a link on which this agent has this role.

        Raises:
            TransportError: It is longer than back ends may make one.
        """
        self._withdraw(link)
        self._unused[link] = mine = self._transport.endpoint_lending(*lent(self._can, role))
        if len(mine) > MAX_ENDPOINT:
            self._withdraw(link)
            raise TransportError(f"the back end made an endpoint of {len(mine)} bytes, more than {MAX_ENDPOINT}")
        return mine

    def _withdraw(self, link: LinkId) -> None:
        unused = self._unused.pop(link, None)
        if unused is not None:
            self._transport.withdraw(unused)

    def connect(self, asked: Connect) -> None:
        link, number = asked.link, asked.number
        try:
            self._hang_up(link)
            for host in self._transport.dials(asked.theirs):
                self._security.check_host(host, asked.host)
            peer = self._transport.connect_over(asked.mine, asked.theirs, asked.control)
            self._links[link] = LinkContext(
                self._transport, self._can, peer, number, self._most, self._staging, self._batches, self._post
            )
            self._staging.usage.know(link, asked.owner)
            self._unused.pop(link, None)
            self._post(Connected(link, number))
        except BaseException as e:
            self._post(Connected(link, number, Failure.of(e)))

    def disconnect(self, link: LinkId) -> None:
        """Close a link.

        Raises:
            BaseException: The back end has to be reset.
        """
        self._withdraw(link)
        self._hang_up(link)

    def _hang_up(self, link: LinkId) -> None:
        """Close a link, and end what was moving on it."""
        context = self._links.get(link)
        if context is None:
            return
        context.broken = True
        self._transport.disconnect(context.peer)  # if it raises, the link counts as open (``exposed``)
        del self._links[link]
        self.poll()
        for job in [j for j in self._jobs.values() if j.ref.link == link]:
            job.stop(_hung_up())
            self._advance(job)
            self._must_end(job)
        self._ends.link_closed(link, self._can)
        for verb in Verb:
            self._lines.pop((link, verb), None)
        self._staging.usage.forget(link)

    def _break(self, link: LinkId, why: Failure) -> None:
        """Report that a link is broken, so that it is made again."""
        context = self._links.get(link)
        if context is None or context.broken:
            return
        context.broken = True
        for job in self._jobs.values():
            if job.ref.link == link and job.error is None:
                job.collateral = True
        self._post(LinkBroken(link, context.number, why))

    def _doubt(self, link: LinkId) -> None:
        """Check a link on which something may have failed; if it is lost, report it broken and end everything on it."""
        context = self._links.get(link)
        why = None if context is None else self._transport.lost(context.peer)
        if why is not None:
            self._break(link, why)

    # --- parts -----------------------------------------------------------------------------------------------------

    def move(self, action: Move) -> None:
        """Begin a part; its end is reported by ``Moved``."""
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
        context = self._links.get(ref.link)
        if context is None or context.broken:
            self._post(unmoved(ref))
            return
        job = make_job(action, context)
        job.begun = clock.now()
        self._jobs[ref] = job
        if action.verb in (Verb.SEND, Verb.RECV):
            job.line = self._lines.setdefault((ref.link, action.verb), deque())
            job.line.append(job)
        if isinstance(job, Direct) and shares(action, self._can):
            self._short.setdefault(ref.link, []).append(job)
        else:
            self._advance(job)
            self._get_ready(job)

    def _begin_short(self) -> None:
        """Begin the short parts that have come in this turn, those of a link together, which costs as much as one alone."""
        waiting, self._short = self._short, {}
        for of_link in waiting.values():
            jobs = [job for job in of_link if job.submitting]  # the others have been stopped
            for first in range(0, len(jobs), SHARED):
                some = jobs[first : first + SHARED]
                if len(some) > 1:
                    with suppress(BaseException):  # each will fail for itself when it is submitted alone
                        submit_together(some)
                for job in some:
                    if not job.batches:
                        self._advance(job)
                    self._get_ready(job)

    def _get_ready(self, job: Job) -> None:
        if job.ref in self._jobs:
            self._ends.prepare(job.action)

    def heard(self, news: SlotNews) -> None:
        """Handle what the peer says about a slot."""
        job = self._jobs.get(news.ref)
        if job is not None:
            job.heard(news.said)
            self._go_on_with(job)

    def abort(self, ref: PartRef) -> None:
        job = self._jobs.get(ref)
        if job is not None and ref not in self._aborted:
            self._stop(job, Failure(FailureKind.CANCELLED, "aborted"))

    def remote_writes_ended(self, ref: PartRef) -> None:
        job = self._jobs.get(ref) or self._ends.unquiet(ref)
        if job is None:
            return
        job.stop(Failure(FailureKind.CANCELLED, "the peer ended its side of the link"))
        job.remote_writes_ended()
        self._advance(job)
        if job.quiet and self._ends.unquiet(ref) is not None:
            self._ends.calm(job)

    def _stop(self, job: Job, why: Failure) -> None:
        """End a job early, in bounded time."""
        job.stop(why)
        if job.batches and self._can.abort == "peer":
            self._break(job.ref.link, backend_failed("a transfer was given up, which ends everything on its link"))
        for batch in list(job.batches):
            self._transport.abort(batch)
        self._advance(job)
        self._must_end(job)

    def _must_end(self, job: Job) -> None:
        """Have a job that was stopped end within ``grace`` seconds, unless it has ended already."""
        if job.ref in self._jobs:
            self._aborted.setdefault(job.ref, clock.now() + self._limits.grace)

    def _completed(self, done: Completion) -> None:
        for job in self._batches.pop(done.batch, ()):
            if done.error is not None:
                self._suspect_links.add(job.ref.link)
            if not done.quiet:
                self._ends.failed(done.batch, job)
            try:
                job.completed(done)
            except BaseException as e:
                job.stop(Failure.of(e))
            self._go_on_with(job)

    def _go_on_with(self, job: Job) -> None:
        """Let a job go on that may have given a slot back; if others wait for one, it waits with them."""
        if self._awaiting_slot.waits(job.ref.role) and job.ref in self._jobs and job.error is None:
            self._awaiting_slot.add(job)
            self._awaiting_slot.feed(self._advance)
        self._advance(job)

    def _advance(self, job: Job) -> None:
        """Let a job go on, and then those that wait for their turn after it."""
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
            if self._links.get(job.ref.link) is not job.context and not job.complete:
                job.stop(_hung_up())  # it may have its turn only now, because those before it ended with the link
            job.advance()
        except BaseException as e:
            job.stop(Failure.of(e))
            for batch in list(job.batches):
                self._transport.abort(batch)
        if not job.ended:
            if job.waiting_on_device:
                self._awaiting_device[job.ref] = job
            else:
                self._awaiting_device.pop(job.ref, None)
            if job.starving:
                self._awaiting_slot.add(job)
            else:
                self._awaiting_slot.remove(job)
            return
        del self._jobs[job.ref]
        self._awaiting_device.pop(job.ref, None)
        self._awaiting_slot.remove(job)
        self._aborted.pop(job.ref, None)
        context = self._links.get(job.ref.link)
        closing = job.calmed_by_close(self._can)
        if closing and context is not job.context:
            self._ends.calm(job)  # its link is closed, which made it quiet
        if closing and not job.quiet and not job.lends_memory:  # the peer will tell about lent memory
            self._break(job.ref.link, backend_failed("memory of a failed transfer has to be made quiet"))
        nbytes = 0 if job.error else job.nbytes
        self._ends.add(job, Moved(job.ref, job.error, job.quiet, nbytes, job.collateral, clock.now() - job.begun))

    # --- the turn of the data thread ---------------------------------------------------------------------------------

    @property
    def fd(self) -> int | None:
        """A descriptor that polls readable when there is something to do; ``None`` if there is none."""
        return self._transport.fileno()

    @property
    def wait_s(self) -> float:
        """The seconds after which to look again even if nothing has happened."""
        hungry = bool(self._awaiting_slot)
        if self._awaiting_device or (hungry and self._staging.settling):
            return LOOK_S
        active, idle = self._transport.poll_interval_s
        wait = 1.0 if self.fd is not None else (active if self._batches else idle)
        soon = self._aborted or hungry
        return min(wait, 0.05, max(self._awaiting_slot.look_at - clock.now(), 0.0)) if soon else wait

    def poll(self) -> None:
        """Record which batches have ended, and which have become quiet."""
        for word in self._transport.poll():
            if isinstance(word, Quieted):
                self._ends.quieted(word.batch)
            else:
                self._completed(word)

    def go_on(self) -> Failure | None:
        """Let everything go on; return why the back end has to be reset, or ``None``."""
        self._begin_short()
        self.poll()
        doubtful, self._suspect_links = self._suspect_links, set()
        for link in doubtful:
            self._doubt(link)
        given = None
        while given != self._staging.given:  # another job may wait for a slot that came back
            given = self._staging.given
            for job in list(self._awaiting_device.values()):
                self._advance(job)
            self._awaiting_slot.feed(self._advance)
        for stalled in self._awaiting_slot.stalled_holders(self._jobs.values()):
            why = "its consumer stalled, and its slot of staging memory was needed by another"
            # It goes on until the control thread aborts its attempt, whose consumer may ask again later. By then what was announced
            # is known to be void; a consumer that reads the slot before that must find its own bytes there.
            self._post(Moved(stalled.ref, Failure(FailureKind.OVERLOADED, why), False, 0, collateral=True))
        return self._overdue()

    def _overdue(self) -> Failure | None:
        """Give up links on which batches outlive their abort; return why the back end must be reset if that does not help."""
        now, grace = clock.now(), self._limits.grace
        if now >= self._part_progress.due:
            self._part_progress.look(self._jobs.values())
        for ref, deadline in list(self._aborted.items()):
            if now >= deadline and ref in self._jobs:
                job = self._jobs[ref]
                if not job.batches and job.waiting_on_device and self._staging.work():
                    continue  # only the device is still at work, and no closing would end that
                if self._links.get(ref.link) is not job.context:  # where the link is open, it is a new one
                    return backend_failed("a batch did not end when its link was closed")
                log.warning("a batch for %s did not end within %g s of its abort; closing its link", ref, grace)
                self._aborted[ref] = now + grace
                self._break(ref.link, backend_failed("a batch did not end when it was aborted"))
                self._hang_up(ref.link)
        if self._ends.needs_reset(self._can, bool(self._jobs), self._will_be_told):
            return backend_failed("memory of failed transfers has to be made quiet")
        return None

    def _will_be_told(self, job: Job) -> bool:
        """Return whether the peer will say when it is done with memory that was lent to it, or else its link will be closed."""
        return job.lends_memory and self._links.get(job.ref.link) is job.context

    @property
    def exposed(self) -> set[LinkId]:
        """The links whose peers may write into the cache."""
        return set(self._links) if 0 in lent(self._can, "consumer")[0] else set()

    def close(self) -> bool:
        """Close the back end; return whether that makes it touch nothing any more. ``void`` has to follow."""
        return shut(self._transport) and self._can.quiet != "never"

    def void(self, why: Failure, closed: bool, work: Sequence[Fence]) -> None:
        """End all parts, once the back end is ``closed`` or could not be; the device may still be at ``work`` on them."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.stop(why)
            self._post(Moved(job.ref, job.error, closed and not work, 0, collateral=True))
        if closed:
            self._ends.backend_closed(jobs, work)
        else:
            self._ends.backend_stuck(jobs)


def _hung_up() -> Failure:
    """Return the failure of a part whose link was closed."""
    return Failure(FailureKind.PEER_LOST, "the link was closed")
