"""Requests that load from other engines, from their arrival to the end of the load (``kvxfer.schedule.Load``)."""

from __future__ import annotations

from kvxfer import arguments, clock
from kvxfer.config import Config
from kvxfer.engine.dispatch import Dispatch
from kvxfer.engine.ends import LoadEnds, Update
from kvxfer.engine.exchange import Report
from kvxfer.engine.notices import Notices
from kvxfer.engine.paces import LinkPaces
from kvxfer.engine.pins import BlockPins
from kvxfer.engine.prefetch import Prefetches
from kvxfer.engine.step_wait import StepWait
from kvxfer.engine.stories import Stories
from kvxfer.errors import KvxferError
from kvxfer.geometry.tables import TableCheck
from kvxfer.identity import Source, TransferId
from kvxfer.schedule import Load, LoadEvent, LoadState, RankResult, Schedule
from kvxfer.values import MAX_DIGEST, BlockTable

_S, _E = LoadState, LoadEvent

TOGETHER_S = 0.002
"""Seconds between two messages to the workers while more requests come: sending one takes longer than all else that a request costs."""


class Loads:
    """The requests that load; one thread.

    Attributes:
        schedule: All loads.
        prefetches: Those of them that are sync.
        paces: How fast recent loads were.
        step_wait: Whether a step may wait for loads.
    """

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        pins: BlockPins,
        tables: TableCheck,
        ranks: int,
        dispatch: Dispatch,
        notices: Notices,
        stories: Stories,
    ) -> None:
        self.schedule, self._dispatch, self._notices = schedule.consumer, dispatch, notices
        self._ranks, self._tables, self._stories, self.step_wait = ranks, tables, stories, StepWait(schedule.consumer)
        self.paces = LinkPaces()
        self.prefetches = Prefetches(
            schedule, pins, tables.groups, ranks, config.step_budget, self._hear, self.paces, self.step_wait
        )
        self._ends = LoadEnds(schedule.consumer, pins, ranks, self.paces, stories)

    # --- a request's way -----------------------------------------------------------------------------------------------

    def arrived(self, load: Load) -> None:
        """Ask whether the producer of a load has begun, and prepare to fetch from it."""
        if not load.came_at:
            load.came_at = clock.now()
            self._notices.loads(load)
            self._dispatch.prepare(load.transfer.source)

    def decline(self, transfer: TransferId, digest: bytes, source: Source, answer: str) -> None:
        """Have a producer told that a request was rejected before it came here, and will not fetch a transfer.

        Args:
            transfer: The name of the transfer.
            digest: What its KV depends on.
            source: The directory of the engine that offers it.
            answer: The name of the answer that has told of it; nothing else of which that has told will be fetched either. Empty: none.
        """
        arguments.instance("transfer", transfer, TransferId)
        arguments.bytes_of("digest", digest, MAX_DIGEST)
        arguments.instance("source", source, Source)
        self.schedule.decline(transfer, digest, source, "the request was rejected", answer)

    def prefetch(self, load: Load, computed: int) -> None:
        """Begin a load before its request has blocks, if it is short; see ``SchedulerSide.prefetch``."""
        self._fetch_ahead(load, computed)
        self._dispatch.send_ahead(TOGETHER_S if self.step_wait.arriving else 0.0)

    def _fetch_ahead(self, load: Load, computed: int) -> None:
        """Begin a load into lent blocks if it is offered whole and short; that is tried once."""
        if load.tried or not load.transfer.offered:
            return
        load.tried = True
        if self._dispatch.direct and self.prefetches.begin(load, computed):
            load.fetched_at = clock.now()

    def loadable(self, load: Load, computed: int) -> int | None:
        """Return how many tokens can come from outside; see ``SchedulerSide.loadable``."""
        if load.state is _S.WAITING and computed < load.transfer.tokens and self._notices.awaits(load):
            return None
        load.computed = computed
        if not computed:  # local blocks may not be in use yet, and would be lent to this very load
            self._fetch_ahead(load, 0)
        if not load.is_sync:
            return self.schedule.matched(load, computed)
        self._dispatch.send_ahead()
        return self.prefetches.tokens(load, computed)

    def allocated(self, load: Load, table: BlockTable, external: int) -> None:
        """Begin a load if its request counts on it; see ``SchedulerSide.allocated``.

        Raises:
            ScheduleError: The request counts on tokens that it does not load, or has no blocks for them.
        """
        try:
            self._tables.check("table", table)
            if not external:
                self.schedule.on(load, _E.NOT_NEEDED, "the consumer does not need it")
            elif load.is_sync:
                self.prefetches.admit(load, table, external)
                return
            else:
                self.schedule.fetch(load, table, load.computed, external, _E.FETCH)
                load.fetched_at = clock.now()
        except KvxferError as error:
            self.schedule.on(load, _E.GIVE_UP, f"the consumer cannot load it: {error}")
            raise
        self._dispatch.send_ahead()

    def give_up(self, load: Load, reason: str) -> None:
        """End a load that a bug has broken. What a step is to copy is copied, because the engine counts on it."""
        if load.state is not _S.ADMITTED:
            self.schedule.tell(load, _E.GIVE_UP, reason)
        if load.state is _S.CLOSED or self._is_over(load):
            self.schedule.force(load, _S.CLOSED)

    def _is_over(self, load: Load) -> bool:
        """Return whether nothing is to come of a load any more, whatever its table says."""
        if load.fetched is None:
            return True
        if load.under_way or not load.quiet(self._ranks):
            return False
        return load.state not in (_S.ADMITTED, _S.COPYING) or len(load.copied) >= self._ranks

    def preempted(self, load: Load) -> None:
        """Record that the engine takes the request's blocks away: nothing may be copied into them any more."""
        self.schedule.on(load, _E.TAKE_BLOCKS, "the consumer preempted the request")

    def finished(self, load: Load) -> None:
        """Record that the request is over, at whatever point."""
        if load.fetched is None:
            self._stories.load_ended(load)
        self.schedule.finish(load)

    def withdraw_all(self, reason: str) -> None:
        """End all loads, though their requests go on."""
        for load in self.schedule:
            if not load.over:
                self.schedule.tell(load, _E.GIVE_UP, reason)

    # --- steps ---------------------------------------------------------------------------------------------------------

    def short_of_blocks(self) -> None:
        """Give back blocks of prefetches that wait for their request."""
        for load in list(self.schedule.working.values()):
            if load.state is _S.HERE:
                self.schedule.tell(load, _E.TAKE_BLOCKS)

    def report(self, report: Report) -> Update:
        """Process what ranks have reported with steps and by the side channel; return what it means."""
        self._hear()
        for result in report.results.values():
            self._take_in(result, ahead=False)
        for number, copied in report.copied.items():
            load = self.schedule.working.get(number)
            if load is not None and load.state is _S.COPYING:
                with self.schedule.door.of(load.request):
                    self.prefetches.copied(load, copied)
        return self._ends.update(told=bool(report))

    def confirm_ended(self, load: Load) -> None:
        """Record without a report that a load is over on all ranks; does nothing if a report has said so."""
        if load.under_way:
            self._ends.conclude([load])

    def _hear(self, timeout: float = 0.0) -> bool:
        """Process what workers have sent, waiting up to ``timeout`` seconds for something; return whether there was anything."""
        news = self._dispatch.channel.receive(timeout)
        for result in news:
            self._take_in(result, ahead=True)
        return bool(news)

    def _take_in(self, result: RankResult, *, ahead: bool) -> None:
        """Process what a rank says of a load, unless that is closed. What has its number and another name is said of something else."""
        load = self.schedule.working.get(result.number)
        if load is not None and load.request == result.handle:
            with self.schedule.door.of(load.request):
                self._ends.take_in(load, result, ahead=ahead)

    def wait_alone(self) -> bool:
        """Wait for a load to end, if all requests of the engine wait for loads. Call it in a step that computes nothing.

        Call it behind ``SchedulerSide.step``, whose result goes to the workers afterwards. It returns once a load has ended, something has
        arrived or 50 ms are over; call ``report`` next.

        Returns:
            Whether there was nothing but loads to wait for. If not, or if that step says what workers must hear at once, it has not waited.
        """
        if not (self.under_way and self._dispatch.told and self._dispatch.direct and self.step_wait.free):
            return False
        self.step_wait.wait(lambda: self._ends.news, self._hear)
        return True

    @property
    def under_way(self) -> bool:
        """Whether an async load is under way."""
        return any(load.under_way for load in self.schedule.working.values())

    @property
    def unfinished(self) -> bool:
        """Whether steps have more to tell of a load than the engine waits for: blocks are pinned, copied or still written to."""
        return any(load.writing or load.state in UNSEEN for load in self.schedule.working.values())


UNSEEN = frozenset((_S.AHEAD, _S.ADMITTED, _S.COPYING, _S.ABANDONED, _S.UNQUIET))
"""States in which the engine waits for nothing, and yet must go on making steps."""
