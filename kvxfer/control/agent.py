"""The agent: one for each worker process, and what an engine calls there.

It owns the registered cache, the data plane and the control sockets. Engine threads that call it only append to queues. One control
thread runs the two state machines and never blocks. Each back end has a data thread. All of these threads sleep in a poll.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from kvxfer import arguments, clock
from kvxfer import facts as f
from kvxfer.config import Config
from kvxfer.control import sockets
from kvxfer.control.calls import CallValidator
from kvxfer.control.endings import ProcessGuard, close_at_exit
from kvxfer.control.events import EventQueue
from kvxfer.control.link import LinkStatus
from kvxfer.control.loop import CLOSE_S, CLOSED, ControlLoop
from kvxfer.control.ports import listen_within
from kvxfer.control.revocations import SharedRevocationCounter
from kvxfer.control.runtime import AgentRuntime
from kvxfer.data.commands import Result
from kvxfer.data.data_thread import DataThread
from kvxfer.data.hasher import Hasher
from kvxfer.data.part_ends import Limits
from kvxfer.data.plane import DataPlane
from kvxfer.data.policy import LinkPolicy, stager
from kvxfer.data.staging import Staging
from kvxfer.errors import ArgumentError, ClosedError, KvxferError
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Cache
from kvxfer.identity import Generation, Handle, Source, TransferId, new_epoch
from kvxfer.logs import logger
from kvxfer.memory import with_elastic
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import Event, Stats
from kvxfer.security import Security
from kvxfer.transport import Capabilities, Fence, Transport
from kvxfer.transport.auto import candidates, options_for
from kvxfer.values import MAX_REASON, Fetch, Offer

__all__ = ["Agent"]

log = logger("kvxfer.agent")

START_S = 60.0


@dataclass(frozen=True)
class _Starting:
    """What the data threads are started with. It outlives an agent that is dropped, and must not hold on to it."""

    name: str
    cache: Cache
    config: Config
    backends: Mapping[str, type[Transport]]
    security: Security
    post: Callable[[Result], None]

    def policy(self, name: str, caps: Capabilities, staging: Staging) -> LinkPolicy:
        """Return how a back end that has started is used."""
        if self.cache.elastic:
            how = "straight" if all(map(caps.moves, self.cache.regions)) else "staged"
            log.info("the cache of %s is elastic: back end %s moves it %s", self.name, name, how)
        return LinkPolicy.of(name, caps, staging, self.cache.told(), self.config.integrity)

    def data_thread(self, name: str) -> DataThread:
        return DataThread(
            name,
            partial(self._transport, name),
            self.cache.regions,
            stager(self.cache, self.config.staging_bytes),
            self.post,
            Limits(grace=self.config.abort_timeout, quarantine=sum(r.nbytes for r in self.cache.regions) // 4),
            self.security,
        )

    def _transport(self, name: str) -> Transport:
        """Make a back end; called on its data thread, because that may take seconds."""
        backend = self.backends[name]
        return backend(self.name, options_for(backend, self.config))


class Agent:
    """Moves KV in and out of one worker's cache.

    Make it once the cache is allocated. Any thread may call any method; only ``close``, ``drain`` and ``events`` with a timeout
    block. In a process forked from the one that made it, all methods fail with ``KvxferError``, except ``close``, which does
    nothing there. The agent is closed when a ``with`` block or the interpreter ends.

    Args:
        cache: Describes memory that must stay where it is until ``close``. Pages of elastic regions may be remapped, except
            those of blocks under a transfer.
        config: The settings.
        engine: The engine's name, for peers and logs.
        facts: What all KV in the cache depends on, the same as the engine's directory states (``kvxfer.facts``); ``None`` if
            the engine will call ``identify``.

    Attributes:
        followed: Whether a ``kvxfer.engine.WorkerSide`` takes its events.

    Raises:
        ArgumentError: An argument has the wrong type, or ``Cache.check`` refuses the cache.
        ConfigError: The back end is unknown, or options or facts are bad.
        TransportError: The back end cannot start.
        KvxferError: ``integrity`` is on, but checksums cannot be made here.
        OSError: No port is available.
    """

    def __init__(self, cache: Cache, config: Config, engine: str = "", facts: Mapping[str, str] | None = None) -> None:
        arguments.instance("cache", cache, Cache).check()
        config = arguments.instance("config", config, Config).located()
        arguments.string("engine", engine, empty=True)
        cache = replace(cache, regions=with_elastic(cache.regions, config.elastic))
        self._calls = CallValidator(cache)
        stated = None if facts is None else f.check(facts)
        self.cache, self.config, self.epoch = cache, config, new_epoch()
        self._owner, self.followed = ProcessGuard("this agent"), False
        self._name = f"{engine or 'engine'}-{cache.rank.pp}.{cache.rank.tp}-{self.epoch:x}"
        self._backends = candidates(config, (r.device for r in cache.regions))
        self._events = EventQueue()
        self._revocations = SharedRevocationCounter()
        with ExitStack() as undo:
            undo.callback(self._revocations.close)
            security = Security.of(config)
            self._loop = ControlLoop(security, self._revocations.close)
            undo.callback(self._loop.sockets.close)
            self._hasher = Hasher(cache, self._loop.post)
            undo.callback(self._hasher.close, CLOSE_S)
            starting = _Starting(self._name, cache, config, self._backends, security, self._loop.post)
            self._data = DataPlane(tuple(self._backends), starting.data_thread, starting.policy)
            undo.callback(self._data.close, CLOSE_S)
            if config.integrity != "off":
                self._hasher.get_ready(START_S)
            self._data.start(START_S)
            self._data.policy(self._data.candidates[0])  # so that the log tells at start how an elastic cache moves
            port = listen_within(self._loop.sockets, config)
            address = sockets.address(config.told, port)
            self.descriptor = m.RankDescriptor(address, self.epoch, cache.told(), self._data.candidates)
            self._runtime = AgentRuntime(
                self._loop,
                self._data,
                self._hasher,
                self._revocations,
                self.descriptor,
                config,
                engine,
                stated,
                self._calls,
                self._events,
            )
            self._loop.start(self._runtime)
            undo.pop_all()
        close_at_exit(self)

    def __del__(self) -> None:
        """Warn and begin to close, if it was dropped while open. Its threads keep the cache's memory until they have ended."""
        loop = getattr(self, "_loop", None)
        if loop is None or loop.why is not None or not self._owner.same_process or not loop.thread.is_alive():
            return
        warnings.warn("an agent was dropped without being closed", ResourceWarning, stacklevel=1)
        loop.begin_close(Failure(FailureKind.CANCELLED, "the agent was dropped without being closed"))

    def __reduce__(self) -> str:
        raise KvxferError(
            "an agent belongs to the process that made it, and cannot be copied or pickled: make a new one"
        )

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- any thread ------------------------------------------------------------------------------------------------

    def offer(self, offer: Offer, after: Fence | None = None) -> None:
        """Let consumers fetch these blocks.

        An offer ends with one ``Ended`` event and one ``Released`` event; until the second, its blocks must not be reused. If
        the agent has failed, both come at once.

        Args:
            offer: The transfer, its generation and its blocks.
            after: The fence that passes once the blocks' content is complete; ``None`` if it is complete already. If it has not
                passed within the lease, the offer fails.

        Raises:
            ArgumentError: The blocks are not in the cache or too few for the tokens. A fetch that is not released yet fills one
                of them. The offer contradicts an earlier one of its transfer: by an older generation or, within the same one, fewer
                tokens, other blocks or another payload.
            ClosedError: The agent has been closed.
        """
        self._check_open("offer")
        if after is not None:
            arguments.instance("after", after, Fence)  # type: ignore[type-abstract]
        self._calls.offer(offer)
        self._revocations.offered(offer.transfer, offer.generation)
        self._loop.do(partial(self._runtime.offer, offer, after, clock.now()))

    def banded(self, transfer: TransferId, tokens: int) -> bool:
        """Return whether a consumer that is being served wants bands of layers of these tokens (``Offer.bands``).

        Consumers with slow links do. Never blocks.
        """
        return self._runtime.producer.banded(transfer, tokens)

    def revoke(
        self, transfer: TransferId, generation: Generation, reason: str, gone: bool, *, kept: bool = False
    ) -> None:
        """Give up the blocks of a generation; consumers that have read them are told not to trust them.

        Call it before the blocks are used for something else. They may be as soon as it returns, unless they are ``kept``. Their
        memory must stay mapped until the ``GenerationReleased`` that follows, or the transfer's ``Released``.

        Args:
            transfer: The transfer.
            generation: The newest generation whose blocks are given up.
            reason: Why, for the consumer and the log.
            gone: Whether nothing will be offered again. The transfer then ends, with its two events, unless they have come for this
                generation or a newer one within the last lease. An engine waits for those of the last generation that it has named.
            kept: Whether the blocks stay as they are until the transfer's ``Released``. Consumers that are reading them then get
                what has been offered, if that is enough for them (``Fetch.enough``). Only together with ``gone``.

        Raises:
            ArgumentError: An argument has the wrong type or range.
            ClosedError: The agent has been closed. Peers that were reading at the time are told all the same.
        """
        self._owner.check()
        arguments.instance("transfer", transfer, TransferId)
        generation = Generation(arguments.integer("generation", generation, 0))
        arguments.string("reason", reason, MAX_REASON, empty=True)
        gone = arguments.flag("gone", gone)
        if arguments.flag("kept", kept) and not gone:
            raise ArgumentError("kept must come with gone: what is computed again is in other blocks")
        # Unless they are kept, the engine may use the blocks before the control thread handles this call.
        declared = not kept and self._revocations.declare(transfer)
        self._loop.do(partial(self._runtime.revoke, transfer, generation, reason, gone, kept, declared))
        if not kept:
            self._calls.free(transfer, generation)
        # Last: even if another thread closes the agent now, no peer may trust what is overwritten.
        self._check_open("revoke")

    def renew(self, transfer: TransferId) -> None:
        """Renew an offer's lease, because its consumer is alive although it has not begun to fetch.

        Raises:
            ArgumentError: ``transfer`` is not a ``TransferId``.
            ClosedError: The agent has been closed.
        """
        self._check_open("renew")
        arguments.instance("transfer", transfer, TransferId)
        self._loop.do(partial(self._runtime.renew, transfer))

    def fetch(self, fetch: Fetch) -> None:
        """Fetch a transfer into blocks of this cache.

        The fetch ends with one ``Ended`` event within ``Config.longest`` seconds from now, and one ``Released`` event. Until
        the second, the blocks must be neither used nor freed. If the agent has failed, both come at once.

        Raises:
            ArgumentError: The blocks are not in the cache or too few for the tokens. The handle belongs to a fetch that is not
                released yet, or such a fetch fills one of the blocks. An offer lists a block that is neither revoked nor
                released. ``own`` is missing although other ranks fetch the rest.
            ClosedError: The agent has been closed.
        """
        self._check_open("fetch")
        self._calls.fetch(fetch)
        self._loop.do(partial(self._runtime.fetch, fetch, clock.now()))

    def prepare(self, source: Source, own: Source | None = None) -> None:
        """Make the links to an engine before the first fetch from it, so that this need not wait for them.

        Failures are not reported: if a link cannot be made, the fetch that needs it says why.

        Args:
            source: The engine's directory.
            own: This engine's own directory, if it has several ranks; see ``Fetch.own``.

        Raises:
            ArgumentError: An argument has the wrong type.
            ClosedError: The agent has been closed.
        """
        self._check_open("prepare")
        arguments.instance("source", source, Source)
        if own is not None:
            arguments.instance("own", own, Source)
        self._loop.do(lambda now: self._runtime.consumer.prepare(source, own))

    def cancel(self, handle: Handle, reason: str) -> None:
        """Give up a fetch that the engine no longer wants; do nothing if it is over, or never began.

        Raises:
            ArgumentError: An argument has the wrong type or range.
            ClosedError: The agent has been closed.
        """
        self._check_open("cancel")
        arguments.string("handle", handle)
        arguments.string("reason", reason, MAX_REASON, empty=True)
        self._loop.do(partial(self._runtime.consumer.cancel, handle, reason))

    def identify(self, facts: Mapping[str, str]) -> None:
        """State what all KV of the engine depends on from now on (``kvxfer.facts``); takes effect after all earlier calls.

        If it changes, fetches under way fail, and peers with other facts lose their links and are told why.

        Raises:
            ClosedError: The agent has been closed.
            ConfigError: The facts are too many or too long.
        """
        self._check_open("identify")
        self._loop.do(partial(self._runtime.identify, f.check(facts)))

    def listen(self, heard: Callable[[], None] | None) -> None:
        """Set a function to be called on the agent's thread whenever there are new events; ``None`` for none.

        It is called once for all events of a turn, and must not block.

        Raises:
            ArgumentError: ``heard`` is not a function.
            ClosedError: The agent has been closed, and ``heard`` is not ``None``.
        """
        self._owner.check()
        if heard is not None:
            self._check_open("listen")
        self._events.heard = arguments.function("heard", heard)

    def events(self, timeout: float = 0.0) -> list[Event]:
        """Return what has happened since the last call, in order; after ``close``, what is left.

        Args:
            timeout: Seconds to wait if nothing has happened yet, at most an hour. Waiting costs no CPU. If the agent is closed,
                this does not wait.

        Raises:
            ArgumentError: ``timeout`` is not a number.
        """
        self._owner.check()
        return self._events.take(arguments.seconds("timeout", timeout))

    def fileno(self) -> int:
        """Return a descriptor that polls readable while ``events`` has something to return, and always after ``close``.

        It is for ``select``, ``poll`` and event loops (``kvxfer.readable`` waits for it in asyncio); it must be
        neither read nor closed.
        """
        self._owner.check()
        return self._events.fileno()

    def stats(self) -> Stats:
        """Return counts of what is under way now, and of what has happened since the start."""
        self._owner.check()
        return self._runtime.stats()

    def links(self) -> list[LinkStatus]:
        """Return all links that exist or are being made: first those that this agent dialled, then those that peers dialled."""
        self._owner.check()
        return self._runtime.links()

    def close(self, timeout: float = CLOSE_S) -> bool:
        """Give up all transfers, stop the threads, close sockets and back ends.

        May be called from any thread, any number of times; each call waits until everything is closed. Each transfer under way
        ends with ``CANCELLED`` and is released; its peers are told.

        Args:
            timeout: The most seconds to wait.

        Returns:
            Whether all memory is quiet. If not, because a back end does not let go of it in time or ever, the
            cache must not be freed: transfers whose memory may still be touched are not released (though a ``Released`` may
            come later).

        Raises:
            ArgumentError: ``timeout`` is not a number.
        """
        timeout = arguments.seconds("timeout", timeout)
        return self._loop.close(timeout) if self._owner.same_process else False

    def drain(self, timeout: float) -> bool:
        """Wait until all transfers under way have ended, for ``timeout`` seconds at the most, then close.

        For an engine that is about to stop: call it once no more requests come, from any thread, even in a signal handler.
        Meanwhile peers fetch what is offered, and the engine may complete what it has begun, but should begin nothing. What
        is left then ends, and its peers are told at once.

        Returns:
            Whether all memory is quiet; see ``close``.

        Raises:
            ArgumentError: ``timeout`` is not a number, or negative.
        """
        self._owner.check()
        timeout = arguments.duration("timeout", timeout)
        idle = threading.Event()
        self._loop.do(partial(self._runtime.when_idle, idle.set))  # what was called before this is known by then
        if self._loop.why is None and not idle.wait(min(timeout, threading.TIMEOUT_MAX)):
            self.begin_close(Failure(FailureKind.CANCELLED, f"the engine is stopping, and waited {timeout:g} s for it"))
        return self.close()

    def begin_close(self, why: Failure = CLOSED) -> None:
        """Begin to close the agent and end all transfers for this reason, and return at once; the first reason counts."""
        if self._owner.same_process:
            self._loop.begin_close(why)

    def _check_open(self, call: str) -> None:
        """Refuse a call after the engine has closed the agent. An agent that has failed accepts it, and ends it with events."""
        self._owner.check()
        if self._loop.why is not None and self._loop.why.kind is FailureKind.CANCELLED:
            raise ClosedError(f"this agent has been closed: call {call!r} before that, or make a new one")
