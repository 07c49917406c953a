"""How loads end: what the ranks report, gathered on each load's record and turned into what the engine is told.

When a load fails, some of its blocks may still be written to. The engine is told of the failure at once and goes on with
other blocks, while these stay pinned until all ranks have reported them quiet. A rank may report an end twice, by the side channel
and with a step; the first report counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
        short: For loaded requests that were delivered only in part because the producer gave up (``SchedulerSide.load``,
            ``enough``): up to which token. The engine computes the rest.
    """

    free: frozenset[RequestId] = frozenset()
    loaded: frozenset[RequestId] = frozenset()
    failed: Mapping[RequestId, Failure] = field(default_factory=dict)
    short: Mapping[RequestId, int] = field(default_factory=dict)


def disagreement(generations: Iterable[Generation]) -> Failure:
    """Return the failure of a load that was delivered on every rank, but of these generations."""
    named = " and ".join(map(str, sorted(generations)))
    detail = f"the producer recomputed it meanwhile, and the ranks here hold different generations: {named}"
    return Failure(FailureKind.REVOKED, detail)


class LoadEnds:
    """Joins what the ranks of one engine report of its async loads."""

    def __init__(self, schedule: FetchSchedule, pins: BlockPins, ranks: int, paces: LinkPaces, trace: Trace) -> None:
        self._schedule, self._pins, self._ranks, self._paces, self._trace = schedule, pins, ranks, paces, trace
        self._over: list[Load] = []  # those of which the engine is to be told
        self._reported_soon = False  # whether a rank has announced an end since then that only a step reports

    @property
    def news(self) -> bool:
        """Whether a load has ended, as the side channel says, and no report has been processed since."""
        return bool(self._over) or self._reported_soon

    def came(self, load: Load, result: RankResult) -> None:
        """Record that a load has ended on one rank. The step says so as well, and alone what a rank may quarantine."""
        if result.failure is not None or not result.quiet or result.short is not None:
            self._reported_soon = True
        else:
            self.reported(load, result)

    def reported(self, load: Load, result: RankResult) -> None:
        """Record how a load has ended on one rank."""
        known = load.results.get(result.rank)
        if (known is not None and known.quiet) or not (load.under_way or load.state is _S.UNQUIET):
            return
        writing = load.writing
        load.results[result.rank] = result
        if load.under_way:
            load.failure = load.failure or result.failure
            if load.writing and not writing:
                # The engine hears of it next, or only once the blocks are quiet if there is no pool to pin them in.
                load.pinned = self._pins.keep(load, load.blocks.ids())
                self._schedule.on(load, _E.FAILED, "its load has failed on another rank")
            if len(load.results) >= self._ranks and (load.pinned or not load.writing):
                self._over.append(load)
        if writing and not load.writing:
            self._schedule.on(load, _E.QUIET)

    def update(self, told: bool) -> Update:
        """Return what has become of the loads that are over on all ranks, as far as the engine has not been told.

        ``told``: whether steps have said anything since the last call.
        """
        over, self._over = dict.fromkeys(self._over), []
        self._reported_soon &= not told
        return self.conclude(load for load in over if load.under_way)

    def conclude(self, loads: Iterable[Load]) -> Update:
        """End these loads, which are over on all ranks; return what the engine is told of that."""
        loaded, failed, shorter = set(), {}, {}
        for load in loads:
            request, stages = load.request, load.stages
            if load.failure is None and len(load.generations) > 1:
                load.failure = disagreement(load.generations)
            if load.failure is not None and load.unasked(self._ranks):
                self._schedule.unasked(load)
            if not self._moved(load):
                if load.writing:
                    continue  # it is told once its blocks are quiet
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
        return Update(frozenset(), frozenset(loaded), failed, shorter)

    def _moved(self, load: Load) -> bool:
        """Make the move of a load whose end the engine is told; return False if a bug has refused it, with which the load has failed."""
        with self._schedule.door.of(load.request):
            self._schedule.on(load, _E.ENDED_UNQUIET if load.writing else _E.ENDED)
            return True
        load.failure = load.failure or Failure(FailureKind.MISUSE, "a bug of kvxfer's has ended it")
        return False
