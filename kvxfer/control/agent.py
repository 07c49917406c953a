"""The agent: one for each worker process, and the face of all that works for it.

It owns the registered cache, the data plane and the control sockets. Engine threads only append to queues. One control thread
runs the two state machines and never calls what may block; each back end has a data thread of its own. All of these threads
sleep in a poll.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from msgspec.structs import replace

from kvxfer import arguments
from kvxfer import facts as f
from kvxfer.config import Config
from kvxfer.control import sockets
from kvxfer.control.calls import Calls
from kvxfer.control.endings import ProcessGuard, close_at_exit
from kvxfer.control.events import EventQueue
from kvxfer.control.link import LinkStatus
from kvxfer.control.loop import CLOSE_S, CLOSED, ControlLoop
from kvxfer.control.revocations import SharedRevocationCounter
from kvxfer.control.shell import Shell
from kvxfer.data.commands import Result
from kvxfer.data.data_thread import DataThread
from kvxfer.data.hasher import Hasher
from kvxfer.data.plane import DataPlane
from kvxfer.data.policy import LinkPolicy, stager
from kvxfer.data.quarantine import Limits
from kvxfer.data.staging import Staging
from kvxfer.errors import ArgumentError, ClosedError, KvxferError
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Cache
from kvxfer.identity import Source, TransferId, new_epoch
from kvxfer.memory import with_elastic
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import Action, Event, Hashed, Stats
from kvxfer.security import Security
from kvxfer.transport import Capabilities, Fence, Transport
from kvxfer.transport.auto import candidates, options_for
from kvxfer.values import MOST_REASON, Fetch, Offer

__all__ = ["Agent"]

log = logging.getLogger("kvxfer.agent")

START_S = 60.0


class Agent:
    """Move KV in and out of one worker's cache.

    Make it once the cache is allocated. All methods may be called from any thread and return at once, save ``close`` and ``drain``.
    In a process that was forked from the one that made it they fail with ``KvxferError``, save ``close``, which does
    nothing there. The agent is closed when a ``with`` block or the interpreter ends.

    Args:
        cache: Describes memory that must stay where it is until ``close``; the pages of elastic regions may change, save those
            of blocks under a transfer.
        config: The settings.
        engine: The engine's name, for peers and logs.
        facts: What all KV in the cache depends on, the same as the engine's directory states; ``None`` until the engine
            says it (``identify``).

    Raises:
        ArgumentError: An argument is of the wrong type.
        ConfigError: The back end is unknown, or options or facts are bad.
        TransportError: The back end cannot start.
        KvxferError: Checks are asked for that cannot be made here.
        OSError: No port can be had.
    """

    def __init__(self, cache: Cache, config: Config, engine: str = "", facts: Mapping[str, str] | None = None) -> None:
        arguments.instance("cache", cache, Cache).check()
        config = arguments.instance("config", config, Config).located()
        arguments.string("engine", engine, empty=True)
        cache = replace(cache, regions=with_elastic(cache.regions, config.elastic))
        self._calls = Calls(cache)
        stated = None if facts is None else f.check(facts)
        self.cache, self.config, self.epoch = cache, config, new_epoch()
        self._owner = ProcessGuard("this agent")
        self._name = f"{engine or 'engine'}-{cache.rank.pp}.{cache.rank.tp}-{self.epoch:x}"
        self._backends = candidates(config, (r.device for r in cache.regions))
        self._events = EventQueue()
        self._revocations = SharedRevocationCounter()
        try:
            self._loop = ControlLoop(Security.of(config), self._revocations.close)
        except BaseException:
            self._revocations.close()
            raise
        self._data = DataPlane(tuple(self._backends), self._data_thread, self._policy)
        self._hasher = Hasher(cache, self._post)
        try:
            if config.integrity != "off":
                self._hasher.get_ready()
            self._data.start(START_S)
            self._data.policy(self._data.candidates[0])  # so that the log tells at start how an elastic cache moves
            port = self._loop.sockets.listen(config.listen, 0)
        except BaseException:
            self._revocations.close()
            self._hasher.close(CLOSE_S)
            self._data.close(CLOSE_S)
            self._loop.sockets.close()
            raise
        address = sockets.address(config.advertise or config.listen, port)
        self.descriptor = m.RankDescriptor(address, self.epoch, cache, self._data.candidates)
        self._shell = Shell(
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
        self._loop.start(self._shell)
        close_at_exit(self)

    def __reduce__(self) -> str:
        raise KvxferError(
            "an agent belongs to the process that has made it, and cannot be copied or pickled: make another"
        )

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _policy(self, name: str, caps: Capabilities, staging: Staging) -> LinkPolicy:
        """Return how a back end that has started is used."""
        if self.cache.elastic:
            how = "straight" if all(map(caps.moves, self.cache.regions)) else "staged"
            log.info("the cache of %s is elastic: back end %s moves it %s", self._name, name, how)
        return LinkPolicy.of(name, caps, staging, self.cache, self.config.integrity)

    def _data_thread(self, name: str) -> DataThread:
        regions = self.cache.regions
        return DataThread(
            name,
            partial(self._transport, name),
            regions,
            stager(self.cache, self.config.staging_bytes),
            self._post,
            Limits(grace=self.config.peer_timeout, quarantine=sum(r.nbytes for r in regions) // 4),
        )

    def _transport(self, name: str) -> Transport:
        """Make a back end, on its data thread: that may take seconds."""
        backend = self._backends[name]
        return backend(self._name, options_for(backend, self.config))

    # --- any thread ------------------------------------------------------------------------------------------------

    def offer(self, offer: Offer, after: Fence | None = None) -> None:
        """Let consumers have these blocks.

        The offer ends in one ``Ended`` and one ``Released`` event; until the second the blocks must not be reused. If
        the agent has failed, both come at once.

        Args:
            offer: The transfer, its generation and its blocks.
            after: The fence behind which the blocks' content is complete; ``None`` when it is complete already.

        Raises:
            ArgumentError: The blocks are not the cache's or too few for the tokens, or the offer takes back what was offered
                of its transfer before: an older generation, or fewer tokens, other blocks, another payload of the same one.
            ClosedError: The agent has been closed.
        """
        self._check_open("offer")
        if after is not None:
            arguments.instance("after", after, Fence)  # type: ignore[type-abstract]
        self._calls.offer(offer)
        self._revocations.offered(offer.transfer, offer.generation)
        self._loop.do(partial(self._shell.offer, offer, after, time.monotonic()))

    def banded(self, transfer: TransferId, tokens: int) -> bool:
        """Return whether a consumer that is being served would take bands of layers of these tokens (``Offer.bands``).

        One whose link is slow asks for them. The answer is of now, and costs no wait.
        """
        return self._shell.producer.banded(transfer, tokens)

    def revoke(self, transfer: TransferId, generation: int, reason: str, gone: bool, *, kept: bool = False) -> None:
        """Give up the blocks of a generation; whoever has read them will be told not to trust them.

        Call it before the blocks are used for something else; once it has returned they may be, unless they are ``kept``. They
        must still have memory until the ``GenerationReleased`` that follows (or the transfer's ``Released``), as those of an
        elastic cache need not.

        Args:
            transfer: The transfer.
            generation: The generation whose blocks are given up.
            reason: Why, for the consumer and the log.
            gone: Whether it is for good. Then the transfer ends, with its two events unless they have come before.
            kept: Whether the blocks stay as they are until its ``Released``. Consumers that are reading it then get what has been
                offered, if that is enough for them (``Fetch.enough``). Only together with ``gone``.

        Raises:
            ArgumentError: An argument is of the wrong type or range.
            ClosedError: The agent has been closed. Peers that read at the time are told all the same.
        """
        self._owner.check()
        arguments.instance("transfer", transfer, TransferId)
        generation = arguments.integer("generation", generation, 0)
        arguments.string("reason", reason, MOST_REASON, empty=True)
        gone = arguments.flag("gone", gone)
        if arguments.flag("kept", kept) and not gone:
            raise ArgumentError("kept must come with gone: blocks that are computed anew are others")
        # Unless they are kept, the engine may use the blocks before our thread comes to it.
        declared = not kept and self._revocations.declare(transfer)
        self._loop.do(partial(self._shell.revoke, transfer, generation, reason, gone, kept, declared))
        self._check_open("revoke")  # last: who closes it meanwhile must not have a peer trust what is overwritten

    def renew(self, transfer: TransferId) -> None:
        """Keep an offer's lease: its consumer is alive, though it has not come yet.

        Raises:
            ArgumentError: It is no ``TransferId``.
            ClosedError: The agent has been closed.
        """
        self._check_open("renew")
        arguments.instance("transfer", transfer, TransferId)
        self._loop.do(partial(self._shell.renew, transfer))

    def fetch(self, fetch: Fetch) -> None:
        """Bring a transfer into our blocks.

        The fetch ends in one ``Ended`` event within the configured deadline from now, and in one ``Released``. Until
        the second the blocks must be neither used nor freed. If the agent has failed, both come at once.

        Raises:
            ArgumentError: The blocks are not the cache's or too few for the tokens, the handle is that of a fetch that
                is not released yet, or ``own`` is missing where other ranks fetch the rest.
            ClosedError: The agent has been closed.
        """
        self._check_open("fetch")
        self._calls.fetch(fetch)
        self._loop.do(partial(self._shell.fetch, fetch, time.monotonic()))

    def prepare(self, source: Source, own: Source | None = None) -> None:
        """Make the links to an engine from which fetches are to come, so that these need not wait for them.

        That is no promise: if a link cannot be made, the fetch that needs it says why.

        Args:
            source: The engine's directory.
            own: Our engine's own directory, if it has several ranks; see ``Fetch.own``.

        Raises:
            ArgumentError: An argument is of the wrong type.
            ClosedError: The agent has been closed.
        """
        self._check_open("prepare")
        arguments.instance("source", source, Source)
        if own is not None:
            arguments.instance("own", own, Source)
        self._loop.do(partial(self._shell.prepare, source, own))

    def cancel(self, handle: str, reason: str) -> None:
        """Give up a fetch that the engine no longer wants; does nothing if it is over, or was never begun.

        Raises:
            ArgumentError: An argument is of the wrong type or range.
            ClosedError: The agent has been closed.
        """
        self._check_open("cancel")
        arguments.string("handle", handle)
        arguments.string("reason", reason, MOST_REASON, empty=True)
        self._loop.do(partial(self._shell.cancel, handle, reason))

    def identify(self, facts: Mapping[str, str]) -> None:
        """State what all KV of the engine depends on from now on, after all calls made before; see ``kvxfer.facts``.

        When it changes, what is being fetched fails; peers to which other facts apply lose their links and are told
        why.

        Raises:
            ClosedError: The agent has been closed.
            ConfigError: The facts are too long.
        """
        self._check_open("identify")
        self._loop.do(partial(self._shell.identify, f.check(facts)))

    def listen(self, heard: Callable[[], None] | None) -> None:
        """Have this called whenever there are new events, once for all of a turn, on the agent's thread; it must not block.

        Without it, or with ``None``, whoever wants to know asks ``events``.

        Raises:
            ArgumentError: It is no function.
            ClosedError: The agent has been closed, and it is not ``None``.
        """
        self._owner.check()
        if heard is not None:
            self._check_open("listen")
        self._events.heard = arguments.function("heard", heard)

    def events(self, timeout: float = 0.0) -> list[Event]:
        """Return what has happened since the last call, in order; after ``close``, what is left of it.

        Args:
            timeout: Seconds to wait if nothing has happened yet. This costs no CPU. Nobody waits for a closed agent.
        """
        self._owner.check()
        return self._events.take(arguments.seconds("timeout", timeout))

    def fileno(self) -> int:
        """Return a descriptor that polls readable while ``events`` has something to return, and for good after ``close``.

        It is for ``select`` and its like, and for event loops (``kvxfer.readable`` waits for it in asyncio); it must be
        neither read nor closed.
        """
        self._owner.check()
        return self._events.fileno()

    def stats(self) -> Stats:
        """Return counts: of what is under way now, and of what has happened since the start."""
        self._owner.check()
        shell = self._shell
        return Stats(
            fetches=len(shell.consumer),
            offers=len(shell.producer),
            quarantined_bytes=self._data.quarantined_bytes,
            corrupt=shell.consumer.corrupt + shell.producer.corrupt,
            direct=shell.direct,
            staged=shell.staged,
        )

    def links(self) -> list[LinkStatus]:
        """Return the links that there are now, or are being made: those that we have dialled, then those dialled to us."""
        self._owner.check()
        return self._shell.links()

    def close(self, timeout: float = CLOSE_S) -> bool:
        """Give up all transfers, stop the threads, close sockets and back ends.

        May be called from any thread, any number of times; each call waits until all is done. Each transfer in hand
        ends, ``CANCELLED``, and is released; peers that take part in it are told.

        Args:
            timeout: Seconds to wait at the most.

        Returns:
            Whether all memory is quiet. If it is not, because a back end does not let go in time or never does, the
            cache must not be freed: transfers whose memory may still be touched are not released (a late release may
            follow).
        """
        timeout = arguments.seconds("timeout", timeout)
        return self._loop.close(timeout) if self._owner.here else False

    def drain(self, timeout: float) -> bool:
        """Let all transfers in hand come to their ends, so many seconds at the most, then close; for an engine that is to stop.

        Until then others fetch what is offered, and the engine may complete what it has begun; it should begin nothing. What is
        left then ends, and its peers are told at once. Call it once no more requests come; from any thread, also that of a
        signal's handler.

        Returns:
            Whether all memory is quiet, as ``close`` has it.
        """
        self._owner.check()
        timeout = arguments.seconds("timeout", timeout)
        idle = threading.Event()
        self._loop.do(partial(self._shell.when_idle, idle.set))  # what was called before this is known by then
        if self._loop.why is None and not idle.wait(min(timeout, threading.TIMEOUT_MAX)):
            self.begin_close(Failure(FailureKind.CANCELLED, f"the engine stops, and has waited {timeout:g} s for it"))
        return self.close()

    def begin_close(self, why: Failure = CLOSED) -> None:
        """Have the agent close and all transfers end for this reason, and return at once; the first reason counts."""
        if self._owner.here:
            self._loop.begin_close(why)

    def _check_open(self, call: str) -> None:
        """Refuse what means nothing since the engine has closed the agent. One that has failed still ends what is asked of it."""
        self._owner.check()
        if self._loop.why is not None and self._loop.why.kind is FailureKind.CANCELLED:
            raise ClosedError(f"this agent has been closed: call {call!r} before that, or make another")

    # --- control and data threads ----------------------------------------------------------------------------------

    def _post(self, result: Result | Hashed) -> None:
        self._loop.do(partial(self._result, result))

    def _result(self, result: Result | Hashed, now: float) -> list[Action]:
        return self._shell.result(result, now)  # which is made after the threads that tell of results
