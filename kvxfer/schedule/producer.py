"""The producer's scheduler side: what of each prefill may be read, and until when.

All generations come from one counter, so that none is used twice in an epoch: a retry under the id of an aborted request
differs from it although nothing of the aborted one is remembered.
"""

from collections.abc import Callable, Sequence

from kvxfer.identity import Generation, Handle, RequestId, TransferId
from kvxfer.ledger import BlockLedger
from kvxfer.schedule.commands import Revoke, ScheduleError, StepCommands, check_table
from kvxfer.schedule.coverage import Coverage
from kvxfer.schedule.offering import Offering, OfferingEvent, OfferingState
from kvxfer.schedule.offerings import Offerings
from kvxfer.schedule.requests import EngineRequest, EngineRequests
from kvxfer.transitions import Bulkhead
from kvxfer.values import BlockTable, Group, Offer

ABORTED = "the producer's request was aborted or failed"

_S, _E = OfferingState, OfferingEvent


class OfferSchedule(Offerings):
    """The engine's offerings: turns a scheduler's steps into offers and revocations.

    There is one for each engine, called by one thread. The calls for a request are ``arrive``, any number of ``step`` and
    ``preempt`` for the offering that it computes (``Request.computing``), then ``finish``.

    Args:
        groups: The engine's KV-cache groups, in the order of its block tables.
        ledger: The blocks that the engine's loads fill, and to which those that it offers are added; ``None``: nothing is loaded.
        door: Where a bug stops that ends one offering of several; ``None``: it is raised.
        requests: The engine's requests; ``None``: they have no other schedule.

    Attributes:
        door: What no bug of a table leaves.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        ledger: BlockLedger | None = None,
        door: Bulkhead | None = None,
        requests: EngineRequests | None = None,
    ) -> None:
        super().__init__(groups, EngineRequests() if requests is None else requests)
        self.door = door or Bulkhead()
        self._ledger = BlockLedger() if ledger is None else ledger
        self._coverage = Coverage(groups, self._ledger)
        self._changed: list[Offering] = []  # what workers have to hear of
        self._revokes: list[Revoke] = []

    # --- a request's way -----------------------------------------------------------------------------------------------

    def arrive(
        self,
        request: EngineRequest,
        transfer: TransferId,
        digest: bytes,
        tokens: int,
        stops: bool = False,
        answer: str | None = None,
    ) -> bool:
        """Track a request that offers, and return whether it is tracked: see ``SchedulerSide.offer``.

        Calling it again for a tracked request changes nothing. Each ``answer`` adds one engine to those that will
        fetch it. None is added to an offer whose request has finished: this one is then taken for a retry, whose answer replaces the
        earlier one.

        Raises:
            ScheduleError: The request offers another transfer, or another number of tokens.
        """
        known, own = self.current(transfer), request.offering
        if own is not None and own.over and request.name not in own.sharers:
            own.namesake = True
            return False
        if own is not None and own.tracked:
            if own is not known:
                raise ScheduleError(f"request {request.name} offers {own.transfer}, not {transfer} too")
            if (own.digest, own.total) != (digest, tokens):
                raise ScheduleError(
                    f"request {request.name} offers {own.total} tokens of {transfer}, and not {tokens} of other content"
                )
            return True
        if known is None and tokens <= 0:
            return False
        if own is not None:  # its offering is over, and it may begin another
            self._leave(own, request)
        if known is not None:
            return self._share(known, request, digest, tokens, answer or request.name)
        request.offering = self._new(request.name, transfer, digest, tokens, stops, answer or request.name)
        self._transfers.setdefault(transfer, []).append(request.offering)
        return True

    def _share(self, known: Offering, request: EngineRequest, digest: bytes, tokens: int, answer: str) -> bool:
        """Let a request share what another offers, if it is the same content."""
        if not known.offered or (known.digest, known.total) != (digest, tokens):
            return False
        if known.state is _S.HELD:  # a retry: its answer says what the lost one did
            answer = known.answer
        elif answer not in known.answers:
            known.answers.add(answer)
            self._count(known, 1)
        known.sharers[request.name], request.offering = answer, known
        return True

    def computed(self, transfer: TransferId, digest: bytes, tokens: int, table: BlockTable) -> Offering | None:
        """Offer KV that no request computes, because it is in these blocks already, which stay until ``done`` says so.

        Returns:
            The offering: a new one, or the one of the same content under this name. None if the name has other content, or by a bug.

        Raises:
            ScheduleError: The blocks cannot be offered.
        """
        check_table(self._groups, table)
        known = self.current(transfer)
        if known is not None:
            same = known.offered and (known.digest, known.total) == (digest, tokens)
            return known if same else None
        new = self._new(RequestId(""), transfer, digest, tokens, True, "")
        new.progress, new.over = tokens, True
        if (reason := self._coverage.unusable(new, table)) is not None:
            raise ScheduleError(f"{transfer} cannot be offered: {reason}")
        self._transfers.setdefault(transfer, []).append(new)
        with self.door.of(transfer):
            self._offer(new, tokens, self._coverage.full(table, tokens), table)
            self._on(new, _E.FINISH)
            return new
        self._force(new, _S.CLOSED, "the producer could not offer it")
        return None

    def check(self, offering: Offering, tokens: int, table: BlockTable) -> None:
        """Refuse a table that cannot be offered up to this token, because a load fills some of its blocks; ``step`` does not look.

        Raises:
            ScheduleError: There is such a block.
        """
        if not self._ledger.filling:
            return
        reason = self._coverage.filled(offering, table, min(tokens, offering.total))
        if reason is not None:
            raise ScheduleError(f"request {offering.name} cannot run with {reason}: run it once that load is over")

    def step(
        self, offering: Offering, computed: int, scheduled: int, table: BlockTable, end: BlockTable | None = None
    ) -> None:
        """Record that the request that computes an offering runs in this step: see ``SchedulerSide.runs``.

        ``end``: the blocks that windows hold of the end of the prompt, if they stay until ``finish`` whatever else the request computes.
        """
        offering.progress = computed + scheduled
        if self._coverage.states and offering.final and offering.progress > offering.total:
            self._restart(offering, "the producer went on, and its recurrent state with it")
        tokens, blocks = self._coverage.complete(offering, table)
        whole = offering.progress >= offering.total and (tokens == offering.total or not self._coverage.fulls)
        last = self._coverage.last(offering, table, end) if whole else None
        self._offer(offering, tokens if last is None else offering.total, blocks, last)

    def preempt(self, offering: Offering) -> None:
        """Record that the engine takes the blocks of the request that computes an offering, which it will start again from any token."""
        self._restart(offering, "the producer preempted the request")
        offering.progress = 0

    def finish(
        self,
        request: EngineRequest,
        table: BlockTable,
        complete: bool,
        kept: bool = False,
        keep: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Record that the request is over.

        Args:
            request: The request.
            table: The whole block table at its end.
            complete: Whether it ended normally and its KV is good; False after an abort or an error.
            kept: Whether the blocks that it has offered, though not complete, stay as they are until they are released.
            keep: Called if the engine need not keep the blocks, before anything is forgotten. Pins what others may be reading until
                ``done``, and returns whether it has.

        Returns:
            True if the engine must keep the blocks until ``done`` says so. False if it can free them
            now, because everything is revoked or has been read.
        """
        offering = request.own_offering
        if offering is None:
            return False
        if request.name in offering.sharers:
            answer = offering.sharers.pop(request.name)
            if not complete and answer != offering.answer and answer not in offering.sharers.values():
                offering.answers.discard(answer)
                if offering.consumers > 1:  # one that has declined may have been told by this very answer
                    self._count(offering, -1)
            self._leave(offering, request)
            return False
        offering.over = True
        if not offering.computed:
            keep()
            self.forget(offering)
            return False
        reason = self._coverage.unusable(offering, table) if complete else ABORTED
        if reason is not None:
            inexact, pinned = self._coverage.windows or self._coverage.states, keep()
            event = _E.FAIL_READ if pinned else _E.FAIL
            self._on(offering, event, reason, kept=kept and pinned and not inexact)
            request.offering = None
            self._pass_on(offering)
            return False
        self._offer(offering, offering.total, self._coverage.full(table, offering.total), table)
        self._on(offering, _E.FINISH)
        return True

    # --- how it ends ---------------------------------------------------------------------------------------------------

    def withdraw(self, transfer: TransferId, reason: str) -> None:
        """Withdraw a transfer that nobody will read any more: its lease ran out, or the consumer gave it up unread.

        Blocks held for it stay held until the workers, told by the revocation, report it quiet (``done``). If the request still
        runs, it is no longer tracked.
        """
        offering = self.current(transfer)
        if offering is not None:
            with self.door.of(offering.name):
                self._on(offering, _E.WITHDRAW, reason)
                return
            if offering.offered:
                self._force(offering, _S.WITHDRAWN if offering.held else _S.CLOSED, reason)

    def decline(self, transfer: TransferId, reason: str) -> None:
        """Record that one of the engines that were to read this transfer never will; the last of them withdraws it."""
        offering = self.current(transfer)
        if offering is None:
            return
        if offering.consumers == 1:
            self.withdraw(transfer, reason)
        else:
            self._count(offering, -1)

    def decline_answer(self, transfer: TransferId, answer: str, reason: str) -> None:
        """Record that nobody will read any of the transfers of which an answer has told; ``transfer`` is one of them.

        A second time it changes nothing.
        """
        offering = self.current(transfer)
        if offering is not None and answer in offering.answers:
            self.unanswered(answer, reason)

    def unanswered(self, answer: str, reason: str) -> None:
        """Record that an answer goes out to nobody: the consumers that it would have added will not come."""
        for told in [told for told in self if told.tracked and answer in told.answers]:
            told.answers.remove(answer)
            self.decline(told.transfer, reason)

    def done(self, offering: Offering, generation: Generation) -> bool:
        """Record that all ranks are done with an offering up to a generation; return whether its held blocks are now free."""
        if generation < offering.born:
            return False
        held = offering.held
        self._ledger.drop(offering.transfer, generation)
        event = _E.DONE if generation >= offering.generation else _E.DONE_EARLIER
        with self.door.of(offering.name):
            self._on(offering, event, "all is read")
            return held and offering.state is _S.CLOSED
        if event is _E.DONE:
            self._force(offering, _S.CLOSED, "all is read")
        return held and offering.state is _S.CLOSED

    @property
    def revokes(self) -> bool:
        """Whether the next ``commands`` returns revocations."""
        return bool(self._revokes)

    @property
    def untold(self) -> bool:
        """Whether ``commands`` would return something."""
        return bool(self._changed or self._revokes)

    def commands(self) -> StepCommands:
        """Return the offers and revocations since the last call. Call it once a step, after ``preempt`` and ``step``."""
        if not self._changed and not self._revokes:
            return StepCommands()
        offers = tuple(self._offer_of(offering) for offering in self._changed)
        for offering in self._changed:
            offering.changed = False
        drained = StepCommands(offers=offers, revokes=tuple(self._revokes))
        self._changed.clear()
        self._revokes.clear()
        return drained

    def _offer(self, offering: Offering, tokens: int, full: BlockTable, last: BlockTable | None) -> None:
        """Queue an offer of what is new; if it contradicts what was offered (an unseen preemption), begin a new generation.

        Args:
            offering: The offering.
            tokens: How many tokens are complete in all ``full`` groups.
            full: The blocks that hold them.
            last: The table of the whole prompt, once all of it can be offered.
        """
        if not full.continues(self._coverage.full(offering.blocks, offering.tokens)):
            self._restart(offering, "the producer's blocks changed")
        if tokens > offering.tokens or (last is not None and not offering.final):
            if last is not None:
                full = last.only(group.moved(offering.total) for group in self._groups)
            new = [(g, (offering.blocks.count(g), full.count(g))) for g in range(len(self._groups))]
            by = f"the offer of request {offering.name}"
            blocks = self._ledger.blocks(full, new)
            self._ledger.claim(offering.transfer, blocks, by, fills=False, generation=offering.generation)
            offering.tokens, offering.blocks = tokens, full
            if last is not None and not offering.final:
                self._on(offering, _E.ALL_OFFERED)
            self._state(offering)

    @staticmethod
    def _offer_of(p: Offering) -> Offer:
        return Offer(
            p.transfer, p.digest, p.generation, p.tokens, p.blocks, p.final, p.consumers, handle=Handle(p.request)
        )

    def _state(self, offering: Offering) -> None:
        """Have the workers told of what is ready."""
        if not offering.changed:
            offering.changed = True
            self._changed.append(offering)

    def _unstate(self, offering: Offering) -> None:
        """Tell the workers nothing more of what is revoked."""
        if offering.changed:
            offering.changed = False
            self._changed.remove(offering)

    def _count(self, offering: Offering, more: int) -> None:
        """Change how many engines are expected to fetch an offer. Within a generation there can only be fewer."""
        offering.consumers += more
        if more > 0:
            self._restart(offering, "one more engine is to read it")
        elif more and (offering.tokens or offering.final) and offering.offered:
            self._state(offering)

    def _restart(self, offering: Offering, reason: str) -> None:
        if offering.blocks != self._nothing:
            self._on(offering, _E.RESTART)
            self._unstate(offering)
            self._ledger.drop(offering.transfer, offering.generation)
            self._revokes.append(Revoke(offering.transfer, offering.generation, reason, False))
            offering.generation = self._next_generation()
            offering.blocks, offering.tokens = self._nothing, 0

    def _on(self, offering: Offering, event: OfferingEvent, reason: str = "", kept: bool = False) -> None:
        """Make the move that an event leads to; if it ends the offer, have it revoked. This is the one door to an offering."""
        was_offered = offering.offered
        if offering.on(event):
            self._ended(offering, was_offered, reason, kept)

    def _force(self, offering: Offering, state: OfferingState, reason: str) -> None:
        """End an offering past its table, which has refused what is true."""
        was_offered, offering.state = offering.offered, state
        self._ended(offering, was_offered, reason)

    def _ended(self, offering: Offering, was_offered: bool, reason: str, kept: bool = False) -> None:
        """Have an offering revoked that has come to its end."""
        if was_offered and not offering.offered:
            self._unstate(offering)
            if not kept:
                self._ledger.drop(offering.transfer, offering.generation)
            self._revokes.append(Revoke(offering.transfer, offering.generation, reason, True, kept))
        if offering.state is _S.CLOSED:
            self.forget(offering)

    def _pass_on(self, failed: Offering) -> None:
        """Let those that shared the offer of a failed request offer their own blocks, as of their next step."""
        sharers, failed.sharers = failed.sharers, {}
        self.forget(failed)
        for name, answer in sharers.items():
            with self.requests.of(name) as sharer:
                sharer.offering = None
                self.arrive(sharer, failed.transfer, failed.digest, failed.total, answer=answer)
