"""The side of an engine's scheduler: its requests followed, its directory served, its workers told and heard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from kvxfer import arguments
from kvxfer import facts as f
from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.engine.dispatch import Dispatch
from kvxfer.engine.exchange import Report, Step
from kvxfer.engine.load_ends import Update
from kvxfer.engine.loads import Loads
from kvxfer.engine.notices import Notices
from kvxfer.engine.offered import OfferedBlocks
from kvxfer.engine.offers import Offers
from kvxfer.engine.pins import BlockPins
from kvxfer.engine.side_channel import ChannelAddress
from kvxfer.engine.standstill import Standstill
from kvxfer.engine.trace import Trace
from kvxfer.errors import ClosedError
from kvxfer.geometry.tables import TableCheck
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.messages import RankDescriptor
from kvxfer.schedule import Schedule
from kvxfer.ticket import Ticket
from kvxfer.values import MOST_CONSUMERS, MOST_DIGEST, MOST_REASON, MOST_TOKENS, BlockTable, Group, Rank

__all__ = ["SchedulerSide"]

MOST_RANKS = 1 << 16

_COUNTS = ("tokens", "computed", "scheduled", "external", "progress", "enough")
_FLAGS = ("begun", "offered", "good", "complete", "stops", "whether")
_held = arguments.holding(
    config=partial(arguments.instance, kind=Config),
    ranks=partial(arguments.integer, least=1, most=MOST_RANKS),
    request=partial(arguments.instance, kind=str),  # of any length: an engine may pass on all that it hears
    transfer=partial(arguments.instance, kind=TransferId),
    digest=partial(arguments.octets, most=MOST_DIGEST),
    source=partial(arguments.instance, kind=Source),
    consumers=partial(arguments.integer, least=1, most=MOST_CONSUMERS),
    report=partial(arguments.instance, kind=Report),
    descriptors=partial(arguments.several, kind=RankDescriptor),
    reason=partial(arguments.string, most=MOST_REASON, empty=True),
    **dict.fromkeys(_COUNTS, partial(arguments.integer, least=0, most=MOST_TOKENS)),
    **dict.fromkeys(_FLAGS, arguments.flag),
)


class SchedulerSide:
    """One engine's transfers, as its scheduler sees them.

    One per engine, called by one thread; no method blocks save ``close``. The directory has a thread of its own. Calls
    about a request that neither offers nor loads do nothing, so an engine may pass on all that it hears.

    A wrong argument is answered by its call, which then does nothing.

    Args:
        config: The engine's settings.
        engine: Its name, for logs of others.
        groups: Its KV-cache groups, in the order of its block tables.
        ranks: How many workers it has.
        facts: What all its KV depends on (``kvxfer.facts``); its agents must state the same.
        pins: Keeps blocks that the engine gives up; without one, nothing is kept, and peers that read too late fail.

    Attributes:
        source: Where other engines find this one.
        directory: What they find there.
        facts: As stated last.

    Raises:
        ArgumentError: An argument is of the wrong type or range.
        ConfigError: The facts are too many or too long.
        OSError: The directory's address cannot be had.
    """

    @_held
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
        groups = arguments.several("groups", groups, Group, 1)
        if pins is not None:
            arguments.instance("pins", pins, BlockPins)
        self._ranks = ranks
        self.facts = f.check(facts)
        self._tables = TableCheck(groups)
        self._closed = False
        self.directory = Directory(config, engine, self.facts)
        self.source = self.directory.source
        self._pins = BlockPins(0) if pins is None else pins
        own = self.source if ranks > 1 else None
        self._schedule = Schedule(groups, own)
        self._dispatch = Dispatch(self._schedule, own, ranks, self.facts)
        self._notices = Notices(config, self.directory, self._schedule)
        self._offered = OfferedBlocks(self._schedule.producer, self._pins, groups, ranks)
        self._offers = Offers(self._schedule.producer, self._offered, self._tables, self._notices)
        self._descriptors: dict[Rank, RankDescriptor] = {}
        trace = Trace(config.trace, engine)
        self._loads = Loads(
            config, self._schedule.consumer, self._pins, self._tables, ranks, self._dispatch, self._notices, trace
        )
        self._standstill = Standstill(self._offered.held, self._schedule.producer.withdraw)

    # --- requests --------------------------------------------------------------------------------------------------

    @_held
    def offer(
        self, request: str, transfer: TransferId, digest: bytes, tokens: int, *, consumers: int = 1, stops: bool = False
    ) -> bool:
        """Offer the first ``tokens`` tokens of this request's prompt to others, as they are computed.

        The offer stands until ``consumers`` engines have fetched it or given it up, or its lease ends. What becomes of one
        consumer means nothing for the others.

        Args:
            request: The engine's id of it.
            transfer: The name under which consumers fetch it.
            digest: What its KV depends on.
            tokens: How many.
            consumers: How many engines are to fetch it. Requests of one engine share one load, and count as one.
            stops: Nothing is computed for the request behind these tokens. A recurrent state is then offered with the step
                that completes them, and otherwise once the request has finished.

        Returns:
            Whether it is offered. It is not if there is nothing to offer, or if another request offers this transfer already
            (a sibling of n > 1, say).

        Raises:
            ArgumentError: An argument is of the wrong type or range.
            ClosedError: This side has been closed.
            ScheduleError: The request offers another transfer.
        """
        self._check_open("offer")
        arguments.string("request", request)
        return self._offers.arrive(request, transfer, digest, tokens, consumers, stops)

    @_held
    def load(
        self,
        request: str,
        transfer: TransferId,
        digest: bytes,
        source: Source,
        tokens: int,
        *,
        begun: bool = True,
        offered: bool = False,
        progress: int = 0,
        enough: int = 0,
    ) -> bool:
        """Take the first ``tokens`` tokens of this request's prompt from another engine, as far as they are not here.

        From now on the producer's lease is renewed. Leave the last token of a prompt to be computed here, unless the producer
        sends along what it has sampled behind it (``Update.payloads``).
        Requests of one transfer (children of n > 1) share it: one loads, the others find the blocks in the prefix cache.
        A ``report`` says how far it is each time that ``progress`` more tokens are here; 0: never.

        Args:
            request: The engine's id of it.
            transfer: The name of what is loaded.
            digest: What its KV depends on.
            source: The directory of the engine that offers it.
            tokens: How many.
            begun: Whether the producer may be taken to have begun. If not, it is asked, and ``loadable`` says None until it
                has, for ``start_timeout`` at the most.
            offered: Whether the producer is known to have offered all of them, as when it has answered its request. If it
                does not know them any more, the load fails within about a second, not at its deadline.
            progress: How many more tokens are news.
            enough: How many tokens are of use, should the producer give up before it has computed all (``Update.short``). 0: all
                or none. At most ``tokens``. Only where all groups are ``full``.

        Returns:
            Whether it may load. It may not if the transfer is in use for other content or from another source, or was given
            up just now; then the request is computed here.

        Raises:
            ArgumentError: An argument is of the wrong type or range.
            ClosedError: This side has been closed.
            ScheduleError: The request loads another transfer.
        """
        self._check_open("load")
        arguments.string("request", request)
        arguments.integer("enough", enough, 0, tokens)
        return self._loads.arrive(request, transfer, digest, source, tokens, begun, offered, progress, enough)

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise ClosedError(f"this scheduler side has been closed: call {call!r} before that, or make another")

    @_held
    def prefetch(self, request: str, computed: int) -> None:
        """Begin a short load before the request has blocks, so that it may run in the step that admits it.

        Call it when the request has arrived; ``loadable`` calls it as well. It does nothing for a load that is not short: see
        ``Config.step_budget``.

        Args:
            request: The engine's id of it.
            computed: Local tokens that it will find, as far as is known.
        """
        self._loads.prefetch(request, computed)

    @_held
    def ticket(self, request: str) -> Ticket | None:
        """Return what a consumer of this request's offer must be told; None if it offers nothing, or no more."""
        return self._offers.ticket(request, self.source)

    @_held
    def loadable(self, request: str, computed: int) -> int | None:
        """Return how many tokens behind the ``computed`` local ones can come from outside.

        It may be asked as often as the engine likes. Blocks of the local tokens must be in use, or ``prefetch`` must have been called
        before they were looked up: unused blocks may be lent to this load.

        Returns:
            The number of tokens. 0: none can, now or later. None: not known yet, since a sibling is loading them, a prefetch
            is on its way, or the producer has not begun; ask again in the next step.
        """
        return self._loads.loadable(request, computed)

    def here(self, request: str) -> bool:
        """Return whether what ``loadable`` has promised is here.

        If it is, the request runs in this step, whose workers copy it first. If not, its load begins with this step.
        """
        return self._loads.here(request)

    @_held
    def allocated(self, request: str, table: BlockTable, external: int) -> None:
        """Take in that the engine admits the request, and counts on ``external`` tokens from outside.

        With some, the load begins with the next step, and ends in a ``report``; until then the request must not run and
        its blocks must not be freed. Without any, an untouched transfer is given up.

        Args:
            request: The engine's id of it.
            table: The whole block table. Blocks of local tokens are not touched.
            external: What ``loadable`` said last, or less if no group is a ``state``.

        Raises:
            ScheduleError: Tokens that ``loadable`` would not promise, or no blocks for them. The load has failed: none
                of them will come.
            ArgumentError: A block table that is none of this engine's. The load has failed as well.
        """
        self._loads.allocated(request, table, external)

    def follows(self, request: str) -> bool:
        """Return whether ``runs`` matters for this request: of no other need the engine look its block table up."""
        return request in self._schedule.producer

    @_held
    def runs(self, request: str, computed: int, scheduled: int, table: BlockTable) -> None:
        """Take in that the request runs in this step.

        Args:
            request: The engine's id of it.
            computed: Tokens computed before this step, prefix-cache hits and loads included.
            scheduled: Tokens that this step computes.
            table: The whole block table as this step uses it; never an increment.

        Raises:
            ArgumentError: A block table that is none of this engine's, or lists too few blocks for what the step computes.
        """
        self._offers.runs(request, computed, scheduled, table)

    @_held
    def preempted(self, request: str) -> None:
        """Take in that the engine takes the request's blocks away; before the ``runs`` calls of the same step."""
        self._schedule.preempt(request)
        self._offered.preempted(request)

    @_held
    def finished(self, request: str, table: BlockTable, complete: bool, *, good: bool = False) -> bool:
        """Take in that the request is over, at whatever point.

        Args:
            request: The engine's id of it.
            table: The whole block table at its end; one of empty rows if it has no blocks.
            complete: It ended normally and its KV is good; False for an abort or an error.
            good: What has been computed is good though the request is not complete, as after an abort. Consumers that are
                reading it may finish with that, if it is enough for them.

        Returns:
            True if the engine must keep the blocks until a ``report`` names the request as ``free``. A load under way
            keeps them as well, until the ``report`` of its end.
        """
        self._tables.check("table", table)
        self._loads.finished(request)
        return self._offers.finished(request, table, complete, found=bool(self._descriptors), good=good)

    @_held
    def freed(self, request: str) -> None:
        """Take in that the engine frees the blocks of a held request though no ``report`` has named it as ``free``."""
        self._offered.freed(request)

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """Return what the workers must know with this step; once a step, after what happens in it has been said."""
        renewals = self._notices.step()
        commands = self._schedule.commands()
        self._offered.shipped(commands)
        return self._dispatch.step(commands, renewals, self._loads.copies())

    def short_of_blocks(self) -> None:
        """Take in that the engine cannot admit or go on with a request for want of blocks; before ``step``.

        Blocks of prefetches that wait for their request are given back, and the request computes its tokens.
        """
        self._loads.short_of_blocks()

    @_held
    def report(self, report: Report) -> Update:
        """Take in what workers have reported, of one rank or merged of several, and return what it means.

        Includes what they have said by the side channel, so that it may be worth a call without a report of theirs.
        """
        if report.descriptors:
            self.announce(report.descriptors.values())
        if report.channels:
            self.listen_to(report.channels)
        self._dispatch.begun(report.begun)
        for transfer, revoked in report.revoked.items():
            self._offered.revoked(transfer, revoked)
        free = {self._offered.released(transfer, ranks) for transfer, ranks in report.released.items()}
        update = self._loads.report(report)
        return replace(update, free=frozenset(request for request in free if request is not None))

    @_held
    def load_over(self, request: str) -> None:
        """Take in from elsewhere that a load is over on all ranks; nothing if a ``report`` has said so."""
        self._loads.over_elsewhere(request)

    @_held
    def stands_still(self, whether: bool) -> None:
        """Take in, before each ``step``, whether the engine runs nothing because no waiting request can have blocks.

        If that goes on, finished requests that are held for others are given up, the oldest first, one at a time: those for
        whom they are held may themselves wait for blocks, and nobody would ever go on.
        """
        self._standstill.look(whether and not self._loads.under_way)

    @property
    def waiting(self) -> bool:
        """Whether blocks are pinned of which the engine knows no request.

        It must go on making steps then, or it will not hear that they are free.
        """
        return self._offered.waiting or self._loads.waiting

    # --- life ------------------------------------------------------------------------------------------------------

    @_held
    def announce(self, descriptors: Iterable[RankDescriptor]) -> None:
        """Take in where workers' agents listen; once all have been said, other engines find this one.

        Their first reports say it, too.
        """
        self._descriptors |= {one.cache.rank: one for one in descriptors}
        self._offered.elastic = any(one.cache.elastic for one in self._descriptors.values())
        self._tables.relearn(one.cache for one in self._descriptors.values())
        if len(self._descriptors) == self._ranks:
            with suppress(ClosedError):  # workers may report once more when all is over
                self.directory.publish(tuple(self._descriptors.values()))

    def listen_to(self, channels: Mapping[Rank, ChannelAddress]) -> None:
        """Take in where worker sides listen; once all have been said, fetches need not wait for a step.

        Their first reports say it, too.
        """
        for rank, channel in arguments.mapping("channels", channels, "addresses by rank").items():
            arguments.instance("channels", rank, Rank)
            arguments.instance(f"channels[{rank}]", channel, ChannelAddress)
        self._dispatch.listen_to(channels)

    @_held
    def withdraw_all(self, reason: str) -> bool:
        """End all offers and loads, since the KV cache is being dropped; True once no block of the pool is in use.

        If False, the workers have to hear of it first: go on making steps, and call it again.
        """
        for transfer in self._schedule.producer.transfers:
            self._schedule.producer.withdraw(transfer, reason)
        self._loads.withdraw_all(reason)
        return self._pins.pool_unused

    def identify(self, facts: Mapping[str, str]) -> None:
        """State what all KV of the engine depends on from now on; after ``withdraw_all``, when weights have changed.

        Raises:
            ClosedError: This side has been closed.
            ConfigError: The facts are too many or too long.
        """
        self._check_open("identify")
        self.facts = f.check(facts)
        self._dispatch.identify(self.facts)
        self.directory.identify(self.facts)

    def close(self) -> None:
        """Stop serving the directory; nothing is offered or loaded any more. Any number of times."""
        self._closed = True
        self._notices.close()
        self._dispatch.close()
        self.directory.close()

    def __len__(self) -> int:
        """Return how much is remembered of requests and transfers; 0 when there are none."""
        blocks = len(self._offered) + len(self._pins)
        return len(self._schedule) + len(self._offers) + len(self._loads) + len(self._notices) + blocks
