"""How loads end: what the ranks report, gathered on each load's record and turned into what the engine is told.

When a load fails, some of its blocks may still be written to. The engine is told of the failure at once and goes on with
other blocks, while these stay pinned until all ranks have reported them quiet. A rank may report an end twice, by the side channel
and with a step; the first report counts. Of a sync load the engine is told by what ``loadable`` returns, and no report names it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kvxfer.engine.paces import LinkPaces
from kvxfer.engine.pins import BlockPins
from kvxfer.engine.stories import Stories
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


def _disagreement(generations: Collection[Generation]) -> Failure | None:
    """Return the failure of a load of which the ranks were delivered these generations; None if they go together."""
    if len(generations) < 2:
        return None
    named = " and ".join(map(str, sorted(generations)))
    detail = f"the producer recomputed it meanwhile, and the ranks here hold different generations: {named}"
    return Failure(FailureKind.REVOKED, detail)


class LoadEnds:
    """Joins what the ranks of one engine report of its loads."""

    def __init__(
        self, schedule: FetchSchedule, pins: BlockPins, ranks: int, paces: LinkPaces, stories: Stories
    ) -> None:
        self._schedule, self._pins, self._ranks, self._paces, self._stories = schedule, pins, ranks, paces, stories
        self._over: list[Load] = []  # those of which the engine is to be told
        self._reported_soon = False  # whether a rank has announced an end since then that only a step reports

    @property
    def news(self) -> bool:
        """Whether a load has ended, as the side channel says, and no report has been processed since."""
        return bool(self._over) or self._reported_soon

    def take_in(self, load: Load, result: RankResult, *, ahead: bool) -> None:
        """Record how a load has ended on one rank; ``ahead``: the side channel says so, before the rank's step does."""
        if ahead and not load.is_sync and (result.failure is not None or not result.quiet or result.short is not None):
            self._reported_soon = True  # what a rank may quarantine, its step alone says
            return
        known = load.results.get(result.rank)
        if not load.expects_results or (known is not None and known.quiet):
            return
        load.results[result.rank] = result
        if load.failure is None:
            load.failure = result.failure or (_disagreement(load.generations) if len(load.results) > 1 else None)
        failed = load.failure is not None
        if failed and load.writing and not load.pinned:
            # The engine hears of it next, or only once the blocks are quiet if there is no pool to pin them in.
            load.pinned = self._pins.keep(load, load.blocks.ids())
        moving = load.under_way
        quiet = not moving and load.quiet(self._ranks)
        if moving:
            if len(load.results) >= self._ranks and (not failed or load.pinned or not load.writing):
                self._over.append(load)  # first, so that the engine is told of it whatever a table refuses
        elif quiet or failed:
            self._tell(load)
        if failed:
            self._schedule.on(load, _E.FAILED, "its load has failed on another rank")
        if quiet:
            if failed:
                self._check_asked(load)
            self._schedule.on(load, _E.ARRIVED if load.state is _S.AHEAD else _E.QUIET)

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
            request = load.request
            if load.failure is not None:
                self._check_asked(load)
            if not self._moved(load):
                if load.writing:
                    continue  # it is told once its blocks are quiet
                self._schedule.force(load, _S.CLOSED)
            if load.failure is not None:
                failed[request] = load.failure
            else:
                loaded.add(request)
                if load.short is not None:
                    shorter[request] = load.short
                    what = "request %s was loaded up to token %d, where its producer gave up"
                    log.warning(what, printable(request), load.short)
            self._tell(load)
        return Update(frozenset(), frozenset(loaded), failed, shorter)

    def _moved(self, load: Load) -> bool:
        """Make the move of a load whose end the engine is told; return False if a bug has refused it, with which the load has failed."""
        with self._schedule.door.of(load.request):
            self._schedule.on(load, _E.ENDED_UNQUIET if load.writing else _E.ENDED)
            return True
        load.failure = load.failure or Failure(FailureKind.MISUSE, "a bug of kvxfer's has ended it")
        return False

    def _check_asked(self, load: Load) -> None:
        """Have the producer of a load that has failed told that nobody comes, if no rank has asked it."""
        if load.unasked(self._ranks):
            self._schedule.unasked(load)

    def _tell(self, load: Load) -> None:
        """Tell, once, how a load has ended, and learn from it how fast its link is."""
        if load.over_at:
            return
        source, stages = load.transfer.source, load.stages
        if load.failure is not None:
            self._paces.failed(source)
        elif load.short is None and stages is not None:
            self._paces.delivered(source, load.end - load.start, stages.moving)
        self._stories.load_ended(load)
