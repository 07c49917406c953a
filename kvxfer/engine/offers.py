"""Requests that offer their KV to other engines, and their blocks, from the arrival to the end of the offer.

Others may be reading blocks when the engine lets go of them. They are kept until all ranks are done with them:

- A request that ended well: the engine itself keeps its blocks until it is told to free them.
- The end of a prompt in a window: the engine gives it up while the request goes on, so it is pinned here.
- Blocks that were computed already, for no request: they are pinned here.
- A request that is aborted: the engine frees its blocks at once, so those that were offered are pinned here.
- A request that is preempted: the engine needs its blocks, so they are not pinned; the offer is revoked instead. In an elastic
  cache they are pinned all the same, because a block that is freed there may lose its memory under a reader.
- Any of these, in an engine that writes to new blocks before its workers hear of revocations: what is offered whole is pinned
  until the step that revokes it has been given its blocks. No reader is delivered what is offered in part.
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
        self.let_go: Callable[[Offering], None] = lambda found: None
        self._leaving: list[Pin] = []  # what the next step revokes

    # --- a request's way -----------------------------------------------------------------------------------------------

    def arrived(self, found: Offering) -> None:
        """Take in what consumers have said of an offer before it was made."""
        found.came_at = found.came_at or clock.now()
        self._notices.offered(found.transfer, found.digest)

    def ticket(self, request: EngineRequest, source: Source) -> Ticket | None:
        """Return what a consumer of this request's offer must be told; see ``SchedulerSide.ticket``."""
        found = request.offering
        if found is None or not found.offered or (found.namesake and request.name not in found.sharers):
            return None
        return Ticket(found.transfer, found.digest, source, found.total)

    def answer(self, request: str) -> str:
        """Return the name of the answer that tells consumers of this request's offer: a lost request's for a retry.

        Consumers that have been told the same transfer by answers of different names are counted separately (``load``, ``answer``).
        """
        known = self.schedule.requests.find(RequestId(arguments.instance("request", request, str)))
        found = None if known is None else known.own_offering
        return (
            request
            if known is None or found is None or not found.tracked
            else found.sharers.get(known.name, found.answer)
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
        found = request.own_offering
        return found is not None and (
            found.tracked or found.request == request.name and (found.end is not None or found.running is not None)
        )

    def runs(self, request: EngineRequest, computed: int, scheduled: int, table: BlockTable) -> None:
        """Record that the request runs in this step; see ``SchedulerSide.runs``."""
        found = request.own_offering
        if found is None or not found.tracked:
            return
        self._tables.check("table", table)
        for g, group in enumerate(self._groups):
            if group.kind == "full":
                self._tables.lists("table", table, g, 0, min(computed + scheduled, found.total))
        begun = found.progress > 0 or found.held
        if request.computing is found:
            self.schedule.check(found, computed + scheduled, table)
            if self._windows and computed + scheduled >= found.total and found.end is None:
                end = table.only(_end(group, found.total) for group in self._groups)
                if self._pins.keep(found, end.ids()):
                    found.end = end
            self.schedule.step(found, computed, scheduled, table, found.end)
            if self.elastic or self._writes_early:
                self._pin(found)
        if found.final and not found.whole_at:
            found.whole_at = clock.now()
        if not begun and found.progress > 0:
            found.begun_at = clock.now()
            self._notices.directory.begins(found.transfer, found.digest)

    def _pin(self, found: Offering) -> None:
        """Pin the blocks that are new in a running request's offer."""
        if found.running is not None and found.running.generation != found.generation:
            self._taken(found)  # preempted without a call of ``preempted``
        if not (self.elastic or found.final):
            return
        running = found.running or Pin(found.generation)
        new = set(found.blocks.ids()) - running.blocks
        if new and self._pins.keep(running, new):
            running.blocks |= new
            found.running = running

    def preempted(self, request: EngineRequest) -> None:
        """Record that the engine has taken the request's blocks away. Those that were offered are revoked."""
        if request.computing is not None:
            self.schedule.preempt(request.computing)
        found = request.own_offering
        if found is not None and found.request == request.name:
            self._taken(found)
            found.end = None
            self._pins.drop(found)

    def _taken(self, found: Offering) -> None:
        """Unpin what others may be reading of a running request's offer; what is elastic only once all ranks have said that nobody does."""
        running, found.running = found.running, None
        if running is not None:
            if self.elastic:
                self._hold(found, running.generation, running.blocks)
            self._pins.drop(running)

    def _hold(self, found: Offering, generation: Generation, blocks: Collection[int]) -> bool:
        """Pin blocks that the engine gives up, until all ranks are done with this generation; log it if that is not possible."""
        pin = Pin(generation, set(blocks))
        if held := self._pins.hold(pin, pin.blocks):
            found.pins.append(pin)
        else:
            log.warning(
                "request %s: %d blocks are given back while a transfer may still touch them",
                printable(found.name),
                len(blocks),
            )
        return held

    def finished(self, request: EngineRequest, table: BlockTable, complete: bool, *, found: bool, good: bool) -> bool:
        """Record that the request is over, with this block table at its end; return whether the engine must keep its blocks.

        ``complete``: it ended normally and its KV is good. ``good``: what it has offered is good although it is not complete.
        ``found``: other engines can find these ranks, so that one may be reading.
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
                request, whole, complete, good and not complete, lambda: self._keep(offering, found)
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

    def _keep(self, offering: Offering, found: bool) -> bool:
        """Keep blocks that others may be reading of a request that has failed; return whether they are kept until all are done."""
        if self.elastic and offering.running is not None:
            self._hold(offering, offering.running.generation, offering.running.blocks)
            return False
        blocks = offering.blocks.ids() if offering.computed and found else ()
        return bool(blocks) and self._hold(offering, offering.generation, blocks)

    # --- what ranks report ---------------------------------------------------------------------------------------------

    def shipped(self) -> None:
        """Record that what is revoked so far goes to the workers with a step, which has its blocks."""
        while self._leaving:
            self._pins.drop(self._leaving.pop())

    def unread(self, transfer: TransferId, ranks: Mapping[Rank, Generation]) -> None:
        """Record that nobody reads from some ranks any more what was offered of a transfer, up to a generation."""
        for found in list(self.schedule.under(transfer)):
            found.quiet |= {r: max(g, found.quiet.get(r, g)) for r, g in ranks.items() if g >= found.born}
            for pin in found.pins[:] if len(found.quiet) >= self._ranks else ():
                if pin.generation <= min(found.quiet.values()):
                    self._pins.drop(pin)
                    found.pins.remove(pin)
                    self.schedule.forget(found)

    def ended(self, transfer: TransferId, ranks: Mapping[Rank, OfferEnd]) -> None:
        """Record how an offer has ended on some ranks. What one rank says is told of all, and a failure rather than a delivery."""
        found = next((one for one in self.schedule.under(transfer) if one.ended is None), None)
        if found is not None:
            failed = (end for end in ranks.values() if end.failure is not None)
            self._stories.offer_ended(found, next(failed, next(iter(ranks.values()))))

    def released(self, transfer: TransferId, ranks: Mapping[Rank, Generation]) -> RequestId | None:
        """Record that some ranks are done with an offer, up to a generation; return a held request that may be freed."""
        self.unread(transfer, ranks)
        freed = None
        for found in list(self.schedule.under(transfer)):
            found.done |= {r: max(g, found.done.get(r, g)) for r, g in ranks.items() if g >= found.born}
            if len(found.done) >= self._ranks and self._done(found, min(found.done.values())):
                freed = found.request or freed
        return freed

    def _done(self, found: Offering, generation: Generation) -> bool:
        """Record that all ranks are done with an offering up to a generation; return whether its held blocks are now free."""
        if found.running is not None and found.running.generation <= generation:
            self._pins.drop(found.running)
            found.running = None
        freed = self.schedule.done(found, generation)
        if found.state is _S.CLOSED and found.over:
            self._pins.drop(found)
            if not found.request:
                self.let_go(found)
        return freed

    def freed(self, found: Offering) -> None:
        """Record that the engine frees a held request, on its own authority: nobody may be reading its blocks any more."""
        if found.held:
            self._done(found, LAST)

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
