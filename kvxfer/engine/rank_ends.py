"""How loads and offers end on one rank: turns its agent's events into reports, and into results for the side channel."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from kvxfer import clock
from kvxfer.engine.exchange import Report
from kvxfer.failures import Failure, Outcome
from kvxfer.identity import Generation, Handle, RequestId, TransferId
from kvxfer.protocol.values import Ended, Event, GenerationReleased, Released
from kvxfer.schedule import RankResult
from kvxfer.values import Fetch, OfferEnd, Rank, Stages


@dataclass(slots=True, eq=False)
class _RankLoad:
    """A load that is under way on this rank, until nothing touches its blocks any more."""

    result: RankResult  # how it has ended, as far as is known
    blocks: int  # how many of the scheduler's blocks it fills
    lent: bool  # whether they are lent
    quarantined: bool = False  # whether it is reported although they may still be written to


class RankEnds:
    """The ends of one rank's loads and offers. Not thread-safe.

    Attributes:
        report: What is reported next; the worker side adds what is not an end.
        aside: Whether results are collected for a side channel.
    """

    def __init__(self, rank: Rank, quarantine: int) -> None:
        self.report, self.aside = Report(), False
        self._rank, self._quarantine = rank, quarantine
        self._loads: dict[RequestId, _RankLoad] = {}
        self._failing: dict[RequestId, _RankLoad] = {}  # those that have failed, are not quiet, and are not reported
        self._results: list[RankResult] = []
        self._ended: list[Ended] = []  # since the last ``collect``

    def begin(self, fetch: Fetch) -> None:
        """Expect the end of a load; ``fetch`` has the scheduler's blocks."""
        result = RankResult(RequestId(fetch.handle), self._rank, fetch.number or 0)
        self._loads[result.handle] = _RankLoad(result, len(fetch.blocks.ids()), fetch.lent)

    def handles(self) -> dict[int, Handle]:
        """Return the names of the loads that are under way, by number."""
        found = (load.result for load in self._loads.values())
        return {one.number: Handle(one.handle) for one in found if one.short is None}

    def refuse(self, fetch: Fetch, why: Failure) -> None:
        """End a load that the agent has refused."""
        stages = Stages(began=clock.now())  # and nobody has been asked
        self.take_in(Ended("consumer", fetch.transfer, fetch.handle, Outcome(why), 0, 0.0, stages=stages))
        self.take_in(Released("consumer", fetch.transfer, fetch.handle))

    def take_in(self, event: Event) -> None:
        """Process an event of the agent."""
        if event.role == "producer":
            if isinstance(event, Ended):
                self._ended.append(event)
                end = OfferEnd(event.outcome.failure, event.nbytes, clock.now())
                self.report.offers_ended.setdefault(event.transfer, {})[self._rank] = end
            if isinstance(event, Released) and event.generation is not None:
                self._offer_released(event.transfer, event.generation)
            if isinstance(event, GenerationReleased):
                self.report.revoked.setdefault(event.transfer, {})[self._rank] = event.generation
        elif isinstance(event, Ended):
            self._load_ended(event)
        elif isinstance(event, Released):
            self._load_released(RequestId(event.handle))

    @property
    def pending(self) -> bool:
        """Whether ``collect`` may have something to report."""
        return bool(self.report or self._failing)

    def collect(self) -> tuple[Report, list[Ended]]:
        """Return what is to be reported, and the ends of loads and offers since the last call."""
        for request in list(self._failing):
            self._give_up(request)
        report, self.report = self.report, Report()
        ended, self._ended = self._ended, []
        return report, ended

    def results(self) -> list[RankResult]:
        """Return the results since the last call."""
        results, self._results = self._results, []
        return results

    def __len__(self) -> int:
        """Return how much is remembered of loads, and of what is still to be reported; 0 when there is nothing."""
        return len(self._loads) + bool(self.report)

    def _offer_released(self, transfer: TransferId, generation: Generation) -> None:
        """Report that nothing reads what was offered any more."""
        ranks = self.report.released.setdefault(transfer, {})
        ranks[self._rank] = max(generation, ranks.get(self._rank, generation))

    def _load_ended(self, event: Ended) -> None:
        request, failure = RequestId(event.handle), event.outcome.failure
        self._ended.append(event)
        if (load := self._loads.get(request)) is None:
            return  # no load of the scheduler's: the engine has fetched it with the agent
        load.result = replace(
            load.result, generation=event.generation, failure=failure, stages=event.stages, short=event.short
        )
        if load.lent:
            self._report(load.result)
        elif failure is not None:
            self._failing[request] = load
        if load.lent or failure is not None or event.short is not None:
            self._say(load.result)

    def _load_released(self, request: RequestId) -> None:
        """Report that nothing touches a load's blocks any more."""
        if (load := self._loads.pop(request, None)) is None:
            return
        self._failing.pop(request, None)
        result = replace(load.result, quiet=True)
        if load.lent or (result.failure is None and result.short is None):
            self._say(result)
        if load.quarantined:
            self._quarantine += load.blocks
        self._report(result)

    def _say(self, result: RankResult) -> None:
        if self.aside:
            self._results.append(result)

    def _report(self, result: RankResult) -> None:
        self.report.results[result.number, result.rank] = result

    def _give_up(self, request: RequestId) -> None:
        """Report a failed load before its blocks are quiet, which may take long, if they fit into the quarantine."""
        load = self._failing[request]
        if load.blocks <= self._quarantine:
            self._quarantine -= load.blocks
            del self._failing[request]
            self._report(load.result)
            load.quarantined = True
