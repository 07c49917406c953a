"""The agent: one for each worker process. It owns the registered cache, the data plane and the control sockets.

Engine threads only append to queues. One control thread runs the two state machines and never calls what may
block; each back end has a data thread of its own. All of these threads sleep in a poll.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, assert_never

from kvxfer import facts as f
from kvxfer.config import Config
from kvxfer.control import sockets
from kvxfer.control.endings import ProcessGuard, close_at_exit
from kvxfer.control.fences import Fences
from kvxfer.control.links import Inbound, Lost, Outbound
from kvxfer.control.resolver import Path, Resolver
from kvxfer.control.revocations import SharedRevocationCounter
from kvxfer.control.worker import Worker
from kvxfer.data import results
from kvxfer.data.hasher import Hasher
from kvxfer.data.mover import Mover
from kvxfer.data.plane import DataPlane
from kvxfer.data.policy import LinkPolicy, admit, stager
from kvxfer.errors import PeerError
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Cache, Planner
from kvxfer.identity import Source, TransferId, new_epoch
from kvxfer.protocol import messages as m
from kvxfer.protocol.consumer import ConsumerMachine
from kvxfer.protocol.producer import ProducerMachine
from kvxfer.protocol.values import (
    Abort,
    Action,
    Close,
    Dial,
    Emit,
    Ended,
    Event,
    Hash,
    Hashed,
    LinkId,
    LinkInfo,
    Move,
    Moved,
    RemoteWritesEnded,
    Resolve,
    Send,
    Stats,
)
from kvxfer.security import Complaints, Security
from kvxfer.transport import Fence, Transport
from kvxfer.transport.auto import candidates, options_for
from kvxfer.values import Fetch, Offer

__all__ = ["Agent"]

log = logging.getLogger("kvxfer.agent")

LONGEST_WAIT_S = 1.0
STALL_S = 0.5
"""A turn later than this was not waiting for anything."""
SLICE_S = 0.002
"""What a turn spends on calls, and what on messages."""
FEW = 16
"""Messages of one connection after which others have their turn; calls and messages after which the clock is looked at."""
MOST_EXAMINED = 256
"""Hellos and cards that may wait to be looked at."""
START_S = 60.0
CLOSE_S = 5.0
LINGER_S = 0.2
"""For so long, at the most, peers' connections take to hear of our end."""

CLOSED = Failure(FailureKind.CANCELLED, "the agent was closed")

Step = Callable[[float], list[Action]]
"""Something to do on the control thread, given the time."""
Ways = Iterator[tuple[Source, Path | Failure]]


class Agent:
    """Move KV in and out of one worker's cache.

    Make it once the cache is allocated. All methods may be called from any thread and return at once, save ``close``.
    In a process that was forked from the one that made it they raise ``KvxferError``, save ``close``, which does
    nothing there. The agent is closed when a ``with`` block or the interpreter ends.

    Args:
        cache: Describes memory that must stay where it is until ``close``.
        config: The settings.
        engine: The engine's name, for peers and logs.
        facts: What all KV in the cache depends on, the same as the engine's directory states; ``None`` until the engine
            says it (``identify``).

    Raises:
        ConfigError: The back end is unknown, or options or facts are bad.
        TransportError: The back end cannot start.
        KvxferError: Checks are asked for that cannot be made here.
        OSError: No port can be had.
    """

    def __init__(self, cache: Cache, config: Config, engine: str = "", facts: Mapping[str, str] | None = None) -> None:
        cache.check()
        self._facts = None if facts is None else f.check(facts)
        self.cache, self.config, self.epoch = cache, config, new_epoch()
        self._owner = ProcessGuard("this agent")
        self._name = f"{engine or 'engine'}-{cache.rank.pp}.{cache.rank.tp}-{self.epoch:x}"
        self._backends = candidates(config, (r.device for r in cache.regions))
        self._inbox: deque[Step] = deque()
        self._taken = 0  # of what has been in the inbox
        self._revocations = SharedRevocationCounter()
        try:
            self._sockets = sockets.ControlSockets(Security.of(config), self._inbox)
        except BaseException:
            self._revocations.close()
            raise
        self._data = DataPlane(
            tuple(self._backends),
            self._mover,
            lambda name, caps, staging: LinkPolicy.of(name, caps, staging, cache, config.integrity),
        )
        self._hasher = Hasher(cache, self._post)
        self._examiner = Worker("kvxfer-examine", MOST_EXAMINED)
        self._events: deque[Event] = deque()
        self._closing: Failure | None = None
        self._close_s = 0.0  # the longest that anybody has who closes it
        self._over = False
        self._late = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvxfer-control", daemon=True)
        try:
            if config.integrity != "off":
                self._hasher.get_ready()
            self._data.start(START_S)
            port = self._sockets.listen(config.listen, 0, None)
        except BaseException:
            self._stop_others(CLOSE_S)
            self._sockets.close()
            raise
        address = sockets.address(config.advertise or config.listen, port)
        self.member = m.RankDescriptor(address, self.epoch, cache, self._data.candidates)
        self._consumer = ConsumerMachine(config.transfer_timeout)
        self._producer = ProducerMachine(config.lease, max(config.lease, config.transfer_timeout), self._revocations)
        self._fences = Fences()
        self._in = Inbound(
            self._sockets,
            self._data,
            cache,
            self.epoch,
            config.peer_timeout,
            self._revocations.place,
            self._examine_hello,
        )
        stated = self._facts or {}
        self._out = Outbound(self._sockets, self._data, cache, self.epoch, engine, config.peer_timeout, stated)
        self._resolver = Resolver(self._sockets, self.member, config.transfer_timeout, stated, self._examine_card)
        self._complain = Complaints(log)
        self._awake = time.monotonic()
        self._direct = self._staged = 0
        self._thread.start()
        close_at_exit(self)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mover(self, name: str) -> Mover:
        regions = self.cache.regions
        return Mover(
            name,
            partial(self._transport, name),
            regions,
            stager(self.cache, self.config.staging_bytes),
            self._post,
            grace=self.config.peer_timeout,
            quarantine_limit=sum(r.nbytes for r in regions) // 4,
        )

    def _transport(self, name: str) -> Transport:
        """Make a back end, on its data thread: that may take seconds."""
        backend = self._backends[name]
        return backend(self._name, options_for(backend, self.config))

    # --- any thread ------------------------------------------------------------------------------------------------

    def offer(self, offer: Offer, after: Fence | None = None) -> None:
        """Let consumers have these blocks.

        The offer ends in one ``Ended`` and one ``Released`` event; until the second the blocks must not be reused. If
        the agent is closed, both come at once.

        Args:
            offer: The transfer, its generation and its blocks.
            after: The fence behind which the blocks' content is complete; ``None`` when it is complete already.
        """
        self._owner.check()
        self._revocations.offered(offer.transfer, offer.generation)
        self._do(partial(self._offer, offer, after, time.monotonic()))

    def revoke(self, transfer: TransferId, generation: int, reason: str, gone: bool) -> None:
        """Give up the blocks of a generation; whoever has read them will be told not to trust them.

        Call it before the blocks are used for something else; once it has returned they may be.

        Args:
            transfer: The transfer.
            generation: The generation whose blocks are given up.
            reason: Why, for the consumer and the log.
            gone: Whether it is for good. Then the transfer ends, with its two events unless they have come before.
        """
        self._owner.check()
        declared = self._revocations.declare(transfer)  # the engine may use the blocks before our thread comes to it
        self._do(partial(self._revoke, transfer, generation, reason, gone, declared))

    def renew(self, transfer: TransferId) -> None:
        """Keep an offer's lease: its consumer is alive, though it has not come yet."""
        self._owner.check()
        self._do(partial(self._renew, transfer))

    def fetch(self, fetch: Fetch) -> None:
        """Bring a transfer into our blocks.

        The fetch ends in one ``Ended`` event within the configured deadline from now, and in one ``Released``. Until
        the second the blocks must be neither used nor freed. If the agent is closed, both come at once. A handle that
        is in use already is an error of the engine, which is logged; the fetch that has it goes on.
        """
        self._owner.check()
        self._do(partial(self._consumer.fetch, fetch, called=time.monotonic()))

    def cancel(self, handle: str, reason: str) -> None:
        """Give up a fetch that the engine no longer wants."""
        self._owner.check()
        self._do(partial(self._consumer.cancel, handle, reason))

    def identify(self, facts: Mapping[str, str]) -> None:
        """State what all KV of the engine depends on from now on, after all calls made before; see ``kvxfer.facts``.

        When it changes, what is being fetched fails; peers to which other facts apply lose their links and are told
        why.

        Raises:
            ConfigError: The facts are too long.
        """
        self._do(partial(self._identify, f.check(facts)))

    def events(self) -> list[Event]:
        """Return outcomes and releases since the last call, in order; after ``close``, what is left of them."""
        self._owner.check()
        out: list[Event] = []
        with contextlib.suppress(IndexError):
            while True:
                out.append(self._events.popleft())
        return out

    def stats(self) -> Stats:
        """Return what there is now, and what has been counted."""
        self._owner.check()
        return Stats(
            fetches=len(self._consumer),
            offers=len(self._producer),
            quarantined_bytes=self._data.quarantined_bytes,
            corrupt=self._consumer.corrupt + self._producer.corrupt,
            direct=self._direct,
            staged=self._staged,
        )

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
        if not self._owner.here:
            return False
        self._close_s = max(self._close_s, timeout)
        self.begin_close()
        if threading.current_thread() is not self._thread and not self._closed.wait(timeout + LINGER_S + 0.1):
            log.error("the agent did not close within %g s; its threads are abandoned", timeout)
        return self._over and not self._held

    def begin_close(self, why: Failure = CLOSED) -> None:
        """Have the agent close and all transfers end for this reason, and return at once; the first reason counts."""
        if self._owner.here and self._closing is None:
            self._closing = why
            self._revocations.close()
            self._sockets.wake()

    def _do(self, step: Step) -> None:
        self._inbox.append(step)
        if self._over:
            self._drain_late()
        else:
            self._sockets.wake()

    def _examine(self, weight: int, job: Callable[[], Any], done: Callable[[Any, float], list[Action]]) -> bool:
        """Have a job done off the control thread, and its result taken in there.

        Args:
            weight: About what the job costs, in any unit; light jobs go first.
            job: What is done.
            done: Called on the control thread with the job's result, or the ``Failure`` why there is none, and the
                time.

        Returns:
            False when too many jobs wait already; then this one is not done.
        """

        def examine() -> None:
            try:
                found = job()
            except (PeerError, ValueError) as e:
                found = Failure.of(e, FailureKind.INCOMPATIBLE)
            except Exception as e:
                log.exception("something could not be examined")
                found = Failure(FailureKind.MISUSE, f"it could not be examined: {e!r}")
            self._do(partial(done, found))

        return self._examiner.submit(weight, examine)

    def _post(self, result: results.Result | Hashed) -> None:
        self._do(partial(self._result, result))

    # --- the control thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._closing is None:
                try:
                    self._turn()
                except BaseException:
                    log.exception("something could not be handled; it is dropped")
        except BaseException as e:
            self.begin_close(Failure(FailureKind.BACKEND_FAILED, f"the control thread has died: {e!r}"))
            raise
        finally:
            self._end()

    def _end(self) -> None:
        """End all transfers, then whatever may touch their memory, then the sockets, which nobody else may close."""
        why = self._closing or CLOSED
        try:
            self._drain()
            self._take(partial(self._producer.close, why))
            self._take(partial(self._consumer.close, why))
            for offer, called in self._fences.close():
                self._take(partial(self._unfenced, offer, called, None))
            self._drain()
            self._sockets.flush()
            self._stop_others(self._close_s or CLOSE_S)
            self._drain()  # what those had still to say, which may be news for peers
            self._sockets.linger(LINGER_S)
            self._sockets.close()
        finally:
            self._over = True
            self._drain_late()
            if self._held:
                log.error(
                    "memory of %d transfers that have ended may still be touched; it must not be freed", self._held
                )
            self._closed.set()

    @property
    def _held(self) -> int:
        """How many transfers are not released."""
        return len(self._consumer) + len(self._producer)

    def _stop_others(self, timeout: float) -> None:
        """End what works for the control thread."""
        until = time.monotonic() + timeout
        self._revocations.close()
        self._examiner.close(timeout)
        self._hasher.close(max(until - time.monotonic(), 0.1))
        self._data.close(max(until - time.monotonic(), 0.1))

    def _turn(self) -> None:
        """Look at what is due, then take in calls, then what peers have said.

        Of calls and messages only some are taken in each turn, so that neither keeps the other waiting.
        """
        news = self._sockets.poll(self._wait())
        now = time.monotonic()
        self._pardon(now)
        # What the engine has said before a message came counts: a check must meet every revocation.
        said = self._taken + len(self._inbox)
        for connection in news:
            connection.after = said
        self._timers(now)
        self._drain(time.monotonic() + SLICE_S)
        self._hear(time.monotonic() + SLICE_S)
        self._sockets.flush()

    def _pardon(self, now: float) -> None:
        """Do not count time in which this process did not run as the peers' silence.

        While the process or its host was stopped, frozen or starved, nobody could be heard.
        """
        stalled, self._awake = now - self._awake - LONGEST_WAIT_S, now
        if stalled > STALL_S:
            log.warning("this process did not run for about %.1f s", stalled)
            self._in.pardon(stalled)
            self._out.pardon(stalled)

    def _wait(self) -> float:
        """Return the seconds until something is due."""
        if self._fences:
            return 0.001
        clocks = self._consumer, self._producer, self._resolver, self._out, self._in
        due = [t for clock in clocks if (t := clock.next_tick()) is not None]
        return min(max(min(due, default=1e18) - time.monotonic(), 0.001), LONGEST_WAIT_S)

    def _drain(self, until: float = math.inf) -> None:
        """Take in what the engine and the data thread have said, up to this time."""
        while self._inbox:
            for _ in range(min(FEW, len(self._inbox))):
                self._taken += 1
                self._take(self._inbox.popleft())
            if time.monotonic() >= until:
                return

    def _hear(self, until: float) -> None:
        """Take in what peers have said, each in its turn, up to this time."""
        for connection in self._sockets.ready():
            if connection.after > self._taken:
                continue
            for _ in range(FEW):
                frame = connection.receive()
                if frame is None:
                    break
                self._take(partial(self._frame, connection, frame))
            if connection.lost is not None and not connection.ready:
                self._take(partial(self._hung_up, connection))
            if time.monotonic() >= until:
                return

    def _frame(self, connection: sockets.Connection, frame: bytes, now: float) -> list[Action]:
        match connection.owner:
            case None:
                return self._from_consumer(connection, frame, now)
            case Outbound(), link:
                return self._from_producer(link, self._out.receive(link, connection, frame, now), now)
            case Resolver(), directory:
                return self._ways(self._resolver.receive(directory, frame), now)
        raise AssertionError(connection.owner)

    def _hung_up(self, connection: sockets.Connection, now: float) -> list[Action]:
        match connection.owner:
            case None:
                why = self._in.hung_up(connection)
                return [] if why is None else self._producer.link_down(connection.name, why, now)
            case Outbound(), link:
                return self._from_producer(link, self._out.hung_up(link, connection), now)
            case Resolver(), directory:
                self._resolver.hung_up(directory, connection)
        return []

    def _drain_late(self) -> None:
        """Take in what is said once the control thread has ended, on the thread that says it, one thread at a time."""
        with self._late:
            self._drain()

    def _take(self, step: Step) -> None:
        """Do one thing; whatever goes wrong with it must not keep others from being done."""
        try:
            self._perform(step(time.monotonic()))
        except PeerError as e:
            self._complain("ignored a message: %s", e)
        except BaseException:  # of what engines and back ends raise, anything may be
            log.exception("something could not be handled; it is dropped")

    def _timers(self, now: float) -> None:
        for offer, called, error in self._fences.passed():
            self._take(partial(self._unfenced, offer, called, error))
        self._deadlines()
        for source, failure in self._resolver.tick(now):
            self._take(partial(self._resolved, source, failure))
        # Silence is judged by the time at which all was read that had come: if we stand still after it, that is not seen as theirs.
        for link, lost in self._out.tick(now):
            self._take(partial(self._lost, link, lost))
        for link, why in self._in.tick(now):
            self._take(partial(self._producer.link_down, link, why))

    def _deadlines(self) -> None:
        """Have the machines do what is due."""
        now = time.monotonic()
        for machine in (self._consumer, self._producer):
            due = machine.next_tick()
            if due is not None and due <= now:
                self._take(machine.tick)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            try:
                self._act(action, time.monotonic())
            except PeerError as e:
                self._failed(action, Failure.of(e, FailureKind.PEER_LOST))
            except BaseException as e:
                log.exception("an action failed: %s", type(action).__name__)
                self._failed(action, Failure.of(e, FailureKind.PEER_LOST))

    def _failed(self, action: Action, why: Failure) -> None:
        """Count the link as lost whose action could not be done."""
        if isinstance(action, Send | Dial):
            link = action.link
            if isinstance(action, Dial) or link in self._out:
                self._do(partial(self._consumer.link_down, link, why))
            else:
                self._in.drop(link)
                self._do(partial(self._producer.link_down, link, why))

    def _act(self, action: Action, now: float) -> None:
        if self._over and not isinstance(action, Emit):
            return
        match action:
            case Send():
                owner = self._in if isinstance(action.link, bytes) else self._out
                owner.send(action.link, action.message)
            case Move():
                self._direct += not action.piece_bytes
                self._staged += bool(action.piece_bytes)
                self._data.move(action)
            case Abort():
                self._data.abort(action.ref)
                self._hasher.cancel(action.ref)
            case RemoteWritesEnded():
                self._data.remote_writes_ended(action.ref)
            case Hash():
                self._hasher.hash(action)
            case Emit(event=event):
                self._events.append(event)
                if isinstance(event, Ended):
                    self._ended(event)
            case Dial():
                self._out.dial(action.link, now)
            case Close(link=bytes() as link):
                self._in.close(link, action.why)
                self._do(partial(self._producer.link_down, link, action.why))
            case Close():
                self._out.forget(action.link)
            case Resolve():
                why = self._resolver.ask(action.source, action.own, now)
                if why is not None:
                    self._do(partial(self._consumer.resolved, action.source, why))
            case _:
                assert_never(action)

    def _ended(self, e: Ended) -> None:
        if e.role == "producer":
            self._revocations.over(e.transfer, e.generation)
        if e.outcome.failure is not None:
            log.warning("%s: request %s, transfer %s: %s", e.role, e.handle, e.transfer, e.outcome.failure)

    def _from_consumer(self, connection: sockets.Connection, frame: bytes, now: float) -> list[Action]:
        found = self._in.receive(connection, frame, now)
        if found is None:
            return []
        link, msg = found
        if isinstance(msg, m.SlotFree):
            self._data.slot(self._in.ref(link, msg), msg.piece, 0, 0)
        elif isinstance(msg, m.SlotReady):
            self._data.slot(self._in.ref(link, msg), msg.piece, msg.offset, msg.nbytes)
        else:
            return self._producer.message(link, msg, now)
        return []

    def _from_producer(self, link: LinkId, item: m.Message | Lost | None, now: float) -> list[Action]:
        if item is None:
            return []
        if isinstance(item, Lost):
            return self._lost(link, item, now)
        if isinstance(item, m.SlotReady):
            self._data.slot(self._out.ref(link, item), item.piece, item.offset, item.nbytes)
            return []
        return self._consumer.message(link, item, now)

    def _examine_hello(self, link: LinkId, hello: m.Hello, nbytes: int) -> bool:
        job = partial(admit, hello, self._data.candidates, self.cache, self.epoch, self._facts)
        return self._examine(nbytes, job, partial(self._examined, link))

    def _examined(self, link: LinkId, found: Planner | Failure, now: float) -> list[Action]:
        self._in.examined(link, found, now)
        return []

    def _examine_card(self, weight: int, job: Callable[[], Any], done: Callable[[Any], Ways]) -> bool:
        return self._examine(weight, job, lambda found, now: self._ways(done(found), now))

    def _ways(self, ways: Ways, now: float) -> list[Action]:
        return [action for source, path in ways for action in self._resolved(source, path, now)]

    def _lost(self, link: LinkId, lost: Lost, now: float) -> list[Action]:
        if lost.again:
            return self._consumer.link_reset(link, lost.why, now)
        return self._consumer.link_down(link, lost.why, now)

    def _resolved(self, source: Source, route: Path | Failure, now: float) -> list[Action]:
        if isinstance(route, Failure):
            return self._consumer.resolved(source, route, now)
        self._out.know(route.targets)
        return self._consumer.resolved(source, route.resolved, now)

    def _result(self, result: results.Result | Hashed, now: float) -> list[Action]:
        match result:
            case Moved():
                machine = self._consumer if result.ref.role == "consumer" else self._producer
                return machine.moved(result, now)
            case Hashed():
                machine = self._consumer if result.ref.role == "consumer" else self._producer
                return machine.hashed(result, now)
            case results.EndpointMade() | results.Connected() | results.Broken():
                return self._linked(result, now)
            case results.Disconnected():
                closed = self._data.disconnected(result.link)
                return self._consumer.link_closed(result.link, now) if closed else []
            case results.PieceReady():
                r = result.ref
                slot = m.SlotReady(r.transfer, r.attempt, r.part, result.piece, result.offset, result.nbytes)
                (self._in if r.role == "producer" else self._out).send(r.link, slot)
            case results.PieceTaken():
                r = result.ref
                self._out.send(r.link, m.SlotFree(r.transfer, r.attempt, r.part, result.piece))
            case results.Reset():
                return self._reset(result.backend, result.failure.about("the back end was reset: "), now)
            case results.Died():
                self.begin_close(result.failure)
            case _:
                assert_never(result)
        return []

    def _linked(self, result: results.EndpointMade | results.Connected | results.Broken, now: float) -> list[Action]:
        """Take in what the data thread says about a link."""
        link = result.link
        if isinstance(link, bytes):
            found = self._in.result(result, now)
            if isinstance(found, Lost):
                return self._producer.link_down(link, found.why, now)
            return self._producer.link_up(link, found, now) if isinstance(found, LinkInfo) else []
        up = self._out.result(result, now)
        if isinstance(up, Lost):
            return self._lost(link, up, now)
        return self._consumer.link_up(link, up, now) if isinstance(up, LinkInfo) else []

    def _reset(self, backend: str, why: Failure, now: float) -> list[Action]:
        out: list[Action] = []
        for link in self._out.of(backend):
            out += self._consumer.link_reset(link, why, now)
        for link in self._in.reset(backend, why):
            out += self._producer.link_down(link, why, now)
        return out

    # --- engine calls, on the control thread -----------------------------------------------------------------------

    def _offer(self, offer: Offer, after: Fence | None, called: float, now: float) -> list[Action]:
        return [] if self._fences.hold(offer, after, called) else self._unfenced(offer, called, None, now)

    def _unfenced(self, offer: Offer, called: float, error: str | None, now: float) -> list[Action]:
        if error is None:
            out = self._producer.offer(offer, now, called)
        else:
            why = Failure(FailureKind.BACKEND_FAILED, f"its fence failed: {error}")
            out = self._producer.revoke(offer.transfer, offer.generation, why, True, now)
        self._forget_if_over(offer.transfer, offer.generation)
        return out

    def _revoke(
        self, transfer: TransferId, generation: int, reason: str, gone: bool, declared: bool, now: float
    ) -> list[Action]:
        self._fences.forget(transfer, generation)
        why = Failure(FailureKind.WITHDRAWN if gone else FailureKind.REVOKED, reason)
        out = self._producer.revoke(transfer, generation, why, gone, now)
        if declared:
            self._revocations.take_in()
        self._forget_if_over(transfer, generation)
        return out

    def _forget_if_over(self, transfer: TransferId, generation: int) -> None:
        """Forget a revocation counter's entry of a transfer that the producer does not hold.

        Offers that come too late, or are taken back before they were announced, have no end of their own.
        """
        if not self._producer.holds(transfer):
            self._revocations.over(transfer, generation)

    def _identify(self, facts: dict[str, str], now: float) -> list[Action]:
        if facts == self._facts:
            return []
        self._facts = self._resolver.facts = facts
        out: list[Action] = []
        another = Failure(FailureKind.INCOMPATIBLE, "the model of this engine is another one now")
        for link in self._out.identify(facts):
            out += self._consumer.link_down(link, another, now)
        for link, why in self._in.identify(facts):
            out += self._producer.link_down(link, why, now)
        return out

    def _renew(self, transfer: TransferId, now: float) -> list[Action]:
        self._producer.renew(transfer, now)
        return []
