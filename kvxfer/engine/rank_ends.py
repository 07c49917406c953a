"""How loads and offers end on one rank: turns its agent's events into reports, and into results for the side channel."""

from __future__ import annotations

import time

from msgspec.structs import replace

from kvxfer.engine.exchange import Report
from kvxfer.engine.side_channel import RankResult
from kvxfer.failures import Failure, Outcome
from kvxfer.identity import Generation, RequestId, TransferId
from kvxfer.protocol.values import Ended, Event, GenerationReleased, Progress, Released
from kvxfer.values import Fetch, OfferEnd, Rank, Stages

__all__ = ["RankEnds"]


class RankEnds:
    """The ends of one rank's loads and offers. Not thread-safe.

    Attributes:
        report: What is reported next; the worker side adds what is not an end.
        aside: Whether results are collected for a side channel.
    """

    def __init__(self, rank: Rank, quarantine: int) -> None:
        self.report, self.aside = Report(), False
        self._rank, self._quarantine = rank, quarantine
        self._blocks: dict[RequestId, tuple[int, ...]] = {}  # request -> the scheduler's blocks that its load fills
        self._failing: dict[RequestId, Failure] = {}  # loads that ended badly and are not quiet yet
        self._early: set[RequestId] = set()  # those of them that are reported
        self._known: dict[RequestId, RankResult] = {}  # of loads under way, as far as they are known
        self._prefetches: set[RequestId] = set()  # those of them that are prefetches
        self._results: list[RankResult] = []
        self._ended: list[Ended] = []  # since the last ``collect``

    def begin(self, fetch: Fetch, number: int, prefetch: bool) -> None:
        """Expect the end of a load, with this number; ``fetch`` has the scheduler's blocks."""
        request = RequestId(fetch.handle)
        self._known[request] = RankResult(request, self._rank, number)
        if prefetch:
            self._prefetches.add(request)
        else:
            self._blocks[request] = fetch.blocks.ids()

    def number(self, request: RequestId) -> int | None:
        """Return the number of a load that is under way; None if none of this name is."""
        known = self._known.get(request)
        return None if known is None else known.number

    def refuse(self, fetch: Fetch, why: Failure) -> None:
        """End a load that the agent has refused."""
        stages = Stages(began=time.monotonic())  # and nobody has been asked
        self.take_in(Ended("consumer", fetch.transfer, fetch.handle, Outcome(why), 0, 0.0, stages=stages))
        self.take_in(Released("consumer", fetch.transfer, fetch.handle))

    def take_in(self, event: Event) -> None:
        """Process an event of the agent."""
        if event.role == "producer":
            if isinstance(event, Ended):
                self._ended.append(event)
                end = OfferEnd(event.outcome.failure, event.nbytes, time.monotonic())
                self.report.offers_ended.setdefault(event.transfer, {})[self._rank] = end
            if isinstance(event, Released) and event.generation is not None:
                self._offer_released(event.transfer, event.generation)
            if isinstance(event, GenerationReleased):
                self.report.revoked.setdefault(event.transfer, {})[self._rank] = event.generation
        elif isinstance(event, Ended):
            self._load_ended(event)
        elif isinstance(event, Released):
            self._load_released(RequestId(event.handle))
        elif isinstance(event, Progress) and (request := RequestId(event.handle)) not in self._prefetches:
            self.report.arrived.setdefault(request, {})[self._rank] = event.tokens

    @property
    def pending(self) -> bool:
        """Whether ``collect`` may have something to report."""
        return bool(self.report or self._failing.keys() - self._early)

    def collect(self) -> tuple[Report, list[Ended]]:
        """Return what is to be reported, and the ends of loads and offers since the last call."""
        for request in self._failing.keys() - self._early:
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
        loads = len(self._blocks) + len(self._prefetches) + len(self._failing) + len(self._early)
        return loads + len(self._known) + bool(self.report)

    def _offer_released(self, transfer: TransferId, generation: Generation) -> None:
        """Report that nothing reads what was offered any more."""
        ranks = self.report.released.setdefault(transfer, {})
        ranks[self._rank] = max(generation, ranks.get(self._rank, generation))

    def _load_ended(self, event: Ended) -> None:
        request, failure, report = RequestId(event.handle), event.outcome.failure, self.report
        self._ended.append(event)
        result = replace(self._known[request], generation=event.generation, failure=failure, stages=event.stages)
        self._known[request] = result
        if request in self._prefetches:
            self._prefetched(result)
            return
        report.stages.setdefault(request, {})[self._rank] = event.stages
        if failure is not None:
            self._failing[request] = failure
            self._say(result)
        else:
            if event.generation is not None:
                report.delivered.setdefault(request, set()).add(event.generation)
            if event.payload:
                report.payloads[request] = event.payload
            if event.short is not None:
                report.short[request] = event.short
            if event.payload or event.short is not None:  # which a RankResult cannot tell: only a step reports the end
                del self._known[request]
                self._say(result)

    def _load_released(self, request: RequestId) -> None:
        """Report that nothing touches a load's blocks any more."""
        ended = self._known.pop(request, None)
        result = None if ended is None else replace(ended, quiet=True)
        if request in self._prefetches and result is not None:
            self._prefetches.remove(request)
            self._prefetched(result)
            return
        if result is not None and result.failure is None:
            self._say(result)
        blocks = self._blocks.pop(request)
        failure = self._failing.pop(request, None)
        if request in self._early:
            self._early.discard(request)
            self._quarantine += len(blocks)
            self.report.quiet.setdefault(request, set()).add(self._rank)
        else:
            self._report_end(request, blocks, failure)

    def _prefetched(self, result: RankResult) -> None:
        self._say(result)
        self.report.prefetched[result.handle, self._rank] = result

    def _say(self, result: RankResult) -> None:
        if self.aside:
            self._results.append(result)

    def _report_end(self, request: RequestId, blocks: tuple[int, ...], failure: Failure | None) -> None:
        self.report.over.setdefault(request, set()).add(self._rank)
        if failure is not None:
            self.report.failed[request] = failure
            self.report.invalid.update(blocks)

    def _give_up(self, request: RequestId) -> None:
        """Report a failed load before its blocks are quiet, which may take long, if they fit into the quarantine."""
        blocks = self._blocks[request]
        if len(blocks) <= self._quarantine:
            self._quarantine -= len(blocks)
            self._early.add(request)
            self._report_end(request, blocks, self._failing[request])
            self.report.writing.setdefault(request, set()).add(self._rank)
