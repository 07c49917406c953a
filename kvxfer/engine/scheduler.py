"""The scheduler's side of an engine: follows requests, serves the directory, commands the workers and handles their reports."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from kvxfer import arguments, clock
from kvxfer import facts as f
from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.control.inquiries import Inquiries
from kvxfer.engine.answers import Holds, PrefixAnswers
from kvxfer.engine.asks import Asks
from kvxfer.engine.dispatch import Dispatch
from kvxfer.engine.ends import Update
from kvxfer.engine.exchange import Report, Step
from kvxfer.engine.loads import Loads
from kvxfer.engine.notices import Notices
from kvxfer.engine.offers import Offers
from kvxfer.engine.paces import LoadOrCompute
from kvxfer.engine.pins import BlockPins
from kvxfer.engine.requests import RequestCalls
from kvxfer.engine.side_channel import ChannelAddress
from kvxfer.engine.standstill import Standstill
from kvxfer.engine.step_wait import EngineQueue
from kvxfer.engine.stories import Stories
from kvxfer.engine.telling import tell
from kvxfer.engine.trace import LoadLog, Trace
from kvxfer.errors import ClosedError
from kvxfer.geometry.spaces import block_spaces
from kvxfer.geometry.tables import TableCheck
from kvxfer.logs import logger
from kvxfer.protocol.messages import RankDescriptor
from kvxfer.schedule import Schedule
from kvxfer.values import MAX_REASON, MAX_TOKENS, Group, Rank

log = logger("kvxfer.engine")

MAX_RANKS = 1 << 16


class SchedulerSide(RequestCalls):
    """The transfers of one engine, as its scheduler sees them: those of its requests (``RequestCalls``), step by step.

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
        holds: Returns what this engine's cache holds of a prompt that another engine is about to compute. It is called by ``step``,
            so on the engine's thread, once that step has its blocks. None: such questions are answered with "nothing". It may be set
            later, as an attribute.
        wake: Called when another engine has asked, or answered, so that an engine without requests makes a step soon; until then
            ``waiting`` is true. It is called on a thread of kvxfer's, and must not block. It may be set later, as an attribute.
        queue: The engine's requests. With it, while all of them wait for loads, ``loadable`` and ``loads.wait_alone`` wait for up to 50 ms,
            until a load ends or something arrives; ``loadable`` waits also while that saves more than it costs the others. While all
            wait for answers of ``ask``, ``loadable`` waits for up to 25 ms. None: they do not.

    Attributes:
        source: Where other engines find this one.
        directory: What they find there.
        facts: The facts as last stated.
        offers: The requests that offer.
        loads: The requests that load.
        asked: What has come of ``ask`` since the beginning, by ``kind``.
        answered: What other engines have asked of this one since the beginning.

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
        arguments.instance("config", config, Config)
        self._ranks = ranks = arguments.integer("ranks", ranks, 1, MAX_RANKS)
        writes_early = arguments.flag("writes_early", writes_early)
        groups = arguments.sequence_of("groups", groups, Group, 1)
        self._pins = BlockPins(0) if pins is None else arguments.instance("pins", pins, BlockPins)
        stories, tables = Stories(engine), TableCheck(groups)
        stories.readers.append(LoadLog().read)
        if config.trace is not None:
            stories.readers.append(Trace(config.trace, engine).read)
        self.facts = f.check(facts)
        self.holds, self.wake = arguments.function("holds", holds), arguments.function("wake", wake)
        self.directory = Directory(config, engine, self.facts)
        own = self.directory.source if ranks > 1 else None
        self._schedule = stories.live = Schedule(groups, own)
        producer, consumer = self._schedule.producer, self._schedule.consumer
        consumer.unpin = self._pins.drop
        self._dispatch = Dispatch(self._schedule, own, ranks, self.facts)
        self._notices = notices = Notices(config, self.directory, self._schedule)
        offers = Offers(producer, self._pins, tables, ranks, writes_early, notices, stories)
        loads = Loads(config, self._schedule, self._pins, tables, ranks, self._dispatch, notices, stories)
        self._choice = LoadOrCompute()
        asks = Asks(config, self.directory, notices, consumer, loads, self._choice)
        stories.readers.append(asks.load_ended)
        if queue is not None:
            loads.step_wait.queue = self._with_inquiries(arguments.instance("queue", queue, EngineQueue))
        super().__init__(self.directory.source, tables, self._schedule.requests, offers, loads, asks, stories)
        self._answers = PrefixAnswers(self.directory, offers, producer, groups, self._pins.limit)
        self.asked, self.answered = asks.counts, self._answers.counts
        self._standstill, self._drains_until = Standstill(producer), 0.0
        self.directory.inquiries = Inquiries()
        self.directory.explain = partial(tell, stories, self.answered, self._answers.took, self.asked)
        self.directory.wake = partial(_woken, weakref.ref(self))

    # --- steps -----------------------------------------------------------------------------------------------------

    def takes(self, tokens: int, seconds: float) -> None:
        """Record how long a step took that computed ``tokens`` tokens of prompts. By this ``ask`` judges whether a load pays.

        Leave out steps that computed answers only. Without this, every load counts as faster than computing.
        """
        self._choice.took(arguments.integer("tokens", tokens, 0, MAX_TOKENS), arguments.seconds("seconds", seconds))

    def _with_inquiries(self, queue: EngineQueue) -> EngineQueue:
        """Count as arriving what other engines ask, too."""
        directory = self.directory
        return replace(queue, arriving=lambda: queue.arriving() or bool(directory.inquiries))

    def step(self) -> Step:
        """Return what the workers must know with this step. Call it once a step, after all other calls about the step."""
        renewals = self._notices.exchange()
        self._answers.answer(self.holds)
        commands = self._schedule.commands()
        self.offers.shipped()
        return self._dispatch.step(commands, renewals, self.loads.prefetches.copies())

    def short_of_blocks(self) -> None:
        """Record that the engine cannot admit or continue a request for want of blocks. Call it before ``step``.

        The blocks of prefetches whose requests are not admitted yet are given back, and those requests compute their tokens.
        """
        self.loads.short_of_blocks()
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
            self.offers.unread(transfer, revoked)
        for transfer, ended in report.offers_ended.items():
            self.offers.ended(transfer, ended)
        free = {self.offers.released(transfer, ranks) for transfer, ranks in report.released.items()}
        update = self.loads.report(report)
        return replace(update, free=frozenset(request for request in free if request is not None))

    def stands_still(self, whether: bool) -> None:
        """Record, before each ``step``, whether the engine runs nothing because no waiting request can get blocks.

        If that goes on, finished requests whose blocks are held for other engines are given up, the oldest first, one at a
        time: those engines may be waiting for blocks themselves, and neither would ever go on.
        """
        arguments.flag("whether", whether)
        self._standstill.look(whether and not self.loads.under_way)

    @property
    def waiting(self) -> bool:
        """Whether the next step has something to say or to answer, or blocks are pinned for requests that the engine may have forgotten.

        The engine must then go on making steps, or others will not hear what it has given up, and it will not learn that those
        blocks are free.
        """
        untold = self._schedule.untold or self.directory.noticed
        return untold or self.offers.unfinished or self.loads.unfinished or clock.now() < self._drains_until

    def drain(self, timeout: float) -> None:
        """Let others ask for what this engine holds, and fetch it, for ``timeout`` seconds; until then ``waiting`` is true.

        For an engine that is about to stop and takes no more requests. A client that is sent elsewhere finds the KV of its request here:
        go on making steps while ``waiting`` is true, then drain the worker sides.

        Raises:
            ArgumentError: ``timeout`` is not a number, or negative.
        """
        timeout = arguments.duration("timeout", timeout)
        if self.holds is not None:
            self._drains_until = clock.now() + timeout

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
        self.offers.elastic = any(one.cache.elastic for one in self._descriptors.values())
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

    def withdraw_all(self, reason: str) -> bool:
        """End all offers, loads and questions, because the KV cache is being dropped; return whether no block of the pool is in use.

        While that is False, the workers have yet to act on it: go on making steps, and call it again.
        """
        arguments.string("reason", reason, MAX_REASON, empty=True)
        for transfer in self._schedule.producer.transfers:
            self._schedule.producer.withdraw(transfer, reason)
        self._asks.withdraw_all(reason)
        self.loads.withdraw_all(reason)
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

    def __del__(self) -> None:
        if not self.__dict__.get("_closed", True) and "_answers" in self.__dict__:
            warnings.warn("a scheduler side was dropped without being closed", ResourceWarning, stacklevel=1)
            self._notices.renewals.begin_close()
            self._dispatch.channel.close()
            self.directory.begin_close()

    def __len__(self) -> int:
        """Return how much is remembered of requests and transfers; 0 when there are none."""
        records = sum(1 for _ in self._schedule.consumer) + sum(1 for _ in self._schedule.producer)
        return records + len(self._pins) + len(self._schedule.ledger)


def _woken(side: weakref.ref[SchedulerSide]) -> None:
    """Have the engine make a step. The directory's thread."""
    if (found := side()) is not None and found.wake is not None:
        try:
            found.wake()
        except Exception:
            log.exception("the engine's 'wake' has failed, so what others have asked waits for its next step")
