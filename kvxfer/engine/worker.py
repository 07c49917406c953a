"""The worker's side of an engine: gives a step's commands to the agent, and collects what has ended into reports."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import TypeVar

from msgspec.structs import replace

from kvxfer import arguments, clock, memory
from kvxfer.control.agent import Agent
from kvxfer.engine.computed import ComputedBands
from kvxfer.engine.exchange import Report, Step
from kvxfer.engine.rank_ends import RankEnds
from kvxfer.engine.side_channel import ChannelAddress, DirectFetches, Results, Take, WorkerChannel
from kvxfer.errors import ArgumentError, ClosedError, KvxferError
from kvxfer.failures import Failure
from kvxfer.logs import logger
from kvxfer.protocol.values import Ended
from kvxfer.schedule import RankResult
from kvxfer.text import MAX_SHOWN, printable
from kvxfer.values import BlockTable, Fetch, Rank

log = logger("kvxfer.engine")

T = TypeVar("T")

_unless_closed = suppress(ClosedError)
"""For calls that are moot if another thread (such as a signal's handler) closes the agent during a step: its events tell the rest."""


class WorkerSide:
    """One rank's side. The worker's own thread calls all methods.

    Only ``collect`` with a timeout, ``suspend``, ``drain`` and ``close`` block.

    A load or an offer that the agent refuses, or for which ``table`` or ``before_load`` raises, ends with the reason, without
    affecting others. So does one that comes after the agent was closed, by this side or by another thread; everything else in a
    step is then ignored.

    Args:
        agent: The rank's agent, over its cache.
        table: Turns the scheduler's block tables into tables of the cache's blocks, if kernels use smaller blocks, or if
            the scheduler numbers the blocks of several pools one after the other. Must be pure: any thread may call it.
        before_load: Called with the cache's block table, ``start`` and ``tokens`` of each load before it begins, to clear
            what the load does not overwrite (``kvxfer.geometry.uncovered``), if the engine needs that; then nothing else is written.
            Called by any thread, one call at a time.
        on_ended: Called with the ``Ended`` of each load and of each offer on this rank, for metrics; ``role`` tells them apart.
        quarantine: A load that has failed is reported at once, while its blocks may still be written to, if all such
            blocks together are no more than this. The scheduler must then have a pool to pin them in, and must not use them
            for the request again. 0: it is reported once its blocks are quiet.
        copy: Called with two tables of the cache's blocks, before the step's forward pass; copies the block at each
            position from the first to the second if both have one there. None: this engine does not use prefetches.
        channel: Makes this end of a side channel (``WorkerChannel``), by which a scheduler side on the same host sends
            fetches at once, as well as with each step. None: with steps only.

    Raises:
        ArgumentError: An argument has the wrong type or range.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        table: Callable[[BlockTable], BlockTable] | None = None,
        before_load: Callable[[BlockTable, int, int], None] | None = None,
        on_ended: Callable[[Ended], None] | None = None,
        quarantine: int = 0,
        copy: Callable[[BlockTable, BlockTable], None] | None = None,
        channel: Callable[[Take, Results], WorkerChannel] | None = None,
    ) -> None:
        given = {"table": table, "before_load": before_load, "on_ended": on_ended, "copy": copy, "channel": channel}
        for name, function in given.items():
            arguments.function(name, function)
        quarantine = arguments.integer("quarantine", quarantine, 0)
        self.agent, self._table, self._before_load, self._on_ended = _agent(agent), table, before_load, on_ended
        self._rank, self._device = agent.cache.rank, agent.cache.regions[0].device
        self._copy = copy
        self._computed = ComputedBands(agent.cache)
        self._facts: Mapping[str, str] | None = None
        self._untold: list[DirectFetches] = []  # what has come before the first step, which says what our KV depends on
        self._lock = threading.Condition()  # what follows is the worker's and the side channel's
        self._asleep = self._closed = False
        self._ends = RankEnds(self._rank, quarantine)
        self._ends.report.descriptors[self._rank] = agent.descriptor
        self._direct: set[int] = set()  # numbers of fetches that have begun, and come again with their step
        self._next = 0  # the number after those of the last step
        self._channel = None if channel is None else self._open(channel)
        agent.followed = True

    def _open(self, channel: Callable[[Take, Results], WorkerChannel]) -> WorkerChannel | None:
        try:
            found = channel(_weakly(self._take, None), _weakly(self._results, []))
        except OSError as e:
            log.warning("no side channel, fetches go with the engine's steps: %s", e)
            return None
        self._ends.aside = True
        self._ends.report.channels[self._rank] = found.address
        self.agent.listen(found.wake)
        return found

    @property
    def address(self) -> ChannelAddress | None:
        """Where the side channel listens, for the scheduler side; None without one. The first report says it, too."""
        return None if self._channel is None else self._channel.address

    def begin(self, step: Step) -> None:
        """Apply what must be known before this step's forward pass reuses a block: revocations, and new facts."""
        arguments.instance("step", step, Step)
        if step.facts is not None:
            with _unless_closed:
                self.agent.identify(step.facts)
            with self._lock:
                self._facts = step.facts
                untold, self._untold = self._untold, []
            for direct in untold:
                self._take(direct)
        for revoke in step.commands.revokes:
            with _unless_closed:
                self.agent.revoke(revoke.transfer, revoke.generation, revoke.reason, revoke.gone, kept=revoke.kept)
        if step.commands.revokes:
            with self._lock:
                self._ends.report.begun[self._rank] = step.number
        with _unless_closed:
            for transfer in step.renewals:
                self.agent.renew(transfer)

    def load(self, step: Step) -> None:
        """Copy what has been prefetched, begin this step's loads, and cancel those that are no longer wanted.

        If the step has ``copies``, call it before the forward pass, but after anything else that writes to new blocks.
        """
        arguments.instance("step", step, Step)
        copied: dict[int, dict[Rank, float]] = {}
        for copy in step.copies:
            assert self._copy is not None, "a prefetch in an engine that cannot copy blocks"
            begun = clock.now()
            self._copy(self._own(copy.src), self._own(copy.dst))
            copied[copy.number] = {self._rank: clock.now() - begun}
        with self._lock:
            self._ends.report.copied.update(copied)
            self._begin(step.commands.fetches)
            self._next = max(
                (one.number + 1 for one in step.commands.fetches if one.number is not None), default=self._next
            )
            self._direct = {number for number in self._direct if number >= self._next}
            handles = self._ends.handles() if step.commands.cancels else {}
        with _unless_closed:
            for cancel in step.commands.cancels:
                if cancel.number in handles:
                    self.agent.cancel(handles[cancel.number], cancel.reason)

    def _begin(self, fetches: tuple[Fetch, ...]) -> None:
        """Begin those fetches that have not begun yet."""
        for fetch in fetches:
            if fetch.number is not None:
                if fetch.number < self._next or fetch.number in self._direct:
                    continue
                self._direct.add(fetch.number)
            self._ends.begin(fetch)
            try:
                blocks = self._own(fetch.blocks)
                if self._before_load is not None and not self._asleep:  # else there is no memory, and the agent says so
                    try:
                        self._before_load(blocks, fetch.start, fetch.tokens)
                    except Exception as e:
                        raise _EngineFault("before_load", e) from e
                # Of what is behind the wanted tokens, nothing may come over what was cleared.
                self.agent.fetch(replace(fetch, blocks=blocks, tail=fetch.tail and self._before_load is None))
            except Exception as e:
                log.error("request %s cannot be loaded: %s", printable(fetch.handle), e, exc_info=_unexpected(e))
                self._ends.refuse(fetch, Failure.of(e))
                if self._channel is not None:
                    self._channel.wake()

    def _own(self, table: BlockTable) -> BlockTable:
        """Return a table of the cache's blocks, as the engine's function says.

        Raises:
            KvxferError: It has raised, or returned something else.
        """
        if self._table is None:
            return table
        try:
            return arguments.instance("what 'table' returns", self._table(table), BlockTable)
        except Exception as e:
            raise _EngineFault("table", e) from e

    def layer_done(self, step: Step, layer: str) -> None:
        """Offer the layers that this step has computed so far to consumers over slow links that wait for them.

        Optional: without it, all layers are offered together. Call it once the kernels that write a layer's KV for all tokens
        of the step are launched. It costs next to nothing if nobody waits, and at most seven fences a step.

        Args:
            step: The scheduler's step.
            layer: The name of the layer in the cache; other names are ignored.

        Raises:
            ArgumentError: An argument has the wrong type.
        """
        if not isinstance(step, Step):
            arguments.instance("step", step, Step)
        if not isinstance(layer, str):
            arguments.string("layer", layer)
        bands = self._computed.layer(step, layer) if step.commands.offers else 0
        offers = step.commands.offers if bands else ()
        fence = cache(partial(memory.fence, self._device))
        for offer in (offer for offer in offers if self.agent.banded(offer.transfer, offer.tokens)):
            with suppress(Exception):  # it will be refused again with all layers, and logged then
                some = replace(offer, blocks=self._own(offer.blocks), final=False, bands=bands)
                self.agent.offer(some, after=fence())

    def after_forward(self, step: Step) -> None:
        """Offer what this step has computed, behind a fence on the device. Call it once all kernels of the step are launched.

        Args:
            step: The scheduler's step.

        Raises:
            ArgumentError: An argument has the wrong type.
        """
        arguments.instance("step", step, Step)
        if step.commands.offers:
            fence = cache(partial(memory.fence, self._device))  # one for all, unless the device fails
            for offer in step.commands.offers:
                try:
                    self.agent.offer(replace(offer, blocks=self._own(offer.blocks)), after=fence())
                except Exception as e:
                    log.error(
                        "transfer %s cannot be offered: %s", printable(offer.transfer), e, exc_info=_unexpected(e)
                    )
                    with _unless_closed:
                        why = f"the producer could not offer it: {Failure.of(e).detail[:MAX_SHOWN]}"
                        self.agent.revoke(offer.transfer, offer.generation, why, True)

    def refuse(self, step: Step, reason: str) -> None:
        """End what this step was to offer, in place of ``after_forward``, if what it has computed is not what was announced.

        ``reason`` is for the consumers.

        Raises:
            ArgumentError: An argument has the wrong type.
        """
        arguments.instance("step", step, Step)
        arguments.string("reason", reason)
        for offer in step.commands.offers:
            with _unless_closed:
                self.agent.revoke(offer.transfer, offer.generation, reason, True)

    def collect(self, timeout: float = 0.0) -> Report:
        """Return what has ended since the last call; the report is false if nothing has.

        Args:
            timeout: Seconds to wait for something, if the engine has nothing else to do.
        """
        timeout = arguments.seconds("timeout", timeout)
        with self._lock:
            self._listen(0.0 if self._channel is not None or self._ends.report else timeout)
            if self._channel is not None:  # its thread takes the agent's events as well
                self._lock.wait_for(lambda: self._ends.pending, timeout)
            report, ends = self._ends.collect()
        if self._on_ended is not None:
            for event in ends:
                try:
                    self._on_ended(event)
                except Exception:
                    log.exception("the engine's 'on_ended' has failed, which changes nothing for its requests")
        return report

    def fileno(self) -> int:
        """Return a descriptor that polls readable once a load or offer has ended, for ``collect`` to return (``kvxfer.readable``).

        It does not signal what a step itself causes, or the first report of all: collect after each step as well.
        With a side channel, whose thread may read the event first, do not rely on it: wait in ``collect``.
        """
        return self.agent.fileno()

    def suspend(self) -> None:
        """Let go of the cache, whose memory is about to be unmapped, as when an engine is put to sleep.

        Blocks until nothing touches the cache, or for as long as ``Agent.close`` does. Transfers that are under way fail, as the
        next ``collect`` reports; to peers this rank is gone.

        Raises:
            KvxferError: Something may still touch the memory, so it must not be unmapped.
        """
        if not self.agent.close():
            raise KvxferError(
                f"the cache of rank {self._rank} cannot be given back: a back end may still touch it; try again later, or end "
                "the process"
            )
        last = self.collect()
        with self._lock:
            self._asleep = True
            self._ends.report = last.merge(self._ends.report)

    def resume(self, agent: Agent) -> None:
        """Go on after ``suspend`` with a new agent, over the same memory mapped again, or over other memory.

        Peers make new links. The next ``collect`` reports where the new agent listens; until the scheduler side has
        processed that, what peers ask of this rank fails. ``fileno`` returns another descriptor from now on.

        Raises:
            KvxferError: The agent is of another rank.
        """
        if _agent(agent).cache.rank != self._rank:
            raise KvxferError(f"the new agent must be of rank {self._rank}, not {agent.cache.rank}")
        if self._facts is not None:
            agent.identify(self._facts)
        with self._lock:
            self.agent, self._device, self._computed = agent, agent.cache.regions[0].device, ComputedBands(agent.cache)
            self._asleep = False
            agent.followed = True
            self._ends.report.descriptors[self._rank] = agent.descriptor
        if self._channel is not None:
            agent.listen(self._channel.wake)

    def drain(self, timeout: float) -> bool:
        """Close once all transfers of this rank have ended, or after ``timeout`` seconds; see ``Agent.drain``."""
        quiet = self.agent.drain(timeout)
        return self.close() and quiet

    def close(self) -> bool:
        """Close the agent; return whether all memory is quiet (``Agent.close``)."""
        self._closed = True
        if self._channel is not None:
            self.agent.listen(None)
            self._channel.close()
        return self.agent.close()

    def __del__(self) -> None:
        channel = self.__dict__.get("_channel")
        if channel is not None and not self._closed:
            warnings.warn("a worker side was dropped without being closed", ResourceWarning, stacklevel=1)
            channel.close()

    def __len__(self) -> int:
        """Return how much is remembered of loads, and of what is still to be reported; 0 when there is nothing."""
        return len(self._ends)

    def _listen(self, timeout: float = 0.0) -> None:
        """Process the agent's events; the lock must be held."""
        for event in self.agent.events(timeout):
            self._ends.take_in(event)

    # --- on the side channel's thread ------------------------------------------------------------------------------

    def _take(self, direct: DirectFetches) -> None:
        """Begin fetches that go ahead of their step; not before the facts are stated, because peers would refuse links without them."""
        with self._lock:
            if self._facts is None:
                self._untold.append(direct)
                return
        with _unless_closed:
            for source, own in direct.prepare:
                self.agent.prepare(source, own)
        with self._lock:
            self._begin(direct.fetches)

    def _results(self) -> list[RankResult]:
        with self._lock:
            self._listen()
            self._lock.notify_all()
            return self._ends.results()


class _EngineFault(KvxferError):
    """A function that the engine has given to its worker side has raised."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"the engine's own {name!r} has failed: {type(error).__name__}: {error}")


def _unexpected(error: Exception) -> bool:
    """Return whether the log is to say where an error comes from."""
    return isinstance(error, _EngineFault) or not isinstance(error, KvxferError)


def _weakly(method: Callable[..., T], without: T) -> Callable[..., T]:
    """Return a method that does not keep its object alive, and returns ``without`` after that."""
    weak = weakref.WeakMethod(method)
    return lambda *given: without if (found := weak()) is None else found(*given)


def _agent(agent: Agent) -> Agent:
    """Refuse what is not an agent, and one whose events another worker side takes."""
    if not hasattr(agent, "cache"):
        raise ArgumentError(f"agent must be a kvxfer Agent, not {arguments.describe(agent)}")
    if getattr(agent, "followed", False):
        raise ArgumentError(
            "agent must not have a worker side yet: each takes the agent's events, so make one for each agent"
        )
    return agent
