"""Requests that offer their KV to other engines, and their blocks, from the arrival to the end of the offer.

Others may be reading blocks when the engine lets go of them. They are kept until all ranks are done with them:

- A request that ended well: the engine itself keeps its blocks until it is told to free them.
- The end of a prompt in a window: the engine gives it up while the request goes on, so it is pinned here.
- Blocks that were computed already, for no request: they are pinned here.
- A request that is aborted: the engine frees its blocks at once, so those that were offered are pinned here.
- A request that is preempted: the engine needs its blocks, so they are not pinned; the offer is revoked instead. In an elastic
  cache they are pinned all the same, because a block that is freed there may lose its memory under a reader.
- Any of these, in an engine that writes to new blocks before its workers hear of revocations: what is offered whole is pinned
  until the step that revokes it has been given its blocks. What is offered in part is delivered to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from kvxfer import arguments, clock
from kvxfer.engine.notices import Notices
from kvxfer.engine.pins import BlockPins
from kvxfer.engine.stories import Stories
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry.tables import TableCheck
from kvxfer.identity import FIRST, LAST, Generation, RequestId, Source, TransferId
from kvxfer.logs import logger
from kvxfer.schedule import EngineRequest, Offering, OfferingState, OfferSchedule, Pin
from kvxfer.schedule.producer import ABORTED
from kvxfer.text import printable
from kvxfer.ticket import Ticket
from kvxfer.values import MAX_REASON, NULL, BlockTable, Group, OfferEnd, Rank

log = logger("kvxfer.engine")

_S = OfferingState

LEFT = 8
"""The most tokens at the end of a prompt that consumers compute themselves: more than one where several modules draft."""


class Offers:
    """The requests that offer; one thread.

    ``writes_early``: whether workers may write to a step's new blocks before they know of its revocations.

    Attributes:
        elastic: Whether a block may lose its memory when it is not in use.
        let_go: Called once the blocks of an offering that no request computes are let go of.
    """

    def __init__(
        self,
        schedule: OfferSchedule,
        pins: BlockPins,
        tables: TableCheck,
        ranks: int,
        writes_early: bool,
        notices: Notices,
        stories: Stories,
    ) -> None:
        self.schedule, self._pins, self._tables, self._notices = schedule, pins, tables, notices
        self._ranks, self._writes_early, self._stories = ranks, writes_early, stories
        self._groups = tables.groups
        self._windows = any(group.window for group in self._groups)
        self.elastic = False
        self.let_go: Callable[[Offering], None] = lambda offering: None
        self._leaving: list[Pin] = []  # what the next step revokes

    # --- a request's way -----------------------------------------------------------------------------------------------

    def arrived(self, offering: Offering) -> None:
        """Take in what consumers have said of an offer before it was made."""
        offering.came_at = offering.came_at or clock.now()
        self._notices.offered(offering.transfer, offering.digest)

    def ticket(self, request: EngineRequest, source: Source) -> Ticket | None:
        """Return what a consumer of this request's offer must be told; see ``SchedulerSide.ticket``."""
        offering = request.offering
        if offering is None or not offering.offered or (offering.namesake and request.name not in offering.sharers):
            return None
        return Ticket(offering.transfer, offering.digest, source, offering.total)

    def answer(self, request: str) -> str:
        """Return the name of the answer that tells consumers of this request's offer: a lost request's for a retry.

        Consumers that have been told the same transfer by answers of different names are counted separately (``load``, ``answer``).
        """
        known = self.schedule.requests.find(RequestId(arguments.instance("request", request, str)))
        offering = None if known is None else known.own_offering
        return (
            request
            if known is None or offering is None or not offering.tracked
            else offering.sharers.get(known.name, offering.answer)
        )

    def unanswered(self, answer: str) -> None:
        """Record that an answer (``SchedulerSide.offer``) goes out to nobody, as when its client has hung up.

        What only that answer would have told of is given up.
        """
        self.schedule.unanswered(arguments.string("answer", answer), "its client has hung up")

    def stands(self, ticket: Ticket) -> bool:
        """Return whether what a ticket of this engine names is offered, or will be."""
        return self.schedule.offers(ticket.transfer, ticket.digest)

    def withdraw(self, request: str, reason: str) -> None:
        """End the offer of a running request, whose KV is no longer what its digest says; does nothing without one.

        ``reason`` is for the consumers.
        """
        known = self.schedule.requests.find(RequestId(arguments.instance("request", request, str)))
        arguments.string("reason", reason, MAX_REASON, empty=True)
        if known is not None and known.computing is not None:
            self.schedule.withdraw(known.computing.transfer, reason)

    def computed(self, transfer: TransferId, digest: bytes, tokens: int, table: BlockTable) -> bool:
        """Offer KV that is in these blocks already: of the prefix cache, or of a request with what it has generated.

        The blocks must be in use now. They are pinned for this transfer alone until it is read or given up, or its lease ends.

        ``table`` has the blocks of all its tokens: of a window, those that the token behind the last one attends to; of a state, the
        one that holds it after exactly these tokens. A step that computed them has been given to the workers.

        Returns:
            Whether it is offered. It is not if the name has other content, there is no pool to pin in, or no room in it.

        Raises:
            ArgumentError: The table does not fit this engine's groups, lacks a block or has one twice.
            ScheduleError: The blocks cannot be offered.
        """
        self._tables.check("table", table)
        known = self.schedule.current(transfer)
        if known is None:
            for g, group in enumerate(self._groups):
                first, past = group.kept(tokens)
                if table.count(g) >= past and not table.distinct(g, first, past):
                    self._tables.lists("table", table, g, first, past * group.block_tokens)
            pin = Pin(FIRST, set(kept_blocks(self._groups, table, tokens).ids()))
            if not self._pins.hold(pin, pin.blocks):
                return False
            try:
                known = self.schedule.computed(transfer, digest, tokens, table)
            finally:
                if known is None:
                    self._pins.drop(pin)
            if known is None:
                return False
            pin.generation = known.generation
            known.pins.append(pin)
            known.came_at = known.begun_at = known.whole_at = clock.now()
            self._notices.directory.begins(transfer, digest)
        return known is not None and known.offered and (known.digest, known.total) == (digest, tokens)

    def follows(self, request: EngineRequest) -> bool:
        """Return whether blocks of this running request are offered, or pinned though its offer may be over."""
        offering = request.own_offering
        return offering is not None and (
            offering.tracked
            or offering.request == request.name
            and (offering.end is not None or offering.running is not None)
        )

    def runs(self, request: EngineRequest, computed: int, scheduled: int, table: BlockTable) -> None:
        """Record that the request runs in this step; see ``SchedulerSide.runs``."""
        offering = request.own_offering
        if offering is None or not offering.tracked:
            return
        self._tables.check("table", table)
        for g, group in enumerate(self._groups):
            if group.kind == "full":
                self._tables.lists("table", table, g, 0, min(computed + scheduled, offering.total))
        begun = offering.progress > 0 or offering.held
        if request.computing is offering:
            self.schedule.check(offering, computed + scheduled, table)
            if self._windows and computed + scheduled >= offering.total and offering.end is None:
                end = table.only(_end(group, offering.total) for group in self._groups)
                if self._pins.keep(offering, end.ids()):
                    offering.end = end
            self.schedule.step(offering, computed, scheduled, table, offering.end)
            if self.elastic or self._writes_early:
                self._pin(offering)
        if offering.final and not offering.whole_at:
            offering.whole_at = clock.now()
        if not begun and offering.progress > 0:
            offering.begun_at = clock.now()
            self._notices.directory.begins(offering.transfer, offering.digest)

    def _pin(self, offering: Offering) -> None:
        """Pin the blocks that are new in a running request's offer."""
        if offering.running is not None and offering.running.generation != offering.generation:
            self._taken(offering)  # preempted without a call of ``preempted``
        if not (self.elastic or offering.final):
            return
        running = offering.running or Pin(offering.generation)
        new = set(offering.blocks.ids()) - running.blocks
        if new and self._pins.keep(running, new):
            running.blocks |= new
            offering.running = running

    def preempted(self, request: EngineRequest) -> None:
        """Record that the engine has taken the request's blocks away. Those that were offered are revoked."""
        if request.computing is not None:
            self.schedule.preempt(request.computing)
        offering = request.own_offering
        if offering is not None and offering.request == request.name:
            self._taken(offering)
            offering.end = None
            self._pins.drop(offering)

    def _taken(self, offering: Offering) -> None:
        """Unpin what others may be reading of a running request's offer; what is elastic only once all ranks have said that nobody does."""
        running, offering.running = offering.running, None
        if running is not None:
            if self.elastic:
                self._hold(offering, running.generation, running.blocks)
            self._pins.drop(running)

    def _hold(self, offering: Offering, generation: Generation, blocks: Collection[int]) -> bool:
        """Pin blocks that the engine gives up, until all ranks are done with this generation; log it if that is not possible."""
        pin = Pin(generation, set(blocks))
        if held := self._pins.hold(pin, pin.blocks):
            offering.pins.append(pin)
        else:
            log.warning(
                "request %s: %d blocks are given back while a transfer may still touch them",
                printable(offering.name),
                len(blocks),
            )
        return held

    def finished(
        self, request: EngineRequest, table: BlockTable, complete: bool, *, findable: bool, good: bool
    ) -> bool:
        """Record that the request is over, with this block table at its end; return whether the engine must keep its blocks.

        ``complete``: it ended normally and its KV is good. ``good``: what it has offered is good although it is not complete.
        ``findable``: other engines can find these ranks, so that one may be reading.
        """
        offering = request.own_offering
        if offering is None:
            if request.offering is not None:
                request.offering.namesake = False
            return False
        self._notices.over(offering.transfer, offering.digest)
        if request.name in offering.sharers:
            return self.schedule.finish(request, table, complete)
        end = offering.end
        whole = table if end is None else table.filled(end)
        kept = False
        with self.schedule.door.of(request.name):
            kept = self.schedule.finish(
                request, whole, complete, good and not complete, lambda: self._keep(offering, findable)
            )
        running, offering.running = offering.running, None
        if kept:
            self._pins.drop(running)
            return True
        if not complete and not good:
            self._stories.offer_ended(offering, OfferEnd(Failure(FailureKind.WITHDRAWN, ABORTED), 0, clock.now()))
        if running is not None:
            self._leaving.append(running)
        self._pins.drop(offering)  # last, because only blocks that are still in use can be pinned
        return False

    def _keep(self, offering: Offering, findable: bool) -> bool:
        """Keep blocks that others may be reading of a request that has failed; return whether they are kept until all are done."""
        if self.elastic and offering.running is not None:
            self._hold(offering, offering.running.generation, offering.running.blocks)
            return False
        blocks = offering.blocks.ids() if offering.computed and findable else ()
        return bool(blocks) and self._hold(offering, offering.generation, blocks)

    # --- what ranks report ---------------------------------------------------------------------------------------------

    def shipped(self) -> None:
        """Record that what is revoked so far goes to the workers with a step, which has its blocks."""
        while self._leaving:
            self._pins.drop(self._leaving.pop())

    def unread(self, transfer: TransferId, ranks: Mapping[Rank, Generation]) -> None:
        """Record that nobody reads from some ranks any more what was offered of a transfer, up to a generation."""
        for offering in list(self.schedule.under(transfer)):
            offering.quiet |= {r: max(g, offering.quiet.get(r, g)) for r, g in ranks.items() if g >= offering.born}
            for pin in offering.pins[:] if len(offering.quiet) >= self._ranks else ():
                if pin.generation <= min(offering.quiet.values()):
                    self._pins.drop(pin)
                    offering.pins.remove(pin)
                    self.schedule.forget(offering)

    def ended(self, transfer: TransferId, ranks: Mapping[Rank, OfferEnd]) -> None:
        """Record how an offer has ended on some ranks. What one rank says is told of all, and a failure rather than a delivery."""
        offering = next((one for one in self.schedule.under(transfer) if one.ended is None), None)
        if offering is not None:
            failed = (end for end in ranks.values() if end.failure is not None)
            self._stories.offer_ended(offering, next(failed, next(iter(ranks.values()))))

    def released(self, transfer: TransferId, ranks: Mapping[Rank, Generation]) -> RequestId | None:
        """Record that some ranks are done with an offer, up to a generation; return a held request that may be freed."""
        self.unread(transfer, ranks)
        freed = None
        for offering in list(self.schedule.under(transfer)):
            offering.done |= {r: max(g, offering.done.get(r, g)) for r, g in ranks.items() if g >= offering.born}
            if len(offering.done) >= self._ranks and self._done(offering, min(offering.done.values())):
                freed = offering.request or freed
        return freed

    def _done(self, offering: Offering, generation: Generation) -> bool:
        """Record that all ranks are done with an offering up to a generation; return whether its held blocks are now free."""
        if offering.running is not None and offering.running.generation <= generation:
            self._pins.drop(offering.running)
            offering.running = None
        freed = self.schedule.done(offering, generation)
        if offering.state is _S.CLOSED and offering.over:
            self._pins.drop(offering)
            if not offering.request:
                self.let_go(offering)
        return freed

    def freed(self, offering: Offering) -> None:
        """Record that the engine frees a held request, on its own authority: nobody may be reading its blocks any more."""
        if offering.held:
            self._done(offering, LAST)

    @property
    def unfinished(self) -> bool:
        """Whether blocks are pinned for requests that the engine may have forgotten."""
        return bool(self._leaving or self._pins.holding)


def _end(group: Group, total: int) -> tuple[int, int]:
    """Return the positions of a window's blocks that are kept at the end of a prompt: an engine gives up the first with the last token."""
    return group.kept(total, LEFT) if group.window else (0, 0)


def kept_blocks(groups: Sequence[Group], table: BlockTable, tokens: int) -> BlockTable:
    """Return the blocks of a table that are kept for consumers of ``tokens`` tokens."""
    return table.only(group.kept(tokens) for group in groups)


def lacks_window(groups: Sequence[Group], table: BlockTable, tokens: int) -> bool:
    """Return whether a table lacks a block of a window that is kept for consumers of ``tokens`` tokens."""
    rows = [table[g][slice(*group.kept(tokens))] for g, group in enumerate(groups) if group.window]
    return any(NULL in row for row in rows)
