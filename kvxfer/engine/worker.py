"""The side of one worker: a step's commands given to its agent, what has ended collected into reports."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from kvxfer import memory
from kvxfer.control.agent import Agent
from kvxfer.engine.exchange import Report, Step
from kvxfer.failures import Failure
from kvxfer.identity import TransferId
from kvxfer.protocol.values import Ended
from kvxfer.values import BlockTable

__all__ = ["WorkerSide"]


class WorkerSide:
    """One rank. All methods are called by the worker's own thread, and none blocks.

    Args:
        agent: the rank's agent, over its cache.
        table: turns the scheduler's block tables into those of the cache's blocks, where kernels use smaller ones.
        before_load: called with the cache's block table, ``start`` and ``tokens`` of each load before it begins: to clear
            what the load leaves as it is (``kvxfer.geometry.uncovered``), if the engine needs that.
        on_ended: called with the end of each load on this rank, for metrics.
        quarantine: a load that has failed is reported at once, while its blocks may still be written to, if all such
            blocks together are no more than this. The scheduler must have a pool to pin them in, and must not use them
            for the request again. 0: it is reported when its blocks are quiet.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        table: Callable[[BlockTable], BlockTable] | None = None,
        before_load: Callable[[BlockTable, int, int], None] | None = None,
        on_ended: Callable[[Ended], None] | None = None,
        quarantine: int = 0,
    ) -> None:
        self.agent, self._table, self._before_load, self._on_ended = agent, table, before_load, on_ended
        self._rank, self._device = agent.cache.rank, agent.cache.regions[0].device
        self._quarantine = quarantine
        self._report = Report(members={self._rank: agent.member})
        self._blocks: dict[str, int] = {}  # request -> how many of the scheduler's blocks its load fills
        self._failing: dict[str, Failure] = {}  # loads that ended badly and are not quiet yet
        self._early: set[str] = set()  # those of them that are reported

    def begin(self, step: Step) -> None:
        """Apply what must be known before this step's forward pass reuses a block: revocations, and other weights."""
        if step.facts is not None:
            self.agent.identify(step.facts)
        for revoke in step.commands.revokes:
            self.agent.revoke(revoke.transfer, revoke.generation, revoke.reason, revoke.gone)
        for transfer in step.renewals:
            self.agent.renew(transfer)

    def load(self, step: Step) -> None:
        """Begin this step's loads, and end those that are no longer wanted."""
        for fetch in step.commands.fetches:
            self._blocks[fetch.handle] = len(fetch.blocks.ids())
            blocks = self._own(fetch.blocks)
            if self._before_load is not None:
                self._before_load(blocks, fetch.start, fetch.tokens)
            self.agent.fetch(replace(fetch, blocks=blocks))
        for cancel in step.commands.cancels:
            self.agent.cancel(cancel.handle, cancel.reason)

    def after_forward(self, step: Step) -> None:
        """Offer what this step has computed, behind a fence on the device; once all its kernels are launched."""
        if step.commands.offers:
            fence = memory.fence(self._device)
            for offer in step.commands.offers:
                self.agent.offer(replace(offer, blocks=self._own(offer.blocks)), after=fence)

    def collect(self) -> Report:
        """Return what has ended since the last call; false if nothing has."""
        report, self._report = self._report, Report()
        for event in self.agent.events():
            if event.role == "producer":
                if not isinstance(event, Ended):
                    self._done(report, event.transfer, event.generation)
            elif isinstance(event, Ended):
                if self._on_ended is not None:
                    self._on_ended(event)
                if event.outcome.failure is None:
                    report.delivered.setdefault(event.handle, set()).add(event.generation)
                else:
                    self._failing[event.handle] = event.outcome.failure
            else:
                self._quiet(report, event.handle)
        for request in self._failing.keys() - self._early:
            self._give_up(report, request)
        return report

    def _own(self, table: BlockTable) -> BlockTable:
        return table if self._table is None else self._table(table)

    def _done(self, report: Report, transfer: TransferId, generation: int) -> None:
        """Nothing reads what was offered any more."""
        ranks = report.released.setdefault(transfer, {})
        ranks[self._rank] = max(generation, ranks.get(self._rank, -1))

    def _quiet(self, report: Report, request: str) -> None:
        """Nothing touches a load's blocks any more."""
        blocks = self._blocks.pop(request)
        if request in self._early:
            self._early.discard(request)
            self._quarantine += blocks
            report.quiet.setdefault(request, set()).add(self._rank)
        else:
            report.over.setdefault(request, set()).add(self._rank)
            if request in self._failing:
                report.failed[request] = self._failing[request]
        self._failing.pop(request, None)

    def _give_up(self, report: Report, request: str) -> None:
        """Report a failed load early if its blocks are pinned: it may take long to get quiet, and nobody need wait."""
        blocks = self._blocks[request]
        if blocks <= self._quarantine:
            self._quarantine -= blocks
            self._early.add(request)
            report.over.setdefault(request, set()).add(self._rank)
            report.failed[request] = self._failing[request]
            report.writing.setdefault(request, set()).add(self._rank)

    def close(self) -> bool:
        """Close the agent; whether all memory is quiet, as ``Agent.close`` has it."""
        return self.agent.close()

    def __len__(self) -> int:
        """Return how much is remembered of loads, and of what is still to be reported; 0 when there is nothing."""
        return len(self._blocks) + len(self._failing) + len(self._early) + bool(self._report)
