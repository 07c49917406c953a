"""How loads end: the reports of all ranks, joined into what the engine is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

from kvxfer.engine.exchange import Report
from kvxfer.engine.loading import LoadingBlocks
from kvxfer.engine.paces import LinkPaces
from kvxfer.engine.side_channel import RankResult
from kvxfer.engine.trace import Trace
from kvxfer.failures import Failure, FailureKind
from kvxfer.identity import Source
from kvxfer.logs import logger
from kvxfer.protocol.values import Stages
from kvxfer.schedule import RankAgreement
from kvxfer.text import printable
from kvxfer.values import Rank

__all__ = ["LoadEnds", "Update"]

log = logger("kvxfer.engine")


@dataclass(frozen=True)
class Update:
    """What a report means to the engine.

    Attributes:
        free: Finished requests whose blocks are now to be freed.
        loaded: Requests whose load was delivered on all ranks: the tokens are in their blocks.
        arrived: For loads that report progress, how many tokens of the prompt all ranks have so far. They are of use only
            once the request is loaded.
        failed: Requests whose load has failed, and why. The engine computes the tokens or fails the request, as its
            policy says. If it no longer holds the request, it may free the blocks.
        disagreed: Those of the failed requests whose load was delivered on every rank, but of different generations, and
            the blocks of the load.
        payloads: For loaded requests, what the producer sent along (``WorkerSide.after_forward``), if anything.
        short: For loaded requests that were delivered only in part since the producer gave up (``SchedulerSide.load``,
            ``enough``): up to which token. The engine computes the rest.

    ``disagreed`` and ``short`` come once steps have told of every rank, ``loaded`` otherwise as soon as the side channel has.
    """

    free: frozenset[str] = frozenset()
    loaded: frozenset[str] = frozenset()
    failed: Mapping[str, Failure] = field(default_factory=dict)
    arrived: Mapping[str, int] = field(default_factory=dict)
    disagreed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    payloads: Mapping[str, bytes] = field(default_factory=dict)
    short: Mapping[str, int] = field(default_factory=dict)


class LoadEnds:
    """Joins what the ranks of one engine report of its loads."""

    def __init__(self, loading: LoadingBlocks, ranks: int, paces: LinkPaces, trace: Trace) -> None:
        self._loading, self._ranks, self._paces, self._trace = loading, ranks, paces, trace
        self._agreement = RankAgreement()
        self._under_way: dict[str, tuple[Source, int]] = {}  # loads beside the steps: from where, and how many tokens
        self._failed: dict[str, Failure] = {}  # loads that have failed on some rank
        self._arrived: dict[str, dict[Rank, int]] = {}  # of loads under way, the tokens that each rank has
        self._payloads: dict[str, bytes] = {}  # of loads that some rank has
        self._short: dict[str, int] = {}  # of those, the token up to which one was delivered, if not whole
        # When each stage was reached, of loads that have ended on some rank.
        self._stages: dict[str, dict[Rank, Stages]] = {}
        self._early: list[str] = []  # loads that the side channel has reported as delivered

    def begins(self, request: str, source: Source, tokens: int) -> None:
        """Record that a load begins beside the steps."""
        self._under_way[request] = source, tokens

    def came(self, result: RankResult) -> None:
        """Record that a load beside the steps was delivered on one rank, which a step will report once more."""
        request = result.handle
        if result.generation is not None:
            self._agreement.delivered(request, (result.generation,))
        self._reached(request, {result.rank: result.stages})
        if self._loading.over_on(request, (result.rank,)) and self._whole(request):
            self._early.append(request)

    def report(self, report: Report) -> Update:
        """Process what ranks report, and return what has become of the loads that are over on all of them."""
        early, self._early = self._early, []
        for request, generations in report.delivered.items():
            if request in self._loading:
                self._agreement.delivered(request, generations)
        for request, payload in report.payloads.items():
            if request in self._loading:
                self._payloads.setdefault(request, payload)
        for request, tokens in report.short.items():
            if request in self._loading:
                self._short[request] = min(tokens, self._short.get(request, tokens))
        for request, ranks in report.writing.items():
            self._loading.writing(request, ranks)
        quiet = [request for request, ranks in report.quiet.items() if self._loading.quiet(request, ranks)]
        for request, failure in report.failed.items():
            if request in self._loading:
                self._failed.setdefault(request, failure)
        over = [request for request, ranks in report.over.items() if self._loading.over_on(request, ranks)]
        for request, stages in report.stages.items():
            if request in self._loading:
                self._reached(request, stages)
        for request, ranks in report.over.items():
            self._loading.said(request, ranks)
        over = [request for request in over if self._may_end(request)]
        update = self._ended(dict.fromkeys([*early, *quiet, *over]))
        return replace(update, arrived=self._progress(report.arrived))

    def over_elsewhere(self, request: str) -> None:
        """Record without a report that a load is over on all ranks; does nothing if a report has said so."""
        self._loading.all_said(request)
        self._ended([request])

    def _may_end(self, request: str) -> bool:
        """Return whether a load that is over on all ranks may be reported as such.

        What only we know to be wrong with it, the engine must not hear of before the last step has told of its ranks: an engine that
        counts the ranks itself would take the load for whole after that.
        """
        return request in self._failed or self._whole(request) or self._loading.all_said_of(request)

    def _whole(self, request: str) -> bool:
        """Return whether all that is known of a load was delivered whole, and is of one generation."""
        return self._agreement.agreed(request) and request not in self._short

    def _reached(self, request: str, stages: Mapping[Rank, Stages]) -> None:
        self._stages.setdefault(request, {}).update(stages)

    def _ended(self, requests: Iterable[str]) -> Update:
        """Return how the loads ended that all ranks have reported."""
        loaded, failed, disagreed, payloads, shorter = set(), {}, {}, {}, {}
        for request in requests:
            generations, failure = self._agreement.over(request), self._failed.pop(request, None)
            if failure is None and len(generations) > 1:
                named = " and ".join(map(str, generations))
                detail = f"the producer recomputed it meanwhile, and the ranks here hold different generations: {named}"
                failure = Failure(FailureKind.REVOKED, detail)
                disagreed[request] = self._loading.blocks(request)
                log.warning("request %s cannot use what it loaded: %s", printable(request), failure)
            source, tokens = self._under_way.pop(request, (None, 0))
            reached = self._stages.pop(request, {})
            stages = reduce(Stages.slowest, reached.values()) if reached else None
            payload, short = self._payloads.pop(request, b""), self._short.pop(request, None)
            if failure is None:
                loaded.add(request)
                if payload:
                    payloads[request] = payload
                if short is not None:
                    shorter[request] = short
                    what = "request %s was loaded up to token %d, where its producer gave up"
                    log.warning(what, printable(request), short)
            else:
                failed[request] = failure
                if len(reached) == self._ranks and all(x.unasked for x in reached.values()):
                    self._loading.unasked(request)
            if source is not None and failure is not None:
                self._paces.failed(source)
            elif source is not None and stages is not None and short is None:
                self._paces.delivered(source, tokens, stages.moving)
            if source is not None:
                self._trace.seen(request, failure, stages)
            self._loading.over(request)
            self._arrived.pop(request, None)
        return Update(frozenset(), frozenset(loaded), failed, disagreed=disagreed, payloads=payloads, short=shorter)

    def _progress(self, arrived: Mapping[str, Mapping[Rank, int]]) -> dict[str, int]:
        """Return how many tokens all ranks have of those loads that have made progress."""
        out = {}
        for request, ranks in arrived.items():
            if request in self._loading:
                known = self._arrived.setdefault(request, {})
                known |= ranks
                if len(known) == self._ranks:
                    out[request] = min(known.values())
        return out

    def __len__(self) -> int:
        """Return how much is remembered; 0 when no load is under way."""
        told = len(self._failed) + len(self._arrived) + len(self._payloads) + len(self._short)
        return len(self._agreement) + len(self._under_way) + told
