"""The consumer's scheduler side: which requests load from other engines, and into which blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvxfer.identity import Source, TransferId
from kvxfer.ledger import BlockLedger, Blocks
from kvxfer.schedule.commands import Cancel, DeclinedTransfer, ScheduleError, StepCommands, check_table
from kvxfer.values import NULL, BlockTable, Fetch, Group

_LOAD = "load"
"""The holder of a load's blocks in the ledger is this and the request."""


class _State(Enum):
    OPEN = auto()  # no fetch has been queued
    LOADING = auto()  # the fetch of its ``loader`` has
    CLOSED = auto()  # loaded, failed or given up: never fetched again


@dataclass(slots=True)
class _Load:
    """One transfer, for all requests of this engine that share it."""

    transfer: TransferId
    digest: bytes
    source: Source
    tokens: int
    progress: int
    offered: bool
    enough: int
    requests: set[str] = field(default_factory=set)
    answers: set[str | None] = field(default_factory=set)  # those that have told of it
    state: _State = _State.OPEN
    loader: str | None = None  # the request whose load the workers have not reported yet, cancelled or not


class FetchSchedule:
    """Decides what to load, and queues the fetches. A transfer is fetched at most once, by one request.

    There is one for each engine, called by one thread. The calls for a request are ``arrive``, ``matched`` as often as the
    engine likes, ``allocated``, ``loaded``, ``finish``; calls about a request that did not arrive do nothing.

    Args:
        groups: The engine's KV-cache groups, in the order of its block tables.
        own: The engine's own directory, if it has several ranks (``Fetch.own``).
        ledger: The blocks that the engine offers, and to which those that its loads fill are added; ``None``: nothing is offered.
    """

    def __init__(self, groups: Sequence[Group], own: Source | None = None, ledger: BlockLedger | None = None) -> None:
        self._groups, self._ledger = tuple(groups), BlockLedger() if ledger is None else ledger
        self._own = own
        self._loads: dict[TransferId, _Load] = {}
        self._requests: dict[str, _Load] = {}
        self._loading: dict[str, _Load] = {}  # by loader, which may have finished meanwhile
        self._fetches: list[Fetch] = []
        self._cancels: dict[str, Cancel] = {}  # by request
        self._declines: list[DeclinedTransfer] = []

    def arrive(
        self,
        request: str,
        transfer: TransferId,
        digest: bytes,
        source: Source,
        tokens: int,
        progress: int = 0,
        offered: bool = False,
        enough: int = 0,
        answer: str | None = None,
    ) -> bool:
        """Record a request, the first ``tokens`` tokens of whose prompt can be loaded from ``source``.

        Requests with the same transfer (samples of one prompt) share it: one loads, the others wait and then find
        the blocks in the engine's prefix cache. Calling it again for a known request changes nothing. If ``tokens`` is 0, an
        ``offered`` transfer is given up at once. If another ``answer`` has told of the transfer, its producer counts another
        consumer, and is told that there is none. See ``Fetch`` for the other arguments.

        Returns:
            False if the transfer is in use for other content or from another source, or if a load of it, or of an earlier
            request of this name, was given up and is not quiet yet. The request must then be computed here, and further
            calls about it do nothing.

        Raises:
            ScheduleError: The request loads another transfer.
        """
        load = self._loads.get(transfer)
        if request in self._requests:
            if self._requests[request] is not load:
                raise ScheduleError(f"request {request} loads {self._requests[request].transfer}, not {transfer} too")
            return True
        same = load is None or (load.requests and (load.digest, load.source, load.tokens) == (digest, source, tokens))
        if not same or request in self._loading:
            return False
        if load is None:
            load = self._loads[transfer] = _Load(
                transfer, digest, source, tokens, progress, offered, 0 if offered else enough
            )
            if offered and not tokens:
                self._decline(load, "the consumer does not need it")
        elif answer not in load.answers:
            self.decline(transfer, digest, source, "another request of this engine loads it")
        load.answers.add(answer)
        load.requests.add(request)
        self._requests[request] = load
        return True

    def decline(self, transfer: TransferId, digest: bytes, source: Source, reason: str, answer: str = "") -> None:
        """Have a producer told that one of the consumers which it counts will not fetch a transfer.

        ``answer``: the name of an answer that has told of it, if nothing else of which that has told will be fetched either.
        """
        self._declines.append(DeclinedTransfer(transfer, digest, source, reason, answer))

    def matched(self, request: str, computed: int) -> int | None:
        """Return how many tokens after the ``computed`` local ones can be loaded. Changes nothing.

        0: none, now or later (unknown, already loaded, failed, or the local cache has all). None: the transfer is
        being loaded; ask again in the next step. A load ends within its deadline, so this is not None for ever.
        """
        load = self._requests.get(request)
        if load is None or load.state is _State.CLOSED:
            return 0
        if load.state is _State.LOADING:
            return None
        return max(0, load.tokens - computed)

    def allocated(self, request: str, table: BlockTable, computed: int, external: int) -> None:
        """Record that the engine admitted the request, and counts on ``external`` tokens from outside.

        If ``external`` is 0 (the engine has all, or gets them elsewhere), a transfer that has not begun is given up. A second
        call after a load, with 0, changes nothing.

        Args:
            request: The engine's id of the request.
            table: The whole block table; -1 where there is no block.
            computed: The local tokens before the external ones, as in the last call of ``matched``.
            external: How many of the tokens that ``matched`` returned; fewer only if no group is a ``state``.

        Raises:
            ScheduleError: ``external`` is more than ``matched`` would return now, or there are no blocks for it, or some of those
                are offered or being filled. The request must not run.
        """
        load = self._requests.get(request)
        if external > 0:
            promised = self.matched(request, computed)
            partly = any(group.kind == "state" for group in self._groups)
            if load is None or promised is None or external > promised or (partly and external < promised):
                raise ScheduleError(f"request {request} counts on {external} tokens where {promised} can be had")
            end = computed + external
            blocks = self.fills(table, computed, end)
            unused = self.unused(request, blocks)
            self._ledger.claim((_LOAD, request), unused, f"the load of request {request}", fills=True)
            load.state, load.loader = _State.LOADING, request
            self._loading[request] = load
            names = request, load.transfer, load.digest, load.source
            enough = min(max(load.enough, computed + 1), end) if load.enough else 0
            self._fetches.append(Fetch(*names, blocks, computed, end, self._own, load.progress, load.offered, enough))
        elif load is not None and load.state is _State.OPEN:
            self._decline(load, "the consumer does not need it")

    def fills(self, table: BlockTable, start: int, end: int) -> BlockTable:
        """Return the blocks that a load of the tokens ``[start, end)`` fills; earlier ones may be shared with other requests.

        Raises:
            ScheduleError: The table lacks one.
        """
        check_table(self._groups, table)
        spans = [self._span(group, start, end) for group in self._groups]
        filled = table.only(spans)
        for g, (group, (first, past)) in enumerate(zip(self._groups, spans, strict=True)):
            lacks = group.kind in ("full", "state") and NULL in filled[g][first:]
            if filled.count(g) < past or lacks:
                raise ScheduleError(f"no blocks for tokens {start} to {end} in a table of {table.count(g)} blocks")
        return filled

    def unused(self, request: str, table: BlockTable) -> Blocks:
        """Return the blocks of a table that a request is to fill, if nobody else reads or fills one of them.

        Raises:
            ScheduleError: Somebody does.
        """
        blocks = self._ledger.all(table)
        found = self._ledger.overlap(blocks, fills=True)
        if found is not None:
            raise ScheduleError(
                f"request {request} cannot load into block {found[0]}, which {found[1]} still uses: give each block to one of them"
            )
        return blocks

    def quiet(self, request: str) -> None:
        """Record that nothing of the request's load writes any more, so that its blocks may be offered and loaded into.

        It may come before ``loaded``, which says the same.
        """
        self._ledger.drop((_LOAD, request))

    def loaded(self, request: str) -> None:
        """Record that all workers have reported the request's load: it is over, and its memory quiet.

        Call it once for each fetch, however it ended, even after a cancel and for a request that is finished. A
        load that failed is not tried again: the engine computes the tokens or fails the request, as its policy says.
        """
        self.quiet(request)
        load = self._loading.pop(request, None)
        if load is not None:
            self._cancels.pop(request, None)  # too late, and must not hit the next load of that name
            load.state, load.loader = _State.CLOSED, None
            self._prune(load)

    def unasked(self, request: str) -> None:
        """Record that the load has failed before any worker asked its producer; have the producer told, so that it frees its blocks.

        Call it before ``loaded``, and only if no worker has asked: a producer that was asked counts this engine already, and
        would count it twice.
        """
        if (load := self._loading.get(request)) is not None:
            self._decline(load, "the consumer gave up before it could ask")

    def preempt(self, request: str) -> None:
        """Record that the engine takes the request's blocks away.

        What was loaded into them is computed here when the request resumes; a transfer whose load has not begun can still
        be loaded.
        """
        load = self._requests.get(request)
        if load is not None and load.loader == request:
            self._cancel(request, load, "the consumer preempted the request")

    def finish(self, request: str, reason: str = "the consumer's request is over") -> None:
        """Record that the request is over, at whatever point: rejected, aborted or done."""
        load = self._requests.pop(request, None)
        if load is None:
            return
        load.requests.remove(request)
        if load.loader == request:
            self._cancel(request, load, reason)
        elif load.state is _State.OPEN and not load.requests:
            self._decline(load, reason)
        self._prune(load)

    @property
    def waiting(self) -> dict[TransferId, tuple[bytes, Source]]:
        """The transfers that workers do not know yet, with digest and producer; the scheduler side itself renews their leases."""
        open_ = (load for load in self._loads.values() if load.state is _State.OPEN)
        return {load.transfer: (load.digest, load.source) for load in open_}

    def __len__(self) -> int:
        """Return how many transfers are remembered, including cancelled ones that are not quiet yet."""
        return len(self._loads)

    @property
    def wanted(self) -> tuple[Fetch, ...]:
        """The fetches that the next ``commands`` returns."""
        return tuple(self._fetches)

    @property
    def untold(self) -> bool:
        """Whether ``commands`` or ``declines`` would return something."""
        return bool(self._fetches or self._cancels or self._declines)

    def commands(self) -> StepCommands:
        """Return the fetches and cancels since the last call. Call it once a step."""
        if not self._fetches and not self._cancels:
            return StepCommands()
        drained = StepCommands(fetches=tuple(self._fetches), cancels=tuple(self._cancels.values()))
        self._fetches.clear()
        self._cancels.clear()
        return drained

    def declines(self) -> tuple[DeclinedTransfer, ...]:
        """Return the transfers given up unread since the last call, for their producers to be told."""
        drained = tuple(self._declines)
        self._declines.clear()
        return drained

    @staticmethod
    def _span(group: Group, start: int, end: int) -> tuple[int, int]:
        """Return the positions ``[first, past)`` of the blocks that a load of ``[start, end)`` fills."""
        first, past = group.moved(end)
        return max(first, start // group.block_tokens), past

    def _cancel(self, request: str, load: _Load, reason: str) -> None:
        if load.state is _State.LOADING:
            load.state = _State.CLOSED
            self._cancels[request] = Cancel(request, reason)

    def _decline(self, load: _Load, reason: str) -> None:
        load.state = _State.CLOSED
        self.decline(load.transfer, load.digest, load.source, reason)

    def _prune(self, load: _Load) -> None:
        if not load.requests and load.loader is None:
            del self._loads[load.transfer]
