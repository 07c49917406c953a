"""The side of an engine's scheduler: its requests followed, its directory served, its workers told and heard."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.engine.exchange import Report, Step
from kvxfer.engine.loading import LoadingBlocks
from kvxfer.engine.offered import OfferedBlocks
from kvxfer.engine.pins import BlockPins
from kvxfer.failures import Failure, FailureKind
from kvxfer.identity import Source, TransferId, new_epoch
from kvxfer.protocol.messages import Decline, Named, RankDescriptor, Renew
from kvxfer.schedule import RankAgreement, Schedule, ScheduleError
from kvxfer.security import Security
from kvxfer.values import BlockTable, Group, Rank

__all__ = ["SchedulerSide", "Ticket", "Update"]

log = logging.getLogger("kvxfer.engine")


class Ticket(msgspec.Struct, frozen=True):
    """What whoever routes a request must tell its consumer.

    Attributes:
        transfer: the name of what is offered.
        digest: what its KV depends on.
        source: the directory of the engine that offers it.
    """

    transfer: TransferId
    digest: bytes
    source: Source


@dataclass(frozen=True)
class Update:
    """What a report means to the engine.

    Attributes:
        free: finished requests whose blocks are now to be freed.
        loaded: requests whose load has come on all ranks: their tokens are there.
        failed: requests whose load is over without that, and why. The engine computes the tokens, or fails the request, by
            its policy. If it holds the request no more, it may free the blocks.
        disagreed: those of the failed of which every rank by itself was delivered what it wanted, and the blocks of their
            loads.
    """

    free: frozenset[str] = frozenset()
    loaded: frozenset[str] = frozenset()
    failed: Mapping[str, Failure] = field(default_factory=dict)
    disagreed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class SchedulerSide:
    """One engine's transfers, as its scheduler sees them.

    One per engine, called by one thread; no method blocks save ``close``. The directory has a thread of its own. Calls
    about a request that neither offers nor loads do nothing, so an engine may pass on all that it hears. Raises
    ``OSError`` if the directory's address cannot be had.

    Args:
        config: the engine's settings.
        engine: its name, for logs of others.
        groups: its KV-cache groups, in the order of its block tables.
        ranks: how many workers it has.
        facts: what all its KV depends on (``kvxfer.facts``); its agents must state the same.
        pins: keeps blocks that the engine gives up; without one, nothing is kept, and peers that read too late fail.

    Attributes:
        source: where other engines find this one.
        directory: what they find there.
        facts: as stated last.
    """

    def __init__(
        self,
        config: Config,
        engine: str,
        groups: Sequence[Group],
        ranks: int,
        facts: Mapping[str, str],
        *,
        pins: BlockPins | None = None,
    ) -> None:
        self._lease, self._ranks = config.lease, ranks
        self.facts = dict(facts)
        self._news: dict[str, str] | None = self.facts  # what the workers have not heard of yet
        security = Security.of(config)
        self.directory = Directory(
            engine, new_epoch(), config.listen, config.port, config.advertise, security=security, facts=self.facts
        )
        self.source = self.directory.source
        self._pins = BlockPins(0) if pins is None else pins
        self._schedule = Schedule(groups, self.source if ranks > 1 else None)
        self._offered = OfferedBlocks(self._schedule.producer, self._pins, groups, ranks)
        self._loading = LoadingBlocks(self._schedule.consumer, self._pins, ranks)
        self._agreement = RankAgreement()
        self._offers: dict[str, TransferId] = {}  # request -> what it offers
        self._loads: dict[str, int] = {}  # requests that may load -> local tokens when they were asked about last
        self._failed: dict[str, Failure] = {}  # loads that have, on some rank
        self._members: dict[Rank, RankDescriptor] = {}
        self._renewed = 0.0

    # --- requests --------------------------------------------------------------------------------------------------

    def offer(self, request: str, transfer: TransferId, digest: bytes, tokens: int) -> bool:
        """Offer the first ``tokens`` tokens of this request's prompt to others, as they are computed.

        Returns False if there is nothing to offer, or another request offers this transfer already (a sibling of n > 1,
        say). Raises ``ScheduleError`` if this one offers another.
        """
        taken = self._schedule.producer.arrive(request, transfer, digest, tokens)
        if taken:
            self._offers[request] = transfer
        return taken

    def load(self, request: str, transfer: TransferId, digest: bytes, source: Source, tokens: int) -> bool:
        """Take the first ``tokens`` tokens of this request's prompt from another engine, as far as they are not here.

        From now on the producer's lease is renewed. Leave at least the last token of a prompt to be computed here.
        Requests of one transfer (children of n > 1) share it: one loads, the others find the blocks in the prefix cache.

        Returns False if the transfer is in use for other content or from another source, or was given up just now: the
        request is computed here. Raises ``ScheduleError`` if it loads another.
        """
        taken = self._schedule.consumer.arrive(request, transfer, digest, source, tokens)
        if taken:
            self._loads.setdefault(request, 0)
        return taken

    def ticket(self, request: str) -> Ticket | None:
        """Return what a consumer of this request's offer must be told; None if it offers nothing, or no more."""
        transfer = self._offers.get(request)
        digest = None if transfer is None else self._schedule.producer.digest(transfer)
        return None if transfer is None or digest is None else Ticket(transfer, digest, self.source)

    def loadable(self, request: str, computed: int) -> int | None:
        """Return how many tokens behind the ``computed`` local ones can come from outside.

        0: none, for good. None: a sibling is loading them; ask again in the next step. Changes nothing, and may be asked
        as often as the engine likes.
        """
        if request not in self._loads:
            return 0
        self._loads[request] = computed
        return self._schedule.consumer.matched(request, computed)

    def allocated(self, request: str, table: BlockTable, external: int) -> None:
        """Take in that the engine admits the request, and counts on ``external`` tokens from outside.

        With some, the load begins with the next step, and ends in a ``report``; until then the request must not run and
        its blocks must not be freed. Without any, an untouched transfer is given up.

        Args:
            request: the engine's id of it.
            table: the whole block table. Blocks of local tokens are not touched.
            external: what ``loadable`` said last, or less if no group is a ``state``.

        Raises:
            ScheduleError: tokens that ``loadable`` would not promise, or no blocks for them. The load has failed: none
                of them will come.
        """
        if request not in self._loads:
            return
        try:
            self._schedule.consumer.allocated(request, table, self._loads[request], external)
        except ScheduleError as error:
            self._schedule.consumer.finish(request, f"the consumer cannot load it: {error}")
            raise

    def follows(self, request: str) -> bool:
        """Whether ``runs`` matters for this request, so that the table of any other need not be fetched."""
        return request in self._schedule.producer

    def runs(self, request: str, computed: int, scheduled: int, table: BlockTable) -> None:
        """Take in that the request runs in this step.

        Args:
            request: the engine's id of it.
            computed: tokens computed before this step, prefix-cache hits and loads included.
            scheduled: tokens that this step computes.
            table: the whole block table as this step uses it; never an increment.
        """
        if request in self._schedule.producer:
            self._offered.runs(request, computed, scheduled, table)

    def preempted(self, request: str) -> None:
        """Take in that the engine takes the request's blocks away; before the ``runs`` calls of the same step."""
        self._schedule.preempt(request)
        self._offered.preempted(request)

    def finished(self, request: str, table: BlockTable, complete: bool) -> bool:
        """Take in that the request is over, at whatever point.

        Args:
            request: the engine's id of it.
            table: the whole block table at its end.
            complete: it ended normally and its KV is good; False for an abort or an error.

        Returns:
            True if the engine must keep the blocks until a ``report`` names the request as ``free``. A load under way
            keeps them as well, until the ``report`` of its end.
        """
        self._loads.pop(request, None)
        self._schedule.consumer.finish(request)
        transfer = self._offers.pop(request, None)
        return self._offered.finished(request, transfer, table, complete, found=bool(self._members))

    def freed(self, request: str) -> None:
        """Take in that the engine frees the blocks of a held request on another's word than ours."""
        self._offered.freed(request)

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """Return what the workers must know with this step; once a step, after what happens in it has been said."""
        renewals = self._notices()
        for decline in self._schedule.consumer.declines():
            named = Named(decline.transfer, decline.digest)
            self.directory.tell(decline.source, Decline(decline.source.epoch, (named,), decline.reason))
        self._renew()
        commands = self._schedule.commands()
        for fetch in commands.fetches:
            self._loading.begins(fetch.handle, fetch.blocks.ids())
        self._offered.shipped(commands)
        news, self._news = self._news, None
        return Step(commands, renewals, news)

    def report(self, report: Report) -> Update:
        """Take in what workers have reported, of one rank or merged of several, and return what it means."""
        if report.members:
            self.announce(report.members.values())
        for request, generations in report.delivered.items():
            self._agreement.delivered(request, generations)
        for request, ranks in report.writing.items():
            self._loading.writing(request, ranks)
        for request, ranks in report.quiet.items():
            self._loading.quiet(request, ranks)
        for request, failure in report.failed.items():
            if request in self._loading:
                self._failed.setdefault(request, failure)
        free = {self._offered.released(transfer, ranks) for transfer, ranks in report.released.items()}
        over = [request for request, ranks in report.over.items() if self._loading.over_on(request, ranks)]
        return self._ended(over, frozenset(request for request in free if request is not None))

    def load_over(self, request: str) -> None:
        """Take in from elsewhere that a load is over on all ranks; nothing if a ``report`` has said so."""
        self._ended([request], frozenset())

    def _ended(self, requests: Iterable[str], free: frozenset[str]) -> Update:
        """Return what has become of loads that all ranks have reported."""
        loaded, failed, disagreed = set(), {}, {}
        for request in requests:
            generations, failure = self._agreement.over(request), self._failed.pop(request, None)
            if failure is None and len(generations) > 1:
                named = " and ".join(map(str, generations))
                detail = f"the producer computed it anew meanwhile, and our ranks hold generations {named}"
                failure = Failure(FailureKind.REVOKED, detail)
                disagreed[request] = self._loading.blocks(request)
                log.warning("request %s cannot use what was loaded: %s", request, failure)
            if failure is None:
                loaded.add(request)
            else:
                failed[request] = failure
            self._loading.over(request)
        return Update(free, frozenset(loaded), failed, disagreed)

    def _notices(self) -> tuple[TransferId, ...]:
        """Take in what consumers' scheduler sides have told our directory; return the transfers to renew."""
        renewals: list[TransferId] = []
        for notice in self.directory.notices():
            for named in notice.transfers:
                if not self._schedule.producer.offers(named.transfer, named.digest):
                    continue  # over, or somebody guessed its name
                if isinstance(notice, Renew):
                    renewals.append(named.transfer)
                else:
                    self._schedule.producer.withdraw(named.transfer, notice.reason)
        return tuple(renewals)

    def _renew(self) -> None:
        """Keep alive what requests of ours still wait for, from their arrival on."""
        now = time.monotonic()
        if now - self._renewed < self._lease / 4:
            return
        self._renewed = now
        by_source: dict[Source, list[Named]] = {}
        for transfer, (content, source) in self._schedule.consumer.waiting.items():
            by_source.setdefault(source, []).append(Named(transfer, content))
        for source, named in by_source.items():
            self.directory.tell(source, Renew(source.epoch, tuple(named)))

    @property
    def waiting(self) -> bool:
        """Whether blocks are pinned of which the engine knows no request.

        It must go on making steps then, or it will not hear that they are free.
        """
        return self._offered.waiting or self._loading.waiting

    # --- life ------------------------------------------------------------------------------------------------------

    def announce(self, members: Iterable[RankDescriptor]) -> None:
        """Take in where workers' agents listen; once all have been said, other engines find this one.

        Their first reports say it, too.
        """
        self._members |= {member.cache.rank: member for member in members}
        if len(self._members) == self._ranks:
            self.directory.publish(tuple(self._members.values()))

    def withdraw_all(self, reason: str) -> bool:
        """End all offers and loads, since the KV cache is being dropped; True once no block of the pool is in use.

        If False, the workers have to hear of it first: go on making steps, and call it again.
        """
        for transfer in self._schedule.producer.transfers:
            self._schedule.producer.withdraw(transfer, reason)
        for request in self._loads:
            self._schedule.consumer.finish(request, reason)
        return self._pins.pool_unused

    def identify(self, facts: Mapping[str, str]) -> None:
        """State what all KV of the engine depends on from now on; after ``withdraw_all``, when weights have changed."""
        self.facts = self._news = dict(facts)
        self.directory.identify(self.facts)

    def close(self) -> None:
        """Stop serving the directory. Any number of times."""
        self.directory.close()

    def __len__(self) -> int:
        """Return how much is remembered of requests and transfers; 0 when there are none."""
        sides = len(self._schedule) + len(self._offered) + len(self._loading) + len(self._pins) + len(self._agreement)
        return sides + len(self._offers) + len(self._loads) + len(self._failed)
