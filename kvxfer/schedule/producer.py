"""The producer's scheduler side: what of each prefill may be read, and until when.

All generations come from one counter, so that none is used twice in an epoch: a retry under the id of an aborted request
differs from it although nothing of the aborted one is remembered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvxfer.identity import Generation, TransferId
from kvxfer.ledger import BlockLedger
from kvxfer.schedule.commands import Revoke, ScheduleError, StepCommands, check_table
from kvxfer.values import NULL, BlockTable, Group, Offer


@dataclass(slots=True)
class _Prefill:
    """One offering. What is listed in ``blocks`` has been offered in ``generation``."""

    request: str  # whose blocks are offered
    answer: str  # the name of the answer to that request
    transfer: TransferId
    digest: bytes
    total: int  # tokens that will be offered in the end
    consumers: int  # how many engines have not declined it
    stops: bool  # nothing is computed after ``total``
    born: Generation
    generation: Generation
    blocks: BlockTable
    tokens: int = 0
    final: bool = False
    progress: int = 0  # tokens computed after the last step; may exceed ``total``
    finished: bool = False
    gone: bool = False
    answers: dict[str, int] = field(default_factory=dict)  # how many consumers each answer adds that tells of it
    sharers: dict[str, str] = field(default_factory=dict)  # other running requests that offer it, and their answers


class OfferSchedule:
    """Turns a scheduler's steps into offers and revocations.

    There is one for each engine, called by one thread. The calls for a request are ``arrive``, any number of ``step`` and
    ``preempt``, then ``finish``; calls about a request that is not tracked do nothing, so a connector may make them for all.

    Args:
        groups: The engine's KV-cache groups, in the order of its block tables.
        ledger: The blocks that the engine's loads fill, and to which those that it offers are added; ``None``: nothing is loaded.
    """

    def __init__(self, groups: Sequence[Group], ledger: BlockLedger | None = None) -> None:
        self._groups, self._ledger = tuple(groups), BlockLedger() if ledger is None else ledger
        self._fulls = any(group.kind == "full" for group in self._groups)
        self._windows = any(group.kind == "window" for group in self._groups)
        self._states = any(group.kind == "state" for group in self._groups)
        self._nothing = BlockTable((b"",) * len(self._groups))
        self._generation: Generation = 0
        self._running: dict[str, _Prefill] = {}  # by the request whose blocks are offered
        self._sharing: dict[str, _Prefill] = {}  # by other requests that offer the same
        self._transfers: dict[TransferId, _Prefill] = {}
        self._offers: dict[TransferId, Offer] = {}
        self._revokes: list[Revoke] = []

    def arrive(
        self,
        request: str,
        transfer: TransferId,
        digest: bytes,
        tokens: int,
        consumers: int = 1,
        stops: bool = False,
        answer: str | None = None,
    ) -> bool:
        """Track a request, the first ``tokens`` tokens of whose prompt will be fetched by ``consumers`` engines.

        Requests that offer the same transfer share it: the blocks of one are offered. If that one fails, those of another are.
        Calling it again for a tracked request changes nothing.

        Args:
            request: The engine's id of the request.
            transfer: The name under which consumers fetch it.
            digest: What its KV depends on.
            tokens: How many tokens.
            consumers: How many engines its answer adds to those that will fetch it. None are added to an offer whose request
                has finished: the request is then taken for a retry, whose answer replaces the earlier one.
            stops: Nothing is computed for the request after these tokens, so that a recurrent state stays as they leave it.
            answer: The name of the answer that tells consumers of it, by default the request's.

        Returns:
            Whether it is tracked. It is not if there is nothing to offer, or if the transfer is offered with other content.

        Raises:
            ScheduleError: The request offers another transfer, or another number of tokens.
        """
        known = self._transfers.get(transfer)
        own = self._running.get(request) or self._sharing.get(request)
        if own is not None and own is not known:
            raise ScheduleError(f"request {request} offers {own.transfer}, not {transfer} too")
        if own is not None and (own.digest, own.total) != (digest, tokens):
            raise ScheduleError(
                f"request {request} offers {own.total} tokens of {transfer}, and not {tokens} of other content"
            )
        if own is not None:
            return True
        if known is not None:
            return self._share(known, request, digest, tokens, consumers, answer or request)
        if tokens <= 0:
            return False
        generation = self._next_generation()
        prefill = _Prefill(
            request,
            answer or request,
            transfer,
            digest,
            tokens,
            consumers,
            stops,
            generation,
            generation,
            self._nothing,
        )
        prefill.answers[prefill.answer] = consumers
        self._running[request] = self._transfers[transfer] = prefill
        return True

    def _share(self, known: _Prefill, request: str, digest: bytes, tokens: int, consumers: int, answer: str) -> bool:
        """Let a request share what another offers, if it is the same content."""
        if known.gone or (known.digest, known.total) != (digest, tokens):
            return False
        if known.finished:  # a retry: its answer says what the lost one did
            answer = known.answer
        elif answer not in known.answers:
            known.answers[answer] = consumers
            self._count(known, consumers)
        known.sharers[request], self._sharing[request] = answer, known
        return True

    def __contains__(self, request: str) -> bool:
        """Return whether this request is tracked; the block tables of others need not be looked up."""
        return request in self._running or request in self._sharing

    def offered(self, request: str) -> BlockTable:
        """Return the blocks of a running request that other engines may be reading."""
        prefill = self._running.get(request)
        return self._nothing if prefill is None else prefill.blocks

    def offering(self, request: str) -> tuple[TransferId, Generation] | None:
        """Return what a running request offers, and in which generation; None if it is not tracked."""
        prefill = self._running.get(request)
        return None if prefill is None else (prefill.transfer, prefill.generation)

    def whole(self, request: str) -> bool:
        """Return whether all that a running request is to offer has been offered."""
        prefill = self._running.get(request)
        return prefill is not None and prefill.final

    def total(self, request: str) -> int:
        """Return how many tokens a running request will offer; 0 if it is not tracked."""
        prefill = self._running.get(request) or self._sharing.get(request)
        return 0 if prefill is None else prefill.total

    def check(self, request: str, tokens: int, table: BlockTable) -> None:
        """Refuse a table that cannot be offered up to this token, since a load fills some of its blocks; ``step`` does not look.

        Raises:
            ScheduleError: There is such a block.
        """
        prefill = self._running.get(request)
        if prefill is None or not self._ledger.filling:
            return
        reason = self._filled(prefill, table, min(tokens, prefill.total))
        if reason is not None:
            raise ScheduleError(f"request {request} cannot run with {reason}: run it once that load is over")

    def step(
        self, request: str, computed: int, scheduled: int, table: BlockTable, end: BlockTable | None = None
    ) -> None:
        """Record that the request runs in this step.

        Args:
            request: The engine's id of the request.
            computed: Tokens computed before this step, prefix-cache hits and loads included.
            scheduled: Tokens that this step computes.
            table: The whole block table as this step uses it; never an increment. A row may be longer than the
                tokens need.
            end: The blocks that windows hold of the end of the prompt, if they stay until ``finish`` whatever else the request
                computes.
        """
        prefill = self._running.get(request)
        if prefill is None:
            return
        prefill.progress = computed + scheduled
        if self._states and prefill.final and prefill.progress > prefill.total:
            self._restart(prefill, "the producer went on, and its recurrent state with it")
        tokens, blocks = self._complete(prefill, table)
        whole = prefill.progress >= prefill.total and (tokens == prefill.total or not self._fulls)
        last = self._last(prefill, table, end) if whole else None
        self._offer(prefill, tokens if last is None else prefill.total, blocks, last)

    def preempt(self, request: str) -> None:
        """Record that the engine takes the request's blocks away and will start it again, from the beginning or from cached blocks."""
        prefill = self._running.get(request)
        if prefill is not None:
            self._restart(prefill, "the producer preempted the request")
            prefill.progress = 0

    def finish(self, request: str, table: BlockTable, complete: bool, kept: bool = False) -> bool:
        """Record that the request is over.

        Args:
            request: The engine's id of the request.
            table: The whole block table at its end.
            complete: Whether it ended normally and its KV is good; False after an abort or an error.
            kept: Whether the blocks that it has offered, though not complete, stay as they are until they are released.

        Returns:
            True if the engine must keep the blocks until ``released`` returns the request. False if it can free them
            now, because everything is revoked or has been read.
        """
        shared = self._sharing.pop(request, None)
        if shared is not None:
            answer = shared.sharers.pop(request)
            if not complete and answer != shared.answer and answer not in shared.sharers.values():
                self._count(shared, -shared.answers.pop(answer, 0))
        prefill = self._running.pop(request, None)
        if prefill is None:
            return False
        reason = self._unusable(prefill, table) if complete else "the producer's request was aborted or failed"
        if reason is not None:
            self._revoke(prefill, reason, gone=True, kept=kept and not (self._windows or self._states))
            self._forget(prefill)
            self._pass_on(prefill)
            return False
        prefill.finished = True
        self._offer(prefill, prefill.total, self._full(table, prefill.total), table)
        return True

    def offers(self, transfer: TransferId, digest: bytes) -> bool:
        """Return whether this transfer, with this digest, is offered or will be. Any thread."""
        prefill = self._transfers.get(transfer)
        return prefill is not None and prefill.digest == digest and not prefill.gone

    def answer(self, request: str) -> str:
        """Return the name of the answer that tells consumers of what a running request offers; its own if it offers nothing."""
        prefill = self._running.get(request)
        shared = self._sharing.get(request)
        return prefill.answer if prefill else shared.sharers[request] if shared else request

    def digest(self, transfer: TransferId) -> bytes:
        """Return what an offer's KV depends on; empty if there is none of this name."""
        prefill = self._transfers.get(transfer)
        return b"" if prefill is None else prefill.digest

    def begun(self, transfer: TransferId, digest: bytes) -> bool:
        """Return whether some of this transfer, with this digest, is computed or being computed. Any thread."""
        prefill = self._transfers.get(transfer)
        return prefill is not None and prefill.digest == digest and (prefill.progress > 0 or prefill.finished)

    def withdraw(self, transfer: TransferId, reason: str) -> None:
        """Withdraw a transfer that nobody will read any more: its lease ran out, or the consumer gave it up unread.

        Blocks held for it stay held until the workers, told by the revocation, report it quiet and ``released``
        is called. If the request still runs, it is no longer tracked.
        """
        prefill = self._transfers.get(transfer)
        if prefill is None:
            return
        self._revoke(prefill, reason, gone=True)
        if not prefill.finished:
            self._forget(prefill)

    def decline(self, transfer: TransferId, reason: str) -> None:
        """Record that one of the engines that were to read this transfer never will; the last of them withdraws it."""
        prefill = self._transfers.get(transfer)
        if prefill is None:
            return
        if prefill.consumers == 1:
            self.withdraw(transfer, reason)
        else:
            self._count(prefill, -1)

    def decline_answer(self, transfer: TransferId, answer: str, reason: str) -> None:
        """Record that nobody will read any of the transfers of which an answer has told; ``transfer`` is one of them.

        A second time it changes nothing.
        """
        prefill = self._transfers.get(transfer)
        if prefill is not None and answer in prefill.answers:
            self.unanswered(answer, reason)

    def unanswered(self, answer: str, reason: str) -> None:
        """Record that an answer goes out to nobody: the consumers that it would have added will not come."""
        for told in [told for told in self._transfers.values() if told.answers.pop(answer, 0)]:
            self.decline(told.transfer, reason)

    def released(self, transfer: TransferId, generation: Generation) -> str | None:
        """Record that all ranks are done with a transfer: everybody has read it, or it is revoked for good and quiet.

        ``generation`` is the one that was read or revoked; reports about an earlier request of the same
        transfer are recognised by it and ignored. An offer that crossed the report is revoked.

        Returns:
            The request whose held blocks are now to be freed, at most once. None if it still runs (the
            blocks are its own, and ``finish`` will return False) or is unknown.
        """
        self._ledger.drop(transfer, generation)
        prefill = self._transfers.get(transfer)
        if prefill is None or generation < prefill.born:
            return None
        self._revoke(prefill, "all is read", gone=True)
        if prefill.finished and generation < prefill.generation:
            return None  # a rank that was done with an earlier one has been offered the last, too, and will say when it is quiet
        self._forget(prefill)
        return prefill.request if prefill.finished else None

    @property
    def held(self) -> frozenset[TransferId]:
        """The transfers whose request has finished and whose blocks are held until ``released``."""
        return frozenset(transfer for transfer, prefill in self._transfers.items() if prefill.finished)

    @property
    def transfers(self) -> tuple[TransferId, ...]:
        """The transfers of requests that are tracked or held."""
        return tuple(self._transfers)

    def __len__(self) -> int:
        """Return how many transfers are remembered, including held ones."""
        return len(self._transfers)

    @property
    def revokes(self) -> bool:
        """Whether the next ``commands`` returns revocations."""
        return bool(self._revokes)

    @property
    def untold(self) -> bool:
        """Whether ``commands`` would return something."""
        return bool(self._offers or self._revokes)

    def commands(self) -> StepCommands:
        """Return the offers and revocations since the last call. Call it once a step, after ``preempt`` and ``step``."""
        if not self._offers and not self._revokes:
            return StepCommands()
        drained = StepCommands(offers=tuple(self._offers.values()), revokes=tuple(self._revokes))
        self._offers.clear()
        self._revokes.clear()
        return drained

    def _next_generation(self) -> Generation:
        self._generation += 1
        return self._generation

    def _complete(self, prefill: _Prefill, table: BlockTable) -> tuple[int, BlockTable]:
        """Return the tokens complete in all ``full`` groups once the step is over, and the blocks that hold them.

        These are whole blocks, which move best, or parts of one if a step completes none, as with one block for each request.
        """
        check_table(self._groups, table)
        ready = min(prefill.progress, prefill.total)
        full = [(group, table.count(g)) for g, group in enumerate(self._groups) if group.kind == "full"]
        tokens = min((_whole(group, present, ready, ready == prefill.total) for group, present in full), default=0)
        if tokens <= prefill.tokens:
            tokens = min((min(ready, present * group.block_tokens) for group, present in full), default=0)
        return tokens, self._full(table, tokens)

    def _last(self, prefill: _Prefill, table: BlockTable, end: BlockTable | None) -> BlockTable | None:
        """Return the table of a prompt that this step completes, if all of it will stay as it is; else None, until ``finish``."""
        if self._windows and end is None:
            return None
        if self._states and not (
            prefill.stops and prefill.progress == prefill.total and self._has_state(prefill, table)
        ):
            return None
        return table if end is None else self._join(table, end)

    def _unusable(self, prefill: _Prefill, table: BlockTable) -> str | None:
        """Return why a finished request cannot be offered whole; None if it can."""
        if prefill.progress < prefill.total:
            return f"the producer finished with {prefill.progress} of {prefill.total} tokens computed"
        check_table(self._groups, table)
        total = prefill.total
        if any(table.count(g) < group.moved(total)[1] for g, group in enumerate(self._groups)):
            return f"the producer finished with too few blocks for {total} tokens"
        if not self._has_state(prefill, table):
            return f"the producer finished without its recurrent state of {total} tokens"
        filled = self._filled(prefill, table, total)
        if filled is not None:
            return f"the producer finished with {filled}"
        if prefill.progress > prefill.total and self._states:
            return (
                f"the producer's recurrent state holds {prefill.progress} tokens instead of {prefill.total}: "
                "limit the prefill request to one output token"
            )
        return None

    def _filled(self, prefill: _Prefill, table: BlockTable, tokens: int) -> str | None:
        """Return which block of a table, up to this token, a load fills. What is offered already none may fill."""
        offered = prefill.blocks if table.continues(prefill.blocks) else self._nothing
        spans = [group.moved(tokens) for group in self._groups]
        new = [(g, (max(first, offered.count(g)), past)) for g, (first, past) in enumerate(spans)]
        found = self._ledger.overlap(self._ledger.blocks(table, new), fills=False)
        return None if found is None else f"block {found[0]}, which {found[1]} still fills"

    def _has_state(self, prefill: _Prefill, table: BlockTable) -> bool:
        """Return whether each recurrent state after the prompt has its block."""
        last = table.only(group.moved(prefill.total) for group in self._groups)
        rows = [last[g] for g, group in enumerate(self._groups) if group.kind == "state"]
        return all(len(row) and row[-1] != NULL for row in rows)

    def _full(self, table: BlockTable, tokens: int) -> BlockTable:
        """Return the blocks of ``tokens`` tokens, of ``full`` groups only."""
        return table.only(group.moved(tokens) if group.kind == "full" else (0, 0) for group in self._groups)

    def _join(self, table: BlockTable, late: BlockTable) -> BlockTable:
        """Return a table with its window groups taken from another."""
        rows = zip(self._groups, table.rows, late.rows, strict=True)
        return BlockTable(tuple(b if group.kind == "window" else a for group, a, b in rows))

    def _offer(self, prefill: _Prefill, tokens: int, full: BlockTable, last: BlockTable | None) -> None:
        """Queue an offer of what is new; if it contradicts what was offered (an unseen preemption), begin a new generation.

        Args:
            prefill: The request's record.
            tokens: How many tokens are complete in all ``full`` groups.
            full: The blocks that hold them.
            last: The table of the whole prompt, once all of it can be offered.
        """
        if not full.continues(self._full(prefill.blocks, prefill.tokens)):
            self._restart(prefill, "the producer's blocks changed")
        if tokens > prefill.tokens or (last is not None and not prefill.final):
            if last is not None:
                full = last.only(group.moved(prefill.total) for group in self._groups)
            new = [(g, (prefill.blocks.count(g), full.count(g))) for g in range(len(self._groups))]
            by = f"the offer of request {prefill.request}"
            blocks = self._ledger.blocks(full, new)
            self._ledger.claim(prefill.transfer, blocks, by, fills=False, generation=prefill.generation)
            prefill.tokens, prefill.blocks, prefill.final = tokens, full, last is not None
            self._state(prefill)

    def _state(self, prefill: _Prefill) -> None:
        """Queue the offer of what is ready."""
        p = prefill
        self._offers[p.transfer] = Offer(
            p.transfer, p.digest, p.generation, p.tokens, p.blocks, p.final, p.consumers, handle=p.request
        )

    def _count(self, prefill: _Prefill, more: int) -> None:
        """Change how many engines are expected to fetch an offer. Within a generation there can only be fewer."""
        prefill.consumers += more
        if more > 0:
            self._restart(prefill, "one more engine is to read it")
        elif more and (prefill.tokens or prefill.final) and not prefill.gone:
            self._state(prefill)

    def _restart(self, prefill: _Prefill, reason: str) -> None:
        if prefill.blocks != self._nothing:
            self._revoke(prefill, reason, gone=False)
            prefill.generation = self._next_generation()
            prefill.blocks, prefill.tokens, prefill.final = self._nothing, 0, False

    def _revoke(self, prefill: _Prefill, reason: str, gone: bool, kept: bool = False) -> None:
        if prefill.gone:
            return
        prefill.gone = gone
        self._offers.pop(prefill.transfer, None)
        if not kept:
            self._ledger.drop(prefill.transfer, prefill.generation)
        self._revokes.append(Revoke(prefill.transfer, prefill.generation, reason, gone, kept))

    def _forget(self, prefill: _Prefill) -> None:
        del self._transfers[prefill.transfer]
        self._running.pop(prefill.request, None)
        for sharer in prefill.sharers:
            del self._sharing[sharer]

    def _pass_on(self, failed: _Prefill) -> None:
        """Let those that shared the offer of a failed request offer their own blocks, as of their next step."""
        for sharer, answer in failed.sharers.items():
            consumers = failed.answers.get(answer, 1)
            self.arrive(sharer, failed.transfer, failed.digest, failed.total, consumers, answer=answer)


def _whole(group: Group, present: int, ready: int, last: bool) -> int:
    """Return how many of ``ready`` tokens are in full blocks of the ``present`` ones; if ``last``, in any of them."""
    if last and present >= group.blocks(ready):
        return ready
    return min(ready // group.block_tokens, present) * group.block_tokens
