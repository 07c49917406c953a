"""Requests that load from other engines, from their arrival to the end of the load (``kvxfer.schedule.Load``)."""

from __future__ import annotations

import time

from kvxfer.config import Config
from kvxfer.engine.alone import LOOK_S, LOOKS, Alone
from kvxfer.engine.dispatch import Dispatch
from kvxfer.engine.ends import LoadEnds, Update
from kvxfer.engine.exchange import BlockCopy, Report
from kvxfer.engine.notices import Notices
from kvxfer.engine.pins import BlockPins
from kvxfer.engine.prefetch import Prefetches
from kvxfer.engine.stories import Stories
from kvxfer.engine.trace import Trace
from kvxfer.errors import KvxferError
from kvxfer.geometry.tables import TableCheck
from kvxfer.identity import Source, TransferId
from kvxfer.ledger import BlockLedger
from kvxfer.schedule import FetchSchedule, Load, LoadEvent, LoadState, ScheduleError
from kvxfer.values import BlockTable

__all__ = ["Loads"]

_S, _E = LoadState, LoadEvent


class Loads:
    """The requests that load; one thread. Calls about any other request do nothing.

    Attributes:
        paces: How fast recent loads were.
        alone: Whether the engine has nothing else to do.
    """

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
        stories: Stories,
    ) -> None:
        self._stories = stories
        self._schedule, self._dispatch, self._notices, self._tables = schedule, dispatch, notices, tables
        self.alone = Alone(schedule)
        self._prefetches = Prefetches(
            schedule, ledger, pins, tables.groups, ranks, config.step_budget, self._hear, trace, self.alone
        )
        self.paces = self._prefetches.paces
        self._ends = LoadEnds(schedule, pins, ranks, self.paces, trace)

    # --- a request's way -----------------------------------------------------------------------------------------------

    def load(
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
        what = request, transfer, digest, source, tokens
        if not self._schedule.arrive(*what, progress, offered, enough, answer, begun):
            return False
        load = self._schedule.of(request)
        assert load is not None
        if not load.came_at:
            load.came_at = time.monotonic()
            self._notices.loads(load)
            self._dispatch.prepare(source)
        return True

    def prefetch(self, request: str, computed: int) -> None:
        """Begin the load before the request has blocks, if it is short; see ``SchedulerSide.prefetch``."""
        load = self._schedule.of(request)
        if load is not None:
            self._fetch_ahead(load, computed)

    def _fetch_ahead(self, load: Load, computed: int) -> None:
        """Begin a load into lent blocks if it is offered whole and short; that is tried once."""
        if load.tried or not load.wanted.offered:
            return
        load.tried = True
        if self._dispatch.direct and self._prefetches.begin(load, computed):
            load.fetched_at = time.monotonic()
            self._dispatch.prefetch()
            self._dispatch.send_ahead()

    def loadable(self, request: str, computed: int) -> int | None:
        """Return how many tokens can come from outside; see ``SchedulerSide.loadable``."""
        load = self._schedule.of(request)
        if load is None:
            return 0
        if load.state is _S.WAITING and computed < load.wanted.tokens and self._notices.awaits(load):
            return None
        load.computed = computed
        if not computed:  # local blocks may not be in use yet, and would be lent to this very load
            self._fetch_ahead(load, 0)
        return self._prefetches.tokens(load, computed) if load.is_sync else self._schedule.matched(request, computed)

    def is_sync(self, request: str) -> bool:
        """Return whether the tokens promised for this request are already here, to be copied into its blocks."""
        load = self._schedule.of(request)
        return load is not None and load.is_sync

    def allocated(self, request: str, table: BlockTable, external: int) -> None:
        """Begin the load if the request counts on it; see ``SchedulerSide.allocated``.

        Raises:
            ScheduleError: The request counts on tokens that it does not load, or has no blocks for them.
        """
        load = self._schedule.of(request)
        if load is None:
            if external:
                raise ScheduleError(
                    f"request {request} counts on {external} tokens, and does not load: call 'load' first"
                )
            return
        try:
            self._tables.check("table", table)
            if load.is_sync:
                self._prefetches.admit(load, table, external)
                return
            self._schedule.allocated(request, table, load.computed, external)
        except KvxferError as error:
            self._give_up(load, f"the consumer cannot load it: {error}")
            raise
        if external:
            load.fetched_at = time.monotonic()
        self._dispatch.send_ahead()

    def preempted(self, request: str) -> None:
        """Record that the engine takes the request's blocks away: nothing may be copied into them any more."""
        load = self._schedule.of(request)
        if load is not None:
            self._end(load, _E.TAKE_BLOCKS, "the consumer preempted the request")

    def finished(self, request: str) -> None:
        """Record that the request is over, at whatever point."""
        load = self._schedule.of(request)
        if load is not None:
            if load.fetched is None and not load.traced:
                load.traced = True
                self._stories.load_dropped(load)
            if load.is_sync:
                load.over = True
                self._prefetches.end(load, _E.GIVE_UP, "the consumer's request is over")
            else:
                self._schedule.finish(request)

    def withdraw_all(self, reason: str) -> None:
        """End all loads, though their requests go on."""
        for load in self._schedule:
            if not load.over:
                self._give_up(load, reason)

    def _give_up(self, load: Load, reason: str) -> None:
        if load.is_sync:
            self._prefetches.end(load, _E.GIVE_UP, reason)
        else:
            self._schedule.give_up(load, reason)

    def _end(self, load: Load, event: LoadEvent, reason: str) -> None:
        if load.is_sync:
            self._prefetches.end(load, event, reason)
        else:
            self._schedule.on(load, event, reason)

    # --- steps ---------------------------------------------------------------------------------------------------------

    def copies(self) -> tuple[BlockCopy, ...]:
        """Return what the next step copies from prefetched blocks; call it once a step."""
        return self._prefetches.copies()

    def short_of_blocks(self) -> None:
        """Give back blocks of prefetches that wait for their request."""
        for load in list(self._schedule.working):
            if load.state is _S.HERE:
                self._prefetches.end(load, _E.TAKE_BLOCKS)

    def report(self, report: Report) -> Update:
        """Process what ranks have reported with steps and by the side channel; return what it means."""
        self._hear()
        for result in report.prefetched.values():
            load = self._schedule.named(result.handle)
            if load is not None and load.is_sync and load.fetched == result.number:
                self._prefetches.take_in(load, result)
        for request, copied in report.copied.items():
            load = self._schedule.named(request)
            if load is not None and load.state is _S.COPYING:
                self._prefetches.copied(load, copied)
        return self._ends.report(report)

    def over_elsewhere(self, request: str) -> None:
        """Record without a report that a load is over on all ranks; does nothing if a report has said so."""
        load = self._schedule.named(request)
        if load is not None:
            self._ends.over_elsewhere(load)

    def _hear(self, timeout: float = 0.0) -> bool:
        """Process what workers have sent, waiting up to ``timeout`` seconds for something; return whether there was anything."""
        news = self._dispatch.channel.receive(timeout)
        for result in news:
            load = self._schedule.named(result.handle)
            if load is None or load.fetched != result.number:
                continue
            if load.is_sync:
                self._prefetches.take_in(load, result)
            elif load.under_way:
                self._ends.came(load, result)
        return bool(news)

    def wait_alone(self) -> bool:
        """Wait for async loads while the engine has nothing else to do; see ``SchedulerSide.wait_alone``."""
        if not (self.under_way and self._dispatch.told and self._dispatch.direct and self.alone.now):
            return False
        for _ in range(LOOKS):
            if self._ends.news or not self.alone.now:
                break
            self._hear(LOOK_S)
        return True

    @property
    def under_way(self) -> bool:
        """Whether a load is under way beside the steps."""
        return any(load.under_way for load in self._schedule.working)

    @property
    def unsettled(self) -> bool:
        """Whether steps have more to tell of a load than the engine waits for: blocks are pinned, copied or still written to."""
        return any(load.writing or load.state in UNSEEN for load in self._schedule.working)


UNSEEN = frozenset((_S.AHEAD, _S.ADMITTED, _S.COPYING, _S.DROPPED, _S.WRITTEN, _S.REPEATED))
"""States in which the engine waits for nothing, and yet must go on making steps."""
