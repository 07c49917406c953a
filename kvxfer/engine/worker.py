"""The side of one worker: a step's commands given to its agent, what has ended collected into reports."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from kvxfer import arguments, memory
from kvxfer.control.agent import Agent
from kvxfer.engine.computed import ComputedBands
from kvxfer.engine.exchange import Report, Step
from kvxfer.engine.rank_ends import RankEnds
from kvxfer.engine.side_channel import ChannelAddress, DirectFetches, RankResult, Results, Take, WorkerChannel
from kvxfer.errors import ArgumentError, ClosedError, KvxferError
from kvxfer.failures import Failure
from kvxfer.identity import TransferId, printable
from kvxfer.protocol.values import Ended
from kvxfer.values import MOST_PAYLOAD, BlockTable, Fetch, Rank

__all__ = ["WorkerSide"]

log = logging.getLogger("kvxfer.engine")

_unless_closed = suppress(ClosedError)
"""For what means nothing to an agent that another thread closes amid a step, as a signal's handler does: its events say the rest."""

_held = arguments.holding(
    table=arguments.function,
    before_load=arguments.function,
    on_ended=arguments.function,
    copy=arguments.function,
    channel=arguments.function,
    quarantine=partial(arguments.integer, least=0),
    step=partial(arguments.instance, kind=Step),
    timeout=arguments.seconds,
)


class WorkerSide:
    """One rank. All methods are called by the worker's own thread, and none blocks save ``collect`` with a timeout.

    A load or an offer that the agent refuses, or that ``table`` or ``before_load`` raises for, ends with the reason, and costs no
    other. So does one after the agent was closed, by this side or by another thread; what else a step says is nothing then.

    Args:
        agent: the rank's agent, over its cache.
        table: turns the scheduler's block tables into those of the cache's blocks, where kernels use smaller ones, or where
            the scheduler numbers the blocks of several pools one behind the other. Pure: any thread may call it.
        before_load: called with the cache's block table, ``start`` and ``tokens`` of each load before it begins: to clear
            what the load leaves as it is (``kvxfer.geometry.uncovered``), if the engine needs that. Any thread, one
            call at a time.
        on_ended: called with the ``Ended`` of each load and of each offer on this rank, for metrics; ``role`` tells them apart.
        quarantine: a load that has failed is reported at once, while its blocks may still be written to, if all such
            blocks together are no more than this. The scheduler must have a pool to pin them in, and must not use them
            for the request again. 0: it is reported when its blocks are quiet.
        copy: called with two block tables of the cache's blocks; copies the blocks of the one to those of the other
            where both have one, ahead of the step's forward pass. None: this engine makes no use of prefetches.
        channel: makes the end of a side channel, ``WorkerChannel``: fetches then come at once from a scheduler side on the
            same host, besides with each step. None: with steps only.

    Raises:
        ArgumentError: an argument is of the wrong type or range.
    """

    @_held
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
        self.agent, self._table, self._before_load, self._on_ended = _agent(agent), table, before_load, on_ended
        self._rank, self._device = agent.cache.rank, agent.cache.regions[0].device
        self._copy = copy
        self._payloads: dict[TransferId, bytes] = {}  # for offers that are still to come
        self._computed = ComputedBands(agent.cache)
        self._facts: Mapping[str, str] | None = None
        self._untold: list[DirectFetches] = []  # what has come before the first step, which says what our KV depends on
        self._lock = threading.Condition()  # what follows is the worker's and the side channel's
        self._ends = RankEnds(self._rank, quarantine)
        self._ends.report.descriptors[self._rank] = agent.descriptor
        self._direct: set[int] = set()  # numbers of fetches that have begun, and come again with their step
        self._next = 0  # the number after those of the last step
        self._channel = None if channel is None else self._open(channel)

    def _open(self, channel: Callable[[Take, Results], WorkerChannel]) -> WorkerChannel | None:
        try:
            found = channel(self._take, self._results)
        except OSError as e:
            log.warning("no side channel, fetches go with the engine's steps: %s", e)
            return None
        self._ends.aside = True
        self._ends.report.channels[self._rank] = found.address
        self.agent.listen(found.wake)
        return found

    @property
    def address(self) -> ChannelAddress | None:
        """Where the side channel listens, for the scheduler side; the first report says it, too."""
        return None if self._channel is None else self._channel.address

    @_held
    def begin(self, step: Step) -> None:
        """Apply what must be known before this step's forward pass reuses a block: revocations, and other weights."""
        if step.facts is not None:
            with _unless_closed:
                self.agent.identify(step.facts)
            with self._lock:
                self._facts = step.facts
                untold, self._untold = self._untold, []
            for direct in untold:
                self._take(direct)
        for revoke in step.commands.revokes:
            self._payloads.pop(revoke.transfer, None)
            with _unless_closed:
                self.agent.revoke(revoke.transfer, revoke.generation, revoke.reason, revoke.gone, kept=revoke.kept)
        if step.commands.revokes:
            with self._lock:
                self._ends.report.begun[self._rank] = step.number
        with _unless_closed:
            for transfer in step.renewals:
                self.agent.renew(transfer)

    @_held
    def load(self, step: Step) -> None:
        """Copy what has been prefetched, begin this step's loads, and end those that are no longer wanted.

        If the step has ``copies``, call it before the forward pass, behind whatever else writes to new blocks.
        """
        copied: dict[str, dict[Rank, float]] = {}
        for copy in step.copies:
            assert self._copy is not None, "a prefetch in an engine that cannot copy blocks"
            begun = time.monotonic()
            self._copy(self._own(copy.src), self._own(copy.dst))
            copied[copy.request] = {self._rank: time.monotonic() - begun}
        with self._lock:
            self._ends.report.copied.update(copied)
            first = self._next if step.first is None else step.first
            self._begin(first, step.commands.fetches, step.prefetches)
            self._next = first + len(step.commands.fetches)
            self._direct = {number for number in self._direct if number >= self._next}
        with _unless_closed:
            for cancel in step.commands.cancels:
                self.agent.cancel(cancel.handle, cancel.reason)

    def _begin(self, first: int, fetches: tuple[Fetch, ...], prefetches: tuple[str, ...]) -> None:
        """Begin those that have not begun yet."""
        for number, fetch in enumerate(fetches, first):
            if number < self._next or number in self._direct:
                continue
            self._ends.begin(fetch, number, fetch.handle in prefetches)
            self._direct.add(number)
            try:
                blocks = self._own(fetch.blocks)
                if self._before_load is not None:
                    self._before_load(blocks, fetch.start, fetch.tokens)
                self.agent.fetch(replace(fetch, blocks=blocks))
            except Exception as e:  # the engine's functions may raise what they like
                log.error(
                    "request %s cannot be loaded: %s",
                    printable(fetch.handle),
                    e,
                    exc_info=not isinstance(e, KvxferError),
                )
                self._ends.refuse(fetch, Failure.of(e))
                if self._channel is not None:
                    self._channel.wake()

    def _own(self, table: BlockTable) -> BlockTable:
        return table if self._table is None else self._table(table)

    def layer_done(self, step: Step, layer: str) -> None:
        """Offer what this step has computed of the layers so far, where consumers over slow links wait for it.

        An engine that can say so calls it once the kernels that write a layer's KV are launched, of all tokens of the step. It costs
        next to nothing where nobody waits, and at most seven fences a step. Who does not call it has all layers offered together.

        Args:
            step: the scheduler's.
            layer: its name in the cache; others are ignored.
        """
        if not isinstance(step, Step):
            arguments.instance("step", step, Step)
        if not isinstance(layer, str):
            arguments.string("layer", layer)
        bands = self._computed.layer(step, layer) if step.commands.offers else 0
        offers = step.commands.offers if bands else ()
        wanted = [offer for offer in offers if self.agent.banded(offer.transfer, offer.tokens)]
        if wanted:
            fence = memory.fence(self._device)
        for offer in wanted:
            with suppress(Exception):  # it is refused again with all layers, and said then
                some = replace(offer, blocks=self._own(offer.blocks), final=False, bands=bands)
                self.agent.offer(some, after=fence)

    @_held
    def after_forward(self, step: Step, payloads: Mapping[TransferId, bytes] | None = None) -> None:
        """Offer what this step has computed, behind a fence on the device; once all its kernels are launched.

        Args:
            step: the scheduler's.
            payloads: what goes along with transfers whose prompts this step completes (``Offer.payload``), the same on all
                ranks: a first token that the engine has sampled, say. A prompt that is computed anew after a preemption is
                completed anew.

        Raises:
            ArgumentError: a payload is no ``bytes``, too long, or of no ``TransferId``. Call it again without that one:
                nothing is offered yet.
        """
        for transfer, payload in arguments.mapping("payloads", payloads or {}, "bytes by transfer").items():
            arguments.instance("payloads", transfer, TransferId)
            self._payloads[transfer] = arguments.octets(f"payloads[{transfer}]", payload, MOST_PAYLOAD, empty=True)
        if step.commands.offers:
            fence = memory.fence(self._device)
            for offer in step.commands.offers:
                payload = self._payloads.pop(offer.transfer, b"")
                try:
                    self.agent.offer(replace(offer, blocks=self._own(offer.blocks), payload=payload), after=fence)
                except Exception as e:
                    log.error(
                        "transfer %s cannot be offered: %s",
                        printable(offer.transfer),
                        e,
                        exc_info=not isinstance(e, KvxferError),
                    )
                    with _unless_closed:
                        self.agent.revoke(
                            offer.transfer, offer.generation, f"the producer could not offer it: {e}", True
                        )

    @_held
    def collect(self, timeout: float = 0.0) -> Report:
        """Return what has ended since the last call; false if nothing has.

        Args:
            timeout: seconds to wait for something, where the engine has nothing else to do.
        """
        with self._lock:
            self._listen(0.0 if self._channel is not None or self._ends.report else timeout)
            if self._channel is not None:  # whose thread listens as well
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
        """Return a descriptor that polls readable while ``collect`` has something to return that has ended (``kvxfer.readable``).

        What a step itself has brought, and the first report of all, is there at once: collect after each step as well.
        With a side channel, whose thread listens as well, it may not: wait in ``collect`` then.
        """
        return self.agent.fileno()

    def suspend(self) -> None:
        """Let go of the cache, whose memory is about to be unmapped, as when an engine is put to sleep.

        Blocks until nothing touches it, or for the agent's patience. Transfers that are under way fail, which the next
        ``collect`` says; peers see this rank go.

        Raises:
            KvxferError: something may still touch the memory, which must stay.
        """
        if not self.agent.close():
            raise KvxferError(
                f"the cache of rank {self._rank} cannot be given back: a back end may still touch it; try again later, or end "
                "the process"
            )
        last = self.collect()
        with self._lock:
            self._ends.report = last.merge(self._ends.report)

    def resume(self, agent: Agent) -> None:
        """Go on after ``suspend`` with a new agent, over the same memory, which is there again, or over other memory.

        Peers make their links anew; the next ``collect`` says where it listens, and until the scheduler side has taken that
        in, what they ask of this rank fails. The descriptor (``fileno``) is another one from now on.

        Raises:
            KvxferError: the agent is of another rank.
        """
        if _agent(agent).cache.rank != self._rank:
            raise KvxferError(f"the new agent must be of rank {self._rank}, not {agent.cache.rank}")
        self.agent, self._device, self._computed = agent, agent.cache.regions[0].device, ComputedBands(agent.cache)
        if self._facts is not None:
            agent.identify(self._facts)
        with self._lock:
            self._ends.report.descriptors[self._rank] = agent.descriptor
        if self._channel is not None:
            agent.listen(self._channel.wake)

    def drain(self, timeout: float) -> bool:
        """Close once all transfers of this rank have come to their ends, after ``timeout`` seconds in any case; see ``Agent.drain``."""
        quiet = self.agent.drain(timeout)
        return self.close() and quiet

    def close(self) -> bool:
        """Close the agent; whether all memory is quiet, as ``Agent.close`` has it."""
        if self._channel is not None:
            self.agent.listen(None)
            self._channel.close()
        return self.agent.close()

    def __len__(self) -> int:
        """Return how much is remembered of loads, and of what is still to be reported; 0 when there is nothing."""
        return len(self._ends) + len(self._payloads)

    def _listen(self, timeout: float = 0.0) -> None:
        """Take in what the agent has to say, with the lock."""
        for event in self.agent.events(timeout):
            self._ends.take_in(event)

    # --- on the side channel's thread ------------------------------------------------------------------------------

    def _take(self, direct: DirectFetches) -> None:
        """Begin what goes ahead of its step. A link made before our facts are stated would be refused, and its fetches with it."""
        with self._lock:
            if self._facts is None:
                self._untold.append(direct)
                return
        with _unless_closed:
            for source, own in direct.prepare:
                self.agent.prepare(source, own)
        with self._lock:
            self._begin(direct.first, direct.fetches, direct.prefetches)

    def _results(self) -> list[RankResult]:
        with self._lock:
            self._listen()
            self._lock.notify_all()
            return self._ends.results()


def _agent(agent: Agent) -> Agent:
    """Refuse what cannot stand for an agent."""
    if not hasattr(agent, "cache"):
        raise ArgumentError(f"agent must be a kvxfer Agent, not {arguments.shown(agent)}")
    return agent
