"""The scheduler's side of an engine: follows requests, serves the directory, commands the workers and handles their reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from kvxfer import arguments
from kvxfer import facts as f
from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.control.inquiries import Inquiries
from kvxfer.engine.alone import EngineQueue
from kvxfer.engine.answers import AnswerCounts, Holds, PrefixAnswers
from kvxfer.engine.asks import AskCounts, Asks
from kvxfer.engine.dispatch import Dispatch
from kvxfer.engine.ends import Update
from kvxfer.engine.exchange import Report, Step
from kvxfer.engine.loads import Loads
from kvxfer.engine.notices import Notices
from kvxfer.engine.offers import Offers
from kvxfer.engine.paces import Benefit
from kvxfer.engine.pins import BlockPins
from kvxfer.engine.side_channel import ChannelAddress
from kvxfer.engine.standstill import Standstill
from kvxfer.engine.stories import Stories
from kvxfer.engine.trace import Trace
from kvxfer.errors import ClosedError
from kvxfer.geometry.spaces import block_spaces
from kvxfer.geometry.tables import TableCheck
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.messages import RankDescriptor
from kvxfer.schedule import Prefix, Schedule
from kvxfer.ticket import Ticket
from kvxfer.values import MAX_CONSUMERS, MAX_DIGEST, MAX_REASON, MAX_TOKENS, BlockTable, Group, Rank

__all__ = ["SchedulerSide"]

MAX_RANKS = 1 << 16


class SchedulerSide:
    """The transfers of one engine, as its scheduler sees them.

    There is one for each engine, called by one thread; only ``close`` blocks. The directory has a thread of its own. Calls
    about a request that neither offers nor loads do nothing, so an engine may call these methods for all requests.

    A call with a wrong argument fails and does nothing.

    Args:
        config: The engine's settings.
        engine: Its name, for the logs of other engines.
        groups: Its KV-cache groups, in the order of its block tables.
        ranks: How many workers it has.
        facts: What all its KV depends on (``kvxfer.facts``); its agents must state the same.
        pins: Keeps blocks that the engine gives up; without it nothing is kept, and peers that read too late fail.
        writes_early: Whether a step may write to the blocks that it is given before its workers call ``WorkerSide.begin``, by zeroing
            them, say. A block that is offered is then given to nobody before the step after the one that revokes it. Needs ``pins``;
            call ``preempted`` once the step has been given its blocks.
        holds: PrefixAnswers what this engine's cache holds of a prompt that another engine is about to compute. It is called by ``step``,
            so on the engine's thread, once that step has its blocks. None: such questions are answered with "nothing". It may be set
            later, as an attribute.
        wake: Called when another engine has asked, or answered, so that an engine without requests makes a step soon; until then
            ``waiting`` is true. It is called on a thread of kvxfer's, and must not block. It may be set later, as an attribute.
        queue: The engine's requests. With it, while all of them wait for loads, ``loadable`` and ``wait_alone`` wait for up to 50 ms,
            until a load ends or something arrives. None: they do not.

    Attributes:
        source: Where other engines find this one.
        directory: What they find there.
        facts: The facts as last stated.

    Raises:
        ArgumentError: An argument has the wrong type or range.
        ConfigError: The facts are too many or too long, or the file of ``trace`` cannot be written.
        OSError: The directory's address is not available.
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
        writes_early: bool = False,
        holds: Holds | None = None,
        wake: Callable[[], None] | None = None,
        queue: EngineQueue | None = None,
    ) -> None:
        self.holds, self.wake = holds, wake
        arguments.instance("config", config, Config)
        ranks = arguments.integer("ranks", ranks, 1, MAX_RANKS)
        writes_early = arguments.flag("writes_early", writes_early)
        groups = arguments.sequence_of("groups", groups, Group, 1)
        if pins is not None:
            arguments.instance("pins", pins, BlockPins)
        if queue is not None:
            arguments.instance("queue", queue, EngineQueue)
        self._stories = Stories(engine, lambda: self._schedule)
        trace = Trace(config.trace, engine, self._stories)
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
        self._offers = Offers(
            self._schedule.producer, self._pins, self._tables, groups, ranks, writes_early, self._notices, self._stories
        )
        self.directory.explain = self._stories.explain
        self._descriptors: dict[Rank, RankDescriptor] = {}
        consumer, ledger = self._schedule.consumer, self._schedule.ledger
        self._loads = Loads(
            config,
            consumer,
            ledger,
            self._pins,
            self._tables,
            ranks,
            self._dispatch,
            self._notices,
            trace,
            self._stories,
        )
        self._loads.alone.queue = queue
        self._standstill = Standstill(self._schedule.producer)
        self._drains_until = 0.0
        self._benefit = Benefit(self._loads.paces)
        self._asks = Asks(config, self.directory, self._notices, consumer, self._loads, self._benefit)
        self._answers = PrefixAnswers(self.directory, self._offers, self._schedule.producer, groups, self._pins.limit)
        self.directory.inquiries = Inquiries()
        self.directory.wake = self._woken

    # --- requests --------------------------------------------------------------------------------------------------

    def offer(
        self,
        request: str,
        transfer: TransferId,
        digest: bytes,
        tokens: int,
        *,
        consumers: int = 1,
        stops: bool = False,
        answer: str | None = None,
    ) -> bool:
        """Offer the first ``tokens`` tokens of this request's prompt to other engines, as they are computed.

        The offer stands until ``consumers`` engines have fetched it or given it up, or its lease ends. A consumer that fails
        does not affect the others.

        Args:
            request: The engine's id of the request.
            transfer: The name under which consumers fetch it.
            digest: What its KV depends on (``kvxfer.identity.digest``).
            tokens: How many tokens to offer.
            consumers: How many engines are to fetch it. Requests of one engine share one load, and count as one.
            answer: A name for what tells consumers of this offer, if that is one answer for several requests: samples of one prompt.
                ``consumers`` counts once for each answer. None: each request has its own.
            stops: Whether nothing is computed for the request after these tokens. A recurrent state is then offered with the
                step that completes them, and otherwise once the request has finished.

        Returns:
            Whether it is offered. It is not if there is nothing to offer, if the transfer is offered with other content, or if the
            blocks of an earlier request of this name are still held. Requests that offer the same content as the same transfer
            share it: the blocks of one are offered, and another's if that one fails.

        Raises:
            ArgumentError: An argument has the wrong type or range.
            ClosedError: This side has been closed.
            ScheduleError: The request offers another transfer, or another number of tokens.
        """
        _transfer(transfer, digest)
        tokens, consumers = _count("tokens", tokens), arguments.integer("consumers", consumers, 1, MAX_CONSUMERS)
        stops = arguments.flag("stops", stops)
        self._check_open("offer")
        arguments.string("request", request)
        if answer is not None:
            arguments.string("answer", answer)
        return self._offers.offer(request, transfer, digest, tokens, consumers, stops, answer)

    def offer_computed(
        self, transfer: TransferId, digest: bytes, tokens: int, table: BlockTable, *, consumers: int = 1
    ) -> Ticket | None:
        """Offer KV that is in these blocks already: of the prefix cache, or of a request with what it has generated.

        The blocks are taken for this transfer alone, out of the limit of ``pins``, until all consumers have fetched it or given it up,
        its lease ends, or the engine stands still for want of blocks (``stands_still``). No ``report`` names it. To others it is an
        offer like any other.

        Args:
            transfer: The name under which consumers fetch it.
            digest: What its KV depends on (``kvxfer.identity.digest``).
            tokens: How many tokens it has, all of them computed by a step that has been given to the workers.
            table: Their blocks, which must be in use now; the engine may let go of them afterwards. Of a window, the blocks that the
                token behind the last one attends to; of a state, the one that holds it after exactly these tokens.
            consumers: How many engines are to fetch it.

        Returns:
            What a consumer must be told. The same for the same content under the same name; its ``consumers`` stay as they were. None:
            the name has other content, ``pins`` has no pool, or what it may hold is used up.

        Raises:
            ArgumentError: An argument has the wrong type or range, or the table does not fit this engine's groups.
            ClosedError: This side has been closed.
            ScheduleError: The table lacks blocks for the tokens, or a load still fills one of them.
        """
        self._check_open("offer_computed")
        _transfer(transfer, digest)
        tokens = arguments.integer("tokens", tokens, 1, MAX_TOKENS)
        consumers = arguments.integer("consumers", consumers, 1, MAX_CONSUMERS)
        return self._offers.computed(transfer, digest, tokens, table, consumers, self.source)

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
        answer: str | None = None,
    ) -> bool:
        """Load from another engine what is not cached here of the first ``tokens`` tokens of this request's prompt.

        From now on the producer's lease is renewed. Do not load the last token of a prompt, so that it is computed here,
        unless the producer sends the token that it sampled after it (``Update.payloads``).
        Requests of one transfer (samples of one prompt) share it: one loads, the others find the blocks in the prefix cache.

        Args:
            request: The engine's id of the request.
            transfer: The name of the transfer to load.
            digest: What its KV depends on (``kvxfer.identity.digest``).
            source: The directory of the engine that offers it.
            tokens: How many tokens of the prompt are to be here. 0: none, and the producer of what is ``offered`` is told so.
            begun: Whether the producer is assumed to have begun. If not, it is asked, and ``loadable`` returns None until it
                has, for ``start_timeout`` at the most.
            offered: Whether the producer is known to have offered all of the tokens, as when it has answered its request. If
                it does not know them any more, the load then fails within about a second instead of at its deadline.
            progress: A ``report`` tells of progress each time that this many more tokens are here; 0 for never.
            enough: The fewest tokens that are of use if the producer gives up before it has computed all (``Update.short``). 0:
                all or none. At most ``tokens``. Only where all groups are ``full``.
            answer: The name of the answer that has told of the transfer, if the producer counts its consumers by answer
                (``offer``). If requests with different answers share a load, the producer is told that it has one consumer less.

        Returns:
            Whether it may load. It may not if the transfer is in use for other content or from another source, or was given
            up just now, or if something is still under way for an earlier request of this name. Then it must be computed here.

        Raises:
            ArgumentError: An argument has the wrong type or range.
            ClosedError: This side has been closed.
            ScheduleError: The request loads another transfer.
        """
        _transfer(transfer, digest)
        arguments.instance("source", source, Source)
        tokens, progress = _count("tokens", tokens), _count("progress", progress)
        begun, offered = arguments.flag("begun", begun), arguments.flag("offered", offered)
        self._check_open("load")
        arguments.string("request", request)
        enough = arguments.integer("enough", enough, 0, tokens)
        if answer is not None:
            arguments.string("answer", answer)
        return self._loads.load(request, transfer, digest, source, tokens, begun, offered, progress, enough, answer)

    def takes_no_part(self, request: str, why: str) -> None:
        """Record why a request that was to load or to offer does not, for `kvxfer why`; changes nothing else.

        Args:
            request: The engine's id of the request.
            why: In words for an operator.
        """
        _request(request)
        self._stories.takes_no_part(request, arguments.string("why", why, MAX_REASON))

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise ClosedError(f"this scheduler side has been closed: call {call!r} before that, or make a new one")

    def ask(
        self, request: str, prefix: Prefix, sources: Sequence[Source], tokens: int, *, computed: int = 0, kind: str = ""
    ) -> bool:
        """Load what other engines hold of the first ``tokens`` tokens of this request's prompt, if that pays.

        All sources are asked when ``loadable`` is first called. It returns None until they have answered, for ``Config.ask_timeout`` at the
        most and for no longer than computing the tokens would take. Then the one is taken from which a load saves most time, and everything
        is as after ``load``. If none has any of it, or no load would end before the tokens were computed, the request is computed here.
        No request fails because of what a source does. A request may be offered as well, with ``offer``.

        Args:
            request: The engine's id of the request.
            prefix: The prompt's tokens and what else its KV depends on.
            sources: The directories of engines that may hold some of it. With the epoch 0 it is whichever engine is there. This engine
                itself is left out.
            tokens: How many tokens of the prompt are to be here: without the last one, if that is to be computed.
            computed: The tokens that the request will find in the local prefix cache, as far as is known.
            kind: Who has named the sources, for the counts (``asked``): a router's schema, say.

        Returns:
            Whether anybody is asked. Nobody is if the setting ``ask`` is ``never``, if fewer than ``ask_tokens`` tokens are to come, if
            no other source is left, or if the request loads something already.

        Raises:
            ArgumentError: An argument has the wrong type or range.
            ClosedError: This side has been closed.
        """
        arguments.instance("prefix", prefix, Prefix)
        sources = arguments.sequence_of("sources", sources, Source)
        tokens = min(_count("tokens", tokens), len(prefix))
        arguments.string("kind", kind, empty=True)
        self._check_open("ask")
        arguments.string("request", request)
        return self._asks.ask(request, prefix, sources, tokens, _count("computed", computed), kind)

    def asking(self, request: str) -> bool:
        """Return whether other engines have been asked for this request, and it is not decided yet what it loads."""
        return self._asks.asking(request)

    def takes(self, tokens: int, seconds: float) -> None:
        """Record how long a step took that computed ``tokens`` tokens of prompts. By this ``ask`` judges whether a load pays.

        Leave out steps that computed answers only. Without this, every load counts as faster than computing.
        """
        self._benefit.took(_count("tokens", tokens), arguments.seconds("seconds", seconds))

    @property
    def asked(self) -> Mapping[str, AskCounts]:
        """What has come of ``ask`` since the beginning, by ``kind``."""
        return self._asks.counts

    @property
    def answered(self) -> AnswerCounts:
        """What other engines have asked of this one since the beginning."""
        return self._answers.counts

    def _woken(self) -> None:
        """Have the engine make a step. The directory's thread."""
        if self.wake is not None:
            self.wake()

    def decline(self, transfer: TransferId, digest: bytes, source: Source, answer: str) -> None:
        """Have a producer told that a request was rejected before it came here, and will not fetch a transfer.

        Args:
            transfer: The name of the transfer.
            digest: What its KV depends on.
            source: The directory of the engine that offers it.
            answer: The name of the answer that has told of it; nothing else of which that has told will be fetched either. Empty: none.
        """
        _transfer(transfer, digest)
        arguments.instance("source", source, Source)
        self._schedule.consumer.decline(transfer, digest, source, "the request was rejected", answer)

    def prefetch(self, request: str, computed: int) -> None:
        """Begin a short load before the request has blocks, so that it may run in the step that admits it.

        Call it when the request has arrived, before its local blocks are looked up: unused ones may be lent to the load.
        ``loadable`` calls it as well if nothing is local. It does nothing for a load that is not short (``Config.step_budget``).

        Args:
            request: The engine's id of the request.
            computed: The tokens that the request will find in the local prefix cache, as far as is known.
        """
        _request(request)
        self._loads.prefetch(request, _count("computed", computed))

    def ticket(self, request: str) -> Ticket | None:
        """Return what a consumer of this request's offer must be told; None if it offers nothing, or nothing any more.

        It stays the same when the request has finished, as long as its blocks are held. Hand it on once this side is ``ready``.
        """
        _request(request)
        return self._offers.ticket(request, self.source)

    def answer(self, request: str) -> str:
        """Return the name of the answer that tells consumers of this request's offer: a lost request's for a retry.

        Consumers that have been told the same transfer by answers of different names are counted separately (``load``, ``answer``).
        """
        _request(request)
        return self._schedule.producer.answer(request)

    def unanswered(self, answer: str) -> None:
        """Record that an answer goes out to nobody, as when its client has hung up: what only that would have told of is given up.

        Args:
            answer: Its name (``offer``).
        """
        self._schedule.producer.unanswered(arguments.string("answer", answer), "its client has hung up")

    def offers(self, ticket: Ticket) -> bool:
        """Return whether what a ticket of this engine names is offered, or will be."""
        return self._schedule.producer.offers(ticket.transfer, ticket.digest)

    def loadable(self, request: str, computed: int) -> int | None:
        """Return how many tokens behind the ``computed`` local ones can come from outside.

        It may be asked as often as the engine likes.

        Returns:
            The number of tokens. 0: none can, now or later. None: not known yet, because another request of the same transfer is
            loading them, a prefetch is on its way, or the producer has not begun; ask again in the next step.
        """
        _request(request)
        computed = _count("computed", computed)
        if self._asks.awaits(request, computed):
            return None
        return self._loads.loadable(request, computed)

    def is_prefetched(self, request: str) -> bool:
        """Return whether the tokens that ``loadable`` promised are already here, in prefetched blocks.

        If so, the request runs in this step, whose workers first copy the blocks. If not, its load begins with this step.
        """
        return self._loads.is_sync(request)

    def allocated(self, request: str, table: BlockTable, external: int) -> None:
        """Record that the engine admits the request, and counts on ``external`` tokens from outside.

        If ``external`` is not 0, the load begins with the next ``step()``, and a ``report`` tells its end; until then the
        request must not run and its blocks must not be freed, unless the tokens are ``here`` already. If it is 0, a transfer
        that has not begun is given up.

        Args:
            request: The engine's id of the request.
            table: The whole block table. Blocks of local tokens are not touched.
            external: What ``loadable`` last returned, or less if all groups are ``full``.

        Raises:
            ScheduleError: ``external`` is more than ``loadable`` would return, or the table has no blocks for it, or one of those
                is offered or being filled. The load has failed: no tokens will come.
            ArgumentError: The block table does not fit this engine's groups. The load has failed as well.
        """
        _request(request)
        external = _count("external", external)
        self._asks.admitted(request, external)
        self._loads.allocated(request, table, external)

    def follows(self, request: str) -> bool:
        """Return whether ``runs`` or ``preempted`` matters for what this request offers; if not, its block table need not be looked up."""
        return self._offers.follows(request)

    def runs(self, request: str, computed: int, scheduled: int, table: BlockTable) -> None:
        """Record that the request runs in this step.

        Args:
            request: The engine's id of the request.
            computed: Tokens computed before this step, prefix-cache hits and loads included.
            scheduled: Tokens that this step computes.
            table: The whole block table as this step uses it; never an increment.

        Raises:
            ArgumentError: The block table does not fit this engine's groups, or has too few blocks for what the step computes.
            ScheduleError: The request offers what the step computes, and a load, such as its own, still fills one of the blocks.
        """
        _request(request)
        self._offers.runs(request, _count("computed", computed), _count("scheduled", scheduled), table)

    def preempted(self, request: str) -> None:
        """Record that the engine takes the request's blocks away. Call it before the ``runs`` calls of the same step."""
        _request(request)
        self._loads.preempted(request)
        self._offers.preempted(request)

    def finished(self, request: str, table: BlockTable, complete: bool, *, good: bool = False) -> bool:
        """Record that the request is over, at whatever point.

        Args:
            request: The engine's id of the request.
            table: The whole block table at its end; one with empty rows if it has no blocks.
            complete: Whether it ended normally and its KV is good; False after an abort or an error.
            good: Whether what has been computed is good although the request is not complete, as after an abort. Consumers
                that are reading it may then finish with that, if it is enough for them.

        Returns:
            True if the engine must keep the blocks until a ``report`` names the request as ``free``. Whatever is returned, it
            must keep the blocks of a load under way until a ``report`` names the request as ``loaded`` or ``failed``.

        Raises:
            ArgumentError: The block table does not fit this engine's groups.
        """
        _request(request)
        complete, good = arguments.flag("complete", complete), arguments.flag("good", good)
        self._tables.check("table", table)
        self._asks.finished(request)
        self._loads.finished(request)
        return self._offers.finished(request, table, complete, found=bool(self._descriptors), good=good)

    def freed(self, request: str) -> None:
        """Record that the engine frees the blocks of a held request although no ``report`` has named it as ``free``."""
        _request(request)
        self._offers.freed(request)

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """Return what the workers must know with this step. Call it once a step, after all other calls about the step."""
        renewals = self._notices.exchange()
        self._answers.answer(self.holds)
        commands = self._schedule.commands()
        self._offers.shipped()
        return self._dispatch.step(commands, renewals, self._loads.copies(), self._offers.over())

    def wait_alone(self) -> bool:
        """Wait for a load to end, if all requests of the engine wait for loads (``queue``). Call it in a step that computes nothing.

        Call it behind ``step()``, whose result goes to the workers afterwards. It returns once a load has ended, something has arrived
        or 50 ms are over; call ``report`` next.

        Returns:
            Whether there was nothing but loads to wait for. If not, or if that step says what workers must hear at once, it has not waited.
        """
        return self._loads.wait_alone()

    def short_of_blocks(self) -> None:
        """Record that the engine cannot admit or continue a request for want of blocks. Call it before ``step``.

        The blocks of prefetches whose requests are not admitted yet are given back, and those requests compute their tokens.
        """
        self._loads.short_of_blocks()
        self._answers.short_of_blocks()

    def report(self, report: Report) -> Update:
        """Process a report, of one rank or merged of several, and return what it means to the engine.

        This includes what workers have sent by the side channel, so it may be worth calling with an empty ``Report``.
        """
        arguments.instance("report", report, Report)
        if report.descriptors:
            self.announce(report.descriptors.values())
        if report.channels:
            self.listen_to(report.channels)
        self._dispatch.begun(report.begun)
        for transfer, revoked in report.revoked.items():
            self._offers.unread(transfer, revoked)
        for transfer, ended in report.offers_ended.items():
            self._offers.ended(transfer, ended)
        free = {self._offers.released(transfer, ranks) for transfer, ranks in report.released.items()}
        update = self._loads.report(report)
        self._asks.ended(update)
        return replace(update, free=frozenset(request for request in free if request is not None))

    def confirm_load_ended(self, request: str) -> None:
        """Record that the engine knows a load to be over on all ranks; does nothing if a ``report`` has said so."""
        _request(request)
        self._loads.over_elsewhere(request)

    def stands_still(self, whether: bool) -> None:
        """Record, before each ``step``, whether the engine runs nothing because no waiting request can get blocks.

        If that goes on, finished requests whose blocks are held for other engines are given up, the oldest first, one at a
        time: those engines may be waiting for blocks themselves, and neither would ever go on.
        """
        arguments.flag("whether", whether)
        self._standstill.look(whether and not self._loads.under_way)

    @property
    def waiting(self) -> bool:
        """Whether the next step has something to say or to answer, or blocks are pinned for requests that the engine may have forgotten.

        The engine must then go on making steps, or others will not hear what it has given up, and it will not learn that those
        blocks are free.
        """
        untold = self._schedule.untold or self.directory.noticed
        return untold or self._offers.unsettled or self._loads.unsettled or time.monotonic() < self._drains_until

    def drain(self, timeout: float) -> None:
        """Let others ask for what this engine holds, and fetch it, for ``timeout`` seconds; until then ``waiting`` is true.

        For an engine that is about to stop and takes no more requests. A client that is sent elsewhere finds the KV of its request here:
        go on making steps while ``waiting`` is true, then drain the worker sides.

        Raises:
            ArgumentError: ``timeout`` is not a number.
        """
        timeout = arguments.seconds("timeout", timeout)
        if self.holds is not None:
            self._drains_until = time.monotonic() + timeout

    # --- life ------------------------------------------------------------------------------------------------------

    def announce(self, descriptors: Iterable[RankDescriptor]) -> None:
        """Record where workers' agents listen; once all are known, other engines can find this one.

        The workers' first reports say it, too.
        """
        descriptors = arguments.sequence_of("descriptors", descriptors, RankDescriptor)
        new = {one.cache.rank: one for one in descriptors}
        self._descriptors |= new
        for one in new.values():
            if len(one.cache.groups) == len(self._tables.groups):  # else the workers turn the tables into others
                self._schedule.ledger.learn(block_spaces(one.cache))
        self._offers.elastic = any(one.cache.elastic for one in self._descriptors.values())
        self._tables.relearn(one.cache for one in self._descriptors.values())
        if self.ready:
            with suppress(ClosedError):  # workers may report once more after ``close``
                self.directory.publish(tuple(self._descriptors.values()))

    @property
    def ready(self) -> bool:
        """Whether other engines can find all ranks of this one. What they fetch before that fails after ``peer_timeout``."""
        return len(self._descriptors) == self._ranks

    def listen_to(self, channels: Mapping[Rank, ChannelAddress]) -> None:
        """Record where worker sides listen; once all are known, fetches need not wait for a step.

        The workers' first reports say it, too.

        Raises:
            ArgumentError: ``channels`` does not map ranks to addresses.
        """
        for rank, channel in arguments.mapping("channels", channels, "addresses by rank").items():
            arguments.instance("channels", rank, Rank)
            arguments.instance(f"channels[{rank}]", channel, ChannelAddress)
        self._dispatch.listen_to(channels)

    def withdraw(self, request: str, reason: str) -> None:
        """End the offer of a running request, whose KV is no longer what its digest says; does nothing without one.

        Args:
            request: The engine's id of the request.
            reason: Why, for the consumers.
        """
        _request(request)
        arguments.string("reason", reason, MAX_REASON, empty=True)
        offering = self._schedule.producer.offering(request)
        if offering is not None:
            self._schedule.producer.withdraw(offering[0], reason)

    def withdraw_all(self, reason: str) -> bool:
        """End all offers, loads and questions, because the KV cache is being dropped; return whether no block of the pool is in use.

        While that is False, the workers have yet to act on it: go on making steps, and call it again.
        """
        arguments.string("reason", reason, MAX_REASON, empty=True)
        for transfer in self._schedule.producer.transfers:
            self._schedule.producer.withdraw(transfer, reason)
        self._asks.withdraw_all(reason)
        self._loads.withdraw_all(reason)
        return self._pins.pool_unused

    def identify(self, facts: Mapping[str, str]) -> None:
        """State what all KV of the engine depends on from now on. Call it after ``withdraw_all``, when weights have changed.

        Raises:
            ClosedError: This side has been closed.
            ConfigError: The facts are too many or too long.
        """
        self._check_open("identify")
        self.facts = f.check(facts)
        self._dispatch.identify(self.facts)
        self.directory.identify(self.facts)

    def close(self) -> None:
        """Stop serving the directory; nothing is offered or loaded any more. May be called more than once."""
        self._closed = True
        self._notices.renewals.close()
        self._dispatch.channel.close()
        self.directory.close()

    def __len__(self) -> int:
        """Return how much is remembered of requests and transfers; 0 when there are none."""
        records = sum(1 for _ in self._schedule.consumer) + sum(1 for _ in self._schedule.producer)
        return records + len(self._pins) + len(self._schedule.ledger)


def _request(request: str) -> None:
    arguments.instance("request", request, str)  # of any length: an engine may pass on all that it hears


def _transfer(transfer: TransferId, digest: bytes) -> None:
    arguments.instance("transfer", transfer, TransferId)
    arguments.bytes_of("digest", digest, MAX_DIGEST)


def _count(name: str, value: int) -> int:
    return arguments.integer(name, value, 0, MAX_TOKENS)
