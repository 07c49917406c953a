"""The consumer's scheduler side: which requests load from other engines, and into which blocks."""

from collections.abc import Callable, Hashable, Iterator, Sequence

from kvxfer.identity import Handle, RequestId, Source, TransferId
from kvxfer.ledger import BlockLedger, Blocks
from kvxfer.schedule.commands import Cancel, DeclinedTransfer, ScheduleError, StepCommands, check_table
from kvxfer.schedule.load import ENTERED, LEFT, Load, LoadAction, LoadedTransfer, LoadEvent, LoadState
from kvxfer.schedule.requests import EngineRequest, EngineRequests
from kvxfer.transitions import Bulkhead
from kvxfer.values import BlockTable, Fetch, Group

_S, _E, _A = LoadState, LoadEvent, LoadAction


class FetchSchedule:
    """The engine's loads (``Load``): decides what to load, and queues the fetches. A transfer is fetched at most once, by one request.

    There is one for each engine, called by one thread. The calls for a request are ``arrive``, and for its load ``matched`` as often as the
    engine likes, ``fetch``, ``finish``.

    Args:
        groups: The engine's KV-cache groups, in the order of its block tables.
        own: The engine's own directory, if it has several ranks (``Fetch.own``).
        ledger: The blocks that the engine offers, and to which those that its loads fill are added; ``None``: nothing is offered.
        door: Where a bug stops that ends one load of several; ``None``: it is raised.
        requests: The engine's requests; ``None``: they have no other schedule.

    Attributes:
        fetched: How many fetches have been queued. The next one has that number.
        fetches: Those that the next ``commands`` returns.
        working: The loads that have been fetched and are not closed, by the number of their fetch.
        unpin: Called with the holder of blocks that may be used again.
        door: What no bug of a table leaves.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        own: Source | None = None,
        ledger: BlockLedger | None = None,
        door: Bulkhead | None = None,
        requests: EngineRequests | None = None,
    ) -> None:
        self._groups, self._ledger = tuple(groups), BlockLedger() if ledger is None else ledger
        # Windows and states are kept for one number of tokens.
        self._partly = all(group.kind == "full" for group in groups)
        self._own, self.door = own, door or Bulkhead()
        self.requests = EngineRequests() if requests is None else requests
        # Also by the names under which they came without an epoch.
        self._transfers: dict[TransferId, LoadedTransfer] = {}
        self.working: dict[int, Load] = {}
        self.unpin: Callable[[Hashable], None] = lambda holder: None
        self.fetched = 0
        self.fetches: list[Fetch] = []
        self._cancels: list[tuple[Load, Cancel]] = []
        self._declines: list[DeclinedTransfer] = []

    # --- which loads there are ---------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Load]:
        """Yield all loads. Any thread, and they may change meanwhile."""
        return (load for request in self.requests if (load := request.load) is not None)

    def wanting(self, transfer: TransferId) -> Sequence[Load]:
        loaded = self._transfers.get(transfer)
        return () if loaded is None else loaded.loads

    def found(self, transfer: TransferId, digest: bytes) -> None:
        """Learn what a producer calls a transfer that is loaded without its epoch (``TransferId.anywhere``)."""
        asked = transfer.anywhere
        loaded = self._transfers.get(asked)
        if loaded is None or asked == transfer or loaded.digest != digest or transfer in self._transfers:
            return
        loaded.name, self._transfers[transfer] = transfer, loaded

    # --- a request's way -----------------------------------------------------------------------------------------------

    def arrive(
        self,
        request: EngineRequest,
        transfer: TransferId,
        digest: bytes,
        source: Source,
        tokens: int,
        offered: bool = False,
        enough: int = 0,
        answer: str | None = None,
        begun: bool = True,
    ) -> Load | None:
        """Record a request that may load, and return its load, if it does: see ``SchedulerSide.load``, and ``Fetch``.

        Calling it again for a known request changes nothing. Unless it has ``begun``, it is not fetched before ``LoadEvent.BEGUN``.

        Raises:
            ScheduleError: The request loads another transfer.
        """
        loaded, known = self._transfers.get(transfer), request.load
        if known is not None and not known.over:
            if known.transfer is not loaded:
                raise ScheduleError(f"request {request.name} loads {known.transfer.name}, not {transfer} too")
            if (loaded.digest, loaded.source, loaded.tokens) != (digest, source, tokens):
                what = f"{loaded.tokens} tokens of {transfer} from {loaded.source}"
                raise ScheduleError(f"request {request.name} loads {what}, and nothing else under that name")
            return known
        if known is not None:
            return None
        if loaded is not None and (
            all(load.over for load in loaded.loads)
            or (loaded.digest, loaded.source, loaded.tokens) != (digest, source, tokens)
        ):
            return None
        state = _S.OPEN if begun or not tokens else _S.WAITING  # for nothing, nobody is asked
        if loaded is None:
            enough = 0 if offered else enough
            loaded = self._transfers[transfer] = LoadedTransfer(transfer, digest, source, tokens, offered, enough)
        else:
            if answer not in loaded.answers:
                self.decline(loaded.name, digest, source, "another request of this engine loads it")
            fetching = any(load.is_sync or load.state is _S.MOVING for load in loaded.loads)
            state = _S.CLOSED if loaded.closed else _S.SHARED if fetching else state
        load = request.load = Load(request.name, loaded, state)
        loaded.answers.add(answer)
        loaded.loads.append(load)
        if offered and not tokens and not loaded.closed:
            self.on(load, _E.NOT_NEEDED, "the consumer does not need it")
        return load

    def decline(self, transfer: TransferId, digest: bytes, source: Source, reason: str, answer: str = "") -> None:
        """Have a producer told that one of the consumers which it counts will not fetch a transfer.

        ``answer``: the name of an answer that has told of it, if nothing else of which that has told will be fetched either.
        """
        self._declines.append(DeclinedTransfer(transfer, digest, source, reason, answer))

    def matched(self, load: Load, computed: int) -> int | None:
        """Return how many tokens after the ``computed`` local ones can be loaded. Changes nothing.

        0: none, now or later (already loaded, failed, or the local cache has all). None: the producer has not begun, or
        the transfer is being loaded; ask again in the next step. A load ends within its deadline, so this is not None for ever.
        """
        if load.state is _S.OPEN or load.state is _S.WAITING:
            tokens = max(0, load.transfer.tokens - computed)
            return tokens if not tokens or load.state is _S.OPEN else None
        return None if load.state in (_S.SHARED, _S.AHEAD, _S.MOVING) else 0

    def fetch(self, load: Load, table: BlockTable, computed: int, external: int, event: LoadEvent) -> None:
        """Queue the fetch of the ``external`` tokens behind ``computed`` local ones into these blocks; ``event`` says whose they are.

        Raises:
            ScheduleError: ``external`` is more than ``matched`` would return now, or there are no blocks for it, or some of those
                are offered or being filled. The request must not run.
        """
        request, promised = load.request, self.matched(load, computed)
        if promised is None or external > promised or (external < promised and not self._partly):
            raise ScheduleError(f"request {request} expects {external} tokens where {promised} can be had")
        end = computed + external
        blocks = self.fills(table, computed, end)
        unused = self.unused(request, blocks)
        self.on(load, event)
        self._ledger.claim(load, unused, f"the load of request {request}", fills=True)
        loaded = load.transfer
        for sibling in loaded.loads:
            if sibling is not load:
                self.tell(sibling, _E.SIBLING_FETCHES)
        load.fetched, load.blocks, load.start, load.end = self.fetched, blocks, computed, end
        self.working[self.fetched] = load
        self.fetched += 1
        enough = min(max(loaded.enough, computed + 1), end) if loaded.enough else 0
        self.fetches.append(
            Fetch(
                Handle(request),
                loaded.name,
                loaded.digest,
                loaded.source,
                blocks,
                computed,
                end,
                self._own,
                loaded.offered,
                enough,
                loaded.patience,
                tail=True,
                number=load.fetched,
                lent=load.is_sync,
            )
        )

    def fills(self, table: BlockTable, start: int, end: int) -> BlockTable:
        """Return the blocks that a load of the tokens ``[start, end)`` fills; earlier ones may be shared with other requests.

        Raises:
            ScheduleError: The table lacks one.
        """
        check_table(self._groups, table)
        spans = [self._span(group, start, end) for group in self._groups]
        filled = table.only(spans)
        for g, (group, (first, past)) in enumerate(zip(self._groups, spans, strict=True)):
            if filled.count(g) < past or (group.kind in ("full", "state") and not filled.there(g, first, past)):
                raise ScheduleError(f"no blocks for tokens {start} to {end} in a table of {table.count(g)} blocks")
        return filled

    def unused(self, request: RequestId, table: BlockTable) -> Blocks:
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

    # --- how it ends ---------------------------------------------------------------------------------------------------

    def on(self, load: Load, event: LoadEvent, reason: str = "") -> bool:
        """Make the move of one load that an event leads to, with all that is done with it; return False if the event is ignored.

        This is the one door to a load. ``reason``: why it is cancelled, for the workers' log.
        """
        before = load.state
        if not load.on(event):
            return False
        self._act(load, before, event, reason)
        return True

    def tell(self, load: Load, event: LoadEvent, reason: str = "") -> None:
        """Make the move of a load that the call is not about, or not alone: a bug in it ends that load alone."""
        with self.door.of(load.request):
            self.on(load, event, reason)

    def force(self, load: Load, state: LoadState) -> None:
        """Bring a load to a state past its table, which has refused what is true.

        Of a load that is to be closed nothing may touch the blocks any more, and the engine must wait for nothing of it.
        """
        before, load.state = load.state, state
        if before is not state:
            self._act(load, before, _E.GIVE_UP, "a bug has ended it")
        if state is _S.CLOSED:  # also what was claimed for a move that was refused
            self._ledger.drop(load)
            self._ledger.drop(load.copier)
            self.unpin(load)

    def _act(self, load: Load, before: LoadState, event: LoadEvent, reason: str) -> None:
        """Do what is to be done with a move that has been made."""
        for action in (*LEFT.get(before, ()), *ENTERED.get(load.state, ())):
            match action:
                case _A.CANCEL if load.fetched is not None:
                    self._cancels.append((load, Cancel(load.fetched, reason)))
                case _A.FILLED:
                    self._ledger.drop(load)
                    by = f"the prefetch of request {load.request}"
                    self._ledger.claim(load, self._ledger.all(load.blocks), by, fills=False)
                case _A.LET_GO if load.fetched is not None:
                    self._ledger.drop(load)
                    self.unpin(load)
                case _A.NOT_COPIED:
                    self._ledger.drop(load.copier)
                case _A.CLOSE if not load.transfer.closed:
                    self._close(load, before, event, reason)
                case _A.END:
                    if load.fetched is not None:
                        del self.working[load.fetched]
                    if load.over:
                        self._forget(load)

    def unasked(self, load: Load) -> None:
        """Record that a load has failed before any worker asked its producer; have the producer told, so that it frees its blocks.

        Call it before the end is told, and only if no worker has asked: a producer that was asked counts this engine already, and
        would count it twice.
        """
        if load.fetched is not None and load.state is not _S.CLOSED:
            loaded = load.transfer
            self.decline(loaded.name, loaded.digest, loaded.source, "the consumer gave up before it could ask")

    def finish(self, load: Load, reason: str = "the consumer's request is over") -> None:
        """Record that the request of a load is over, at whatever point: rejected, aborted or done."""
        load.over = True
        if load.state is _S.CLOSED:
            self._forget(load)
        else:
            self.on(load, _E.GIVE_UP, reason)

    def _close(self, load: Load, before: LoadState, event: LoadEvent, reason: str) -> None:
        """Close the transfer with the load that was to fetch it; the other requests of it compute their tokens.

        One that has not begun goes with its last request, or with one that is admitted without it; its producer is told.
        """
        loaded = load.transfer
        closes = before is not _S.SHARED
        if before in (_S.WAITING, _S.OPEN):
            closes = event is _E.NOT_NEEDED or all(other is load or other.over for other in loaded.loads)
            if closes:
                self.decline(loaded.name, loaded.digest, loaded.source, reason)
        if closes:
            loaded.closed = True
            for sibling in tuple(loaded.loads):
                self.tell(sibling, _E.SIBLING_ENDS)

    def _forget(self, load: Load) -> None:
        loaded = load.transfer
        if (request := self.requests.find(load.request)) is not None:
            request.load = None
            self.requests.forget(request)
        loaded.loads.remove(load)
        if not loaded.loads:
            del self._transfers[loaded.name]
            if self._transfers.get(loaded.name.anywhere) is loaded:
                del self._transfers[loaded.name.anywhere]

    # --- once a step ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return how many transfers are remembered, including cancelled ones that are not quiet yet."""
        return sum(name == loaded.name for name, loaded in self._transfers.items())

    @property
    def untold(self) -> bool:
        """Whether ``commands`` or ``declines`` would return something."""
        return bool(self.fetches or self._cancels or self._declines)

    def commands(self) -> StepCommands:
        """Return the fetches and cancels since the last call. Call it once a step."""
        if not self.fetches and not self._cancels:
            return StepCommands()
        # What has ended by now need not be cancelled.
        cancels = tuple(
            cancel for load, cancel in self._cancels if load.state in (_S.CANCELLED, _S.ABANDONED, _S.UNQUIET)
        )
        drained = StepCommands(fetches=tuple(self.fetches), cancels=cancels)
        self.fetches.clear()
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
