"""How loads end: what the ranks report, gathered on each load's record and turned into what the engine is told.

When a load fails, some of its blocks may still be written to. The engine is told of the failure at once and goes on with
other blocks, while these stay pinned until all ranks have reported them quiet. A load that was delivered is reported
twice, by the side channel and with a step; only after the second report may another load have its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvxfer.engine.paces import LinkPaces
from kvxfer.engine.pins import BlockPins
from kvxfer.engine.trace import Trace
from kvxfer.failures import Failure, FailureKind
from kvxfer.identity import Generation, RequestId
from kvxfer.logs import logger
from kvxfer.schedule import FetchSchedule, Load, LoadEvent, LoadState, RankResult
from kvxfer.text import printable

log = logger("kvxfer.engine")

_S, _E = LoadState, LoadEvent


@dataclass(frozen=True)
class Update:
    """What a report means to the engine.

    Attributes:
        free: Finished requests whose blocks are now to be freed.
        loaded: Requests whose load was delivered on all ranks: the tokens are in their blocks.
        failed: Requests whose load has failed, and why. The engine computes the tokens or fails the request, as its
            policy says. If it no longer holds the request, it may free the blocks.
        disagreed: Those of the failed requests whose load was delivered on every rank, but of different generations, and
            the blocks of the load.
        short: For loaded requests that were delivered only in part because the producer gave up (``SchedulerSide.load``,
            ``enough``): up to which token. The engine computes the rest.
        repeated: Requests that an earlier update has named as ``loaded``, of which steps have only now told on all ranks.

    ``disagreed`` and ``short`` come once steps have told of every rank, ``loaded`` otherwise as soon as the side channel has.
    """

    free: frozenset[RequestId] = frozenset()
    loaded: frozenset[RequestId] = frozenset()
    failed: Mapping[RequestId, Failure] = field(default_factory=dict)
    disagreed: Mapping[RequestId, tuple[int, ...]] = field(default_factory=dict)
    short: Mapping[RequestId, int] = field(default_factory=dict)
    repeated: frozenset[RequestId] = frozenset()


def disagreement(generations: Iterable[Generation]) -> Failure:
    """Return the failure of a load that was delivered on every rank, but of these generations."""
    named = " and ".join(map(str, sorted(generations)))
    detail = f"the producer recomputed it meanwhile, and the ranks here hold different generations: {named}"
    return Failure(FailureKind.REVOKED, detail)


class LoadEnds:
    """Joins what the ranks of one engine report of its async loads."""

    def __init__(self, schedule: FetchSchedule, pins: BlockPins, ranks: int, paces: LinkPaces, trace: Trace) -> None:
        self._schedule, self._pins, self._ranks, self._paces, self._trace = schedule, pins, ranks, paces, trace
        self._early: list[Load] = []  # those of which something has come since the last update
        self._repeated: list[RequestId] = []
        self._reported_soon = False  # whether it has announced an end since then that only a step reports

    @property
    def news(self) -> bool:
        """Whether a load has ended, as the side channel says, and no report has been processed since."""
        return bool(self._early) or self._reported_soon

    def came(self, load: Load, result: RankResult) -> None:
        """Record that a load has ended on one rank, which a step will report as well."""
        if result.failure is not None or not result.quiet or result.short is not None:
            self._reported_soon = True
        elif load.under_way:
            load.results.setdefault(result.rank, result)
            if load.whole and len(load.results) >= self._ranks:
                self._early.append(load)

    def reported(self, load: Load, result: RankResult) -> None:
        """Record what a step says of a load on one rank."""
        writing = load.writing
        self._early.append(load)
        load.told_on.add(result.rank)
        if load.under_way or load.state is _S.UNQUIET:
            load.results[result.rank] = result
        if load.under_way:
            load.failure = load.failure or result.failure
        if len(load.told_on) >= self._ranks and not load.told and self._told(load):
            self._repeated.append(load.request)
        if load.under_way and load.writing and not writing:
            # The engine hears of it next, or only once the blocks are quiet if there is no pool to pin them in.
            load.pinned = self._pins.keep(load, load.blocks.ids())
            self._schedule.on(load, _E.FAILED, "its load has failed on another rank")
        if writing and not load.writing:
            self._schedule.on(load, _E.QUIET if load.told else _E.QUIET_EARLY)

    def update(self, told: bool) -> Update:
        """Return what has become of the loads that are over on all ranks, as far as the engine has not been told.

        ``told``: whether steps have said anything since the last call.
        """
        seen, self._early = dict.fromkeys(self._early), []
        repeated, self._repeated = frozenset(self._repeated), []
        self._reported_soon &= not told
        return replace(self._ended([load for load in seen if self._may_end(load)]), repeated=repeated)

    def confirm(self, load: Load) -> None:
        """Record without a report that a load is over on all ranks."""
        if load.fetched is not None and not load.is_sync:
            self._told(load)
            if load.under_way:
                self._ended([load])

    def _told(self, load: Load) -> bool:
        """Record that steps have told of a load's end on all ranks; return whether the engine was told early that it is here."""
        load.told = True
        early = load.state is _S.AWAITS_STEP and load.failure is None
        if load.state is not _S.CLOSED:
            self._schedule.on(load, _E.REPEAT)
        return early

    def _may_end(self, load: Load) -> bool:
        """Return whether the engine is to be told how a load has ended.

        What only we know to be wrong with it, the engine must not hear of before the last step has told of its ranks: an engine that
        counts the ranks itself would take the load for whole after that.
        """
        known = load.under_way and len(load.results) >= self._ranks and (load.pinned or not load.writing)
        failed = any(one.failure is not None for one in load.results.values())
        return known and (load.told or failed or (load.whole and load.failure is None))

    def _ended(self, loads: Iterable[Load]) -> Update:
        """Return what the engine is told of the end of these loads."""
        loaded, failed, disagreed, shorter = set(), {}, {}, {}
        for load in loads:
            request, stages = load.request, load.stages
            if load.failure is None and len(load.generations) > 1:
                load.failure = disagreement(load.generations)
                disagreed[request] = load.blocks.ids()
            if load.failure is not None and load.unasked(self._ranks):
                self._schedule.unasked(request)
            if not self._moved(load):
                if load.writing or not load.told:
                    continue  # a step reports it once more
                self._schedule.force(load, _S.CLOSED)
            if load.failure is not None:
                failed[request] = load.failure
                self._paces.failed(load.wanted.source)
            else:
                loaded.add(request)
                if load.short is not None:
                    shorter[request] = load.short
                    what = "request %s was loaded up to token %d, where its producer gave up"
                    log.warning(what, printable(request), load.short)
                elif stages is not None:
                    self._paces.delivered(load.wanted.source, load.end - load.start, stages.moving)
            self._trace.write(load)
        return Update(frozenset(), frozenset(loaded), failed, disagreed=disagreed, short=shorter)

    def _moved(self, load: Load) -> bool:
        """Make the move of a load whose end the engine is told; return False if a bug has refused it, with which the load has failed."""
        with self._schedule.door.of(load.request):
            told = _E.ENDED if load.told else _E.ENDED_EARLY
            self._schedule.on(load, _E.ENDED_UNQUIET if load.writing else told)
            return True
        load.failure = load.failure or Failure(FailureKind.MISUSE, "a bug of kvxfer's has ended it")
        return False
