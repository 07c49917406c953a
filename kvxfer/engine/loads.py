"""Requests that load from other engines, from their arrival to the end of the load: within one step, or beside the steps."""

from __future__ import annotations

from kvxfer.config import Config
from kvxfer.engine.dispatch import Dispatch
from kvxfer.engine.exchange import BlockCopy, Report
from kvxfer.engine.load_ends import LoadEnds, Update
from kvxfer.engine.loading import LoadingBlocks
from kvxfer.engine.notices import Notices
from kvxfer.engine.pins import BlockPins
from kvxfer.engine.prefetch import Prefetches
from kvxfer.engine.trace import Trace
from kvxfer.errors import KvxferError
from kvxfer.geometry.tables import TableCheck
from kvxfer.identity import Source, TransferId
from kvxfer.ledger import BlockLedger
from kvxfer.schedule import FetchSchedule, ScheduleError
from kvxfer.values import BlockTable

__all__ = ["Loads"]


class Loads:
    """The requests that load; one thread. Calls about any other request do nothing."""

    def __init__(
        self,
        config: Config,
        schedule: FetchSchedule,
        ledger: BlockLedger,
        pins: BlockPins,
        tables: TableCheck,
        ranks: int,
        dispatch: Dispatch,
        notices: Notices,
        trace: Trace,
    ) -> None:
        self._schedule, self._dispatch, self._notices = schedule, dispatch, notices
        self._tables, self._trace = tables, trace
        self._computed: dict[str, int] = {}  # requests that may load -> local tokens when they were asked about last
        self._ready: dict[str, tuple[Source, int]] = {}  # loads that are offered whole and have not begun
        self._loading = LoadingBlocks(schedule, pins, ranks)
        self._prefetches = Prefetches(
            schedule, ledger, pins, tables.groups, ranks, config.step_budget, self._hear, trace
        )
        self._ends = LoadEnds(self._loading, ranks, self._prefetches.paces, trace)

    # --- a request's way -----------------------------------------------------------------------------------------------

    def arrive(
        self,
        request: str,
        transfer: TransferId,
        digest: bytes,
        source: Source,
        tokens: int,
        begun: bool,
        offered: bool,
        progress: int,
        enough: int,
        answer: str | None,
    ) -> bool:
        """Accept a load; see ``SchedulerSide.load``."""
        if request in self._prefetches and request not in self._computed:
            return False  # what an earlier request of this name has prefetched is still being copied
        taken = self._schedule.arrive(request, transfer, digest, source, tokens, progress, offered, enough, answer)
        if taken:
            self._computed.setdefault(request, 0)
            self._notices.loads(request, transfer, digest, source, begun)
            if offered:
                self._ready[request] = source, tokens
            self._dispatch.prepare(source)
            self._trace.arrived(request, transfer, source)
        return taken

    def prefetch(self, request: str, computed: int) -> None:
        """Begin the load before the request has blocks, if it is short; see ``SchedulerSide.prefetch``."""
        source, tokens = self._ready.pop(request, (None, 0))
        if source is None or not self._dispatch.direct:
            return
        if self._prefetches.begin(request, source, computed, tokens, self._dispatch.next):
            self._trace.fetched(request, "within the step", tokens - computed)
            self._dispatch.prefetch()
            self._dispatch.hurry()

    def loadable(self, request: str, computed: int) -> int | None:
        """Return how many tokens can come from outside; see ``SchedulerSide.loadable``."""
        if request not in self._computed:
            return 0
        if self._schedule.matched(request, computed) and self._notices.awaits(request):
            return None
        self._computed[request] = computed
        if not computed:  # local blocks may not be in use yet, and would be lent to this very load
            self.prefetch(request, 0)
        if request in self._prefetches:
            return self._prefetches.tokens(request, computed)
        return self._schedule.matched(request, computed)

    def here(self, request: str) -> bool:
        """Return whether the tokens promised for this request are already here, to be copied into its blocks."""
        return request in self._prefetches

    def allocated(self, request: str, table: BlockTable, external: int) -> None:
        """Begin the load if the request counts on it; see ``SchedulerSide.allocated``.

        Raises:
            ScheduleError: The request counts on tokens that it does not load, or has no blocks for them.
        """
        if request not in self._computed:
            if external:
                raise ScheduleError(
                    f"request {request} counts on {external} tokens, and does not load: call 'load' first"
                )
            return
        self._notices.forget(request)
        try:
            self._tables.check("table", table)
            if request in self._prefetches:
                self._prefetches.admitted(request, table, self._computed[request], external)
                return
            self._schedule.allocated(request, table, self._computed[request], external)
        except KvxferError as error:
            self._prefetches.give_up(request)
            self._schedule.finish(request, f"the consumer cannot load it: {error}")
            raise
        if external:
            number, fetch = self._dispatch.last
            self._trace.fetched(request, "beside the steps", external)
            self._ends.begins(request, fetch.source, external)
            self._loading.begins(request, fetch.blocks.ids(), number)
        self._dispatch.hurry()

    def preempted(self, request: str) -> None:
        """Record that the engine takes the request's blocks away: nothing may be copied into them any more."""
        self._prefetches.give_up(request)

    def finished(self, request: str) -> None:
        """Record that the request is over, at whatever point."""
        self._computed.pop(request, None)
        self._trace.finished(request)
        self._give_up(request)
        self._schedule.finish(request)

    def withdraw_all(self, reason: str) -> None:
        """End all loads, though their requests go on."""
        for request in self._computed:
            self._give_up(request)
            self._schedule.finish(request, reason)

    def _give_up(self, request: str) -> None:
        """Give up what precedes a request's load: its prefetch, and waiting for its producer."""
        self._ready.pop(request, None)
        self._prefetches.give_up(request)
        self._notices.forget(request)

    # --- steps ---------------------------------------------------------------------------------------------------------

    def copies(self) -> tuple[BlockCopy, ...]:
        """Return what the next step copies from prefetched blocks; call it once a step."""
        return self._prefetches.copies()

    def short_of_blocks(self) -> None:
        """Give back blocks of prefetches that wait for their request."""
        self._prefetches.short_of_blocks()

    def report(self, report: Report) -> Update:
        """Process what ranks have reported with steps and by the side channel; return what it means."""
        self._hear()
        for result in report.prefetched.values():
            self._prefetches.take_in(result)
        for request, copied in report.copied.items():
            self._prefetches.copied(request, copied)
        return self._ends.report(report)

    def over_elsewhere(self, request: str) -> None:
        """Record without a report that a load is over on all ranks; does nothing if a report has said so."""
        self._ends.over_elsewhere(request)

    def _hear(self, timeout: float = 0.0) -> bool:
        """Process what workers have sent, waiting up to ``timeout`` seconds for something; return whether there was anything."""
        news = self._dispatch.receive(timeout)
        for result in news:
            request = result.handle
            if request in self._prefetches:
                self._prefetches.take_in(result)
            elif self._loading.is_of(request, result.number) and result.quiet and result.failure is None:
                self._ends.came(result)
        return bool(news)

    @property
    def under_way(self) -> bool:
        """Whether a load is under way beside the steps."""
        return bool(len(self._loading))

    @property
    def waiting(self) -> bool:
        """Whether blocks are pinned of which the engine knows no request."""
        return self._loading.waiting or self._prefetches.moving

    def __len__(self) -> int:
        """Return how much is remembered; 0 when there are no loads."""
        ahead = len(self._ready) + len(self._prefetches)
        return len(self._computed) + ahead + len(self._loading) + len(self._ends)
