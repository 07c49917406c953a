"""The agent: one per worker process. Owns the registered cache, a back end and the control sockets.

Engine threads only append to queues. One control thread runs the two state machines and never calls what may
block; the mover's data thread owns the back end. Both sleep in a poll.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from kvxfer.config import Config
from kvxfer.errors import PeerError
from kvxfer.geometry import Cache
from kvxfer.identity import Source, TransferId, new_epoch
from kvxfer.security import Complaints, Security
from kvxfer.session import messages as m
from kvxfer.session import results, wire
from kvxfer.session.consumer import Consumer
from kvxfer.session.fences import Fences
from kvxfer.session.hasher import Hasher
from kvxfer.session.links import Inbound, Lost, Outbound
from kvxfer.session.mover import Mover
from kvxfer.session.movers import Movers
from kvxfer.session.producer import Producer
from kvxfer.session.resolver import Path, Resolver
from kvxfer.session.tally import SharedTally
from kvxfer.session.terms import Terms, stager
from kvxfer.session.values import (
    Abort,
    Acquit,
    Action,
    Close,
    Dial,
    Ended,
    Event,
    Fetch,
    Hash,
    Hashed,
    LinkId,
    LinkInfo,
    Move,
    Moved,
    Offered,
    Report,
    Resolve,
    Send,
    Stats,
)
from kvxfer.transport import Fence, Transport, load
from kvxfer.transport.auto import lineup, options_of

__all__ = ["Agent"]

log = logging.getLogger("kvxfer.agent")

LONGEST_WAIT_S = 1.0
STALL_S = 0.5
"""A turn later than this was not waiting for anything."""
START_S = 60.0

Step = Callable[[float], list[Action]]
"""Something to do on the control thread, given the time."""


class Agent:
    """Move KV in and out of one worker's cache.

    Make it once the cache is allocated; ``cache`` describes memory that must stay where it is until ``close``. Raises
    ``ConfigError`` (unknown back end, bad options), ``TransportError`` (it cannot start), ``KvxferError`` (checks are asked for
    that cannot be made here) or ``OSError`` (no port).
    All methods may be called from any thread and return at once, save ``close``.
    """

    def __init__(self, cache: Cache, config: Config, engine: str = "") -> None:
        cache.check()
        self.cache, self.config, self.epoch = cache, config, new_epoch()
        self._name = f"{engine or 'engine'}-{cache.rank.pp}.{cache.rank.tp}-{self.epoch:x}"
        backends = lineup(config.backend, (r.device for r in cache.regions))
        self._hub = wire.Hub(Security.of(config))
        self._tally = SharedTally()
        self._movers = Movers(
            backends, self._mover, lambda name, caps, staging: Terms.of(name, caps, staging, cache, config.integrity)
        )
        self._hasher = Hasher(cache, self._post)
        self._inbox: deque[Step] = deque()
        self._events: deque[Event] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvxfer-control", daemon=True)
        try:
            if config.integrity != "off":
                self._hasher.get_ready()
            self._movers.start(START_S)
            self._router, port = self._hub.listen(config.listen, 0)
        except BaseException:
            self.close()
            raise
        address = wire.address(config.advertise or config.listen, port)
        self.member = m.Member(address, self.epoch, cache, self._movers.lineup)
        self._consumer = Consumer(config.transfer_timeout)
        self._producer = Producer(config.lease, self._tally)
        self._fences = Fences()
        self._in = Inbound(self._router, self._movers, cache, self.epoch, config.peer_timeout, self._tally.place)
        self._out = Outbound(self._hub, self._movers, cache, self.epoch, engine, config.peer_timeout)
        self._resolver = Resolver(self._hub, self.member, config.transfer_timeout)
        self._complain = Complaints(log)
        self._awake = time.monotonic()
        self._direct = self._staged = 0
        self._thread.start()

    def _mover(self, name: str) -> Mover:
        regions = self.cache.regions
        return Mover(
            name, partial(self._transport, name), regions, stager(self.cache, self.config.staging_bytes), self._post,
            grace=self.config.peer_timeout, quarantine_limit=sum(r.nbytes for r in regions) // 4,
        )  # fmt: skip

    def _transport(self, name: str) -> Transport:
        """Load a back end and make it, on its data thread: that may take seconds."""
        config = self.config
        backend, options = load(name), options_of(name, config.backend, config.backend_options)
        if not backend.inherits & options.keys():  # an address set for the back end goes with none of ours
            ours = {"listen": config.listen, "advertise": config.advertise or config.listen}
            options = {**options, **{key: ours[key] for key in backend.inherits}}
        return backend(self._name, options)

    # --- any thread ------------------------------------------------------------------------------------------------

    def offer(self, offer: Offered, after: Fence | None = None) -> None:
        """Let consumers have these blocks. ``after``: the fence behind which their content is complete. Ends in one
        ``Ended`` and one ``Released`` event; until then the blocks must not be reused."""
        self._tally.offered(offer.transfer, offer.generation)
        self._do(partial(self._offer, offer, after))

    def revoke(self, transfer: TransferId, generation: int, reason: str, gone: bool) -> None:
        """Blocks of this generation are given up; whoever has read them will be told not to trust them. Call it before
        they are used for something else; once it has returned they may be. ``gone``: for good. Then the transfer ends,
        with its two events unless they have come before."""
        declared = self._tally.declare(transfer)  # the engine may use the blocks before our thread comes to it
        self._do(partial(self._revoke, transfer, generation, reason, gone, declared))

    def renew(self, transfer: TransferId) -> None:
        """Keep an offer's lease: its consumer is alive, though it has not come yet."""
        self._do(partial(self._renew, transfer))

    def fetch(self, fetch: Fetch) -> None:
        """Bring a transfer into our blocks. Ends in one ``Ended`` within the configured deadline, and in one
        ``Released``, until which the blocks must be neither used nor freed. A handle in use is an error of the engine
        that is logged; the fetch that has it goes on."""
        self._do(partial(self._consumer.fetch, fetch))

    def cancel(self, handle: str, reason: str) -> None:
        """The engine no longer wants this fetch."""
        self._do(partial(self._consumer.cancel, handle, reason))

    def events(self) -> list[Event]:
        """Outcomes and releases since the last call, in order."""
        out: list[Event] = []
        with contextlib.suppress(IndexError):
            while True:
                out.append(self._events.popleft())
        return out

    def stats(self) -> Stats:
        """What there is now, and what has been counted."""
        return Stats(
            fetches=len(self._consumer), holdings=len(self._producer), quarantined_bytes=self._movers.quarantined_bytes,
            corrupt=self._consumer.corrupt + self._producer.corrupt, direct=self._direct, staged=self._staged,
        )  # fmt: skip

    def close(self, timeout: float = 5.0) -> None:
        """Stop threads, close sockets and the back end; memory is quiet afterwards. Idempotent."""
        self._closing = True
        self._tally.close()
        self._hub.wake()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._hasher.close(timeout)
        self._movers.close(timeout)
        if not self._thread.is_alive():
            self._hub.close()

    def _do(self, step: Step) -> None:
        self._inbox.append(step)
        self._hub.wake()

    def _post(self, result: results.Result | Hashed) -> None:
        self._do(partial(self._result, result))

    # --- the control thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception:
                log.exception("something could not be handled; it is dropped")

    def _turn(self) -> None:
        ready = self._hub.poll(self._wait())
        # Silence is judged by this one reading: if we stand still later in the turn, the next one sees that before it judges.
        now = time.monotonic()
        self._pardon(now)
        self._drain()
        if self._router in ready:
            self._read_router(now)
        for link, item in self._out.receive(ready, now):
            self._take(partial(self._from_producer, link, item))
        for source, route in self._resolver.receive(ready, now):
            self._take(partial(self._resolved, source, route))
        self._timers(now)

    def _pardon(self, now: float) -> None:
        """While this process or its host did not run (stopped, frozen, starved), nobody could be heard: that is not the
        peers' silence."""
        stalled, self._awake = now - self._awake - LONGEST_WAIT_S, now
        if stalled > STALL_S:
            log.warning("this process did not run for about %.1f s", stalled)
            self._in.pardon(stalled)
            self._out.pardon(stalled)

    def _wait(self) -> float:
        """Seconds until something is due."""
        if self._fences:
            return 0.001
        clocks = self._consumer, self._producer, self._resolver, self._out, self._in
        due = [t for clock in clocks if (t := clock.next_tick()) is not None]
        return min(max(min(due, default=1e18) - time.monotonic(), 0.001), LONGEST_WAIT_S)

    def _drain(self) -> None:
        """Take in what the engine and the data thread have said."""
        while self._inbox:
            self._take(self._inbox.popleft())

    def _take(self, step: Step) -> None:
        """Do one thing; whatever goes wrong with it must not keep others from being done."""
        try:
            self._perform(step(time.monotonic()))
        except Exception:
            log.exception("something could not be handled; it is dropped")

    def _timers(self, now: float) -> None:
        for offer, error in self._fences.passed():
            self._take(partial(self._unfenced, offer, error))
        self._take(self._consumer.tick)
        self._take(self._producer.tick)
        for source, why in self._resolver.tick(now):
            self._take(partial(self._resolved, source, why))
        for link, lost in self._out.tick(now):
            self._take(partial(self._lost, link, lost))
        for link, reason in self._in.tick(now):
            self._take(partial(self._producer.link_down, link, reason))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            try:
                self._act(action, time.monotonic())
            except PeerError as e:
                self._failed(action, str(e))
            except Exception as e:
                log.exception("an action failed: %s", type(action).__name__)
                self._failed(action, str(e))

    def _failed(self, action: Action, why: str) -> None:
        """An action that concerns a link could not be done: the link is lost."""
        if isinstance(action, Send | Dial):
            link = action.link
            if isinstance(action, Dial) or link in self._out:
                self._do(partial(self._consumer.link_down, link, why))
            else:
                self._in.drop(link)
                self._do(partial(self._producer.link_down, link, why))

    def _act(self, action: Action, now: float) -> None:
        match action:
            case Send():
                owner = self._in if isinstance(action.link, bytes) else self._out
                owner.send(action.link, action.message)
            case Move():
                self._direct += not action.piece_bytes
                self._staged += bool(action.piece_bytes)
                self._movers.move(action)
            case Abort():
                self._movers.abort(action.ref)
                self._hasher.cancel(action.ref)
            case Acquit():
                self._movers.acquit(action.ref)
            case Hash():
                self._hasher.hash(action)
            case Report(event=event):
                self._events.append(event)
                if isinstance(event, Ended):
                    self._ended(event)
            case Dial():
                self._out.dial(action.link, now)
            case Close(link=bytes() as link):
                self._in.close(link, action.reason)
                self._do(partial(self._producer.link_down, link, action.reason))
            case Close():
                self._out.forget(action.link)
            case Resolve():
                why = self._resolver.ask(action.source, action.own, now)
                if why is not None:
                    self._do(partial(self._consumer.resolved, action.source, why))

    def _ended(self, e: Ended) -> None:
        if e.role == "producer":
            self._tally.over(e.transfer, e.generation)
        if not e.outcome.delivered:
            log.warning("%s of %s %s: %s", e.role, e.transfer, e.outcome.kind, e.outcome.reason)

    def _read_router(self, now: float) -> None:
        for _ in range(256):  # a flood from outside must not keep the rest waiting
            frames = wire.receive(self._router)
            if frames is None:
                return
            # What the engine has said before this message was taken in counts: a check must meet every revocation.
            self._drain()
            try:
                found = self._in.receive(frames, now)
            except PeerError as e:
                self._complain("ignored a message: %s", e)
                continue
            if found is None:
                continue
            link, msg = found
            if isinstance(msg, m.Taken):
                self._movers.slot(self._in.ref(link, msg), msg.piece, 0, 0)
            elif isinstance(msg, m.Slot):
                self._movers.slot(self._in.ref(link, msg), msg.piece, msg.offset, msg.nbytes)
            else:
                self._take(partial(self._producer.message, link, msg))

    def _from_producer(self, link: LinkId, item: m.Message | Lost, now: float) -> list[Action]:
        if isinstance(item, Lost):
            return self._lost(link, item, now)
        if isinstance(item, m.Slot):
            self._movers.slot(self._out.ref(link, item), item.piece, item.offset, item.nbytes)
            return []
        return self._consumer.message(link, item, now)

    def _lost(self, link: LinkId, lost: Lost, now: float) -> list[Action]:
        if lost.again:
            return self._consumer.link_reset(link, lost.reason, now)
        return self._consumer.link_down(link, lost.reason, now)

    def _resolved(self, source: Source, route: Path | str, now: float) -> list[Action]:
        if isinstance(route, str):
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
            case results.Endpoint() | results.Connected() | results.Broken():
                return self._linked(result, now)
            case results.Disconnected():
                closed = self._movers.disconnected(result.link)
                return self._consumer.link_closed(result.link, now) if closed else []
            case results.SlotReady():
                r = result.ref
                slot = m.Slot(r.transfer, r.attempt, r.part, result.piece, result.offset, result.nbytes)
                (self._in if r.role == "producer" else self._out).send(r.link, slot)
            case results.SlotTaken():
                r = result.ref
                self._out.send(r.link, m.Taken(r.transfer, r.attempt, r.part, result.piece))
            case results.Reset():
                return self._reset(result.backend, f"the back end was reset: {result.reason}", now)
        return []

    def _linked(self, result: results.Endpoint | results.Connected | results.Broken, now: float) -> list[Action]:
        """The data thread's word about a link."""
        link = result.link
        if isinstance(link, bytes):
            found = self._in.result(result, now)
            if isinstance(found, Lost):
                return self._producer.link_down(link, found.reason, now)
            return self._producer.link_up(link, found, now) if isinstance(found, LinkInfo) else []
        up = self._out.result(result, now)
        if isinstance(up, Lost):
            return self._lost(link, up, now)
        return self._consumer.link_up(link, up, now) if isinstance(up, LinkInfo) else []

    def _reset(self, backend: str, reason: str, now: float) -> list[Action]:
        out: list[Action] = []
        for link in self._out.of(backend):
            out += self._consumer.link_reset(link, reason, now)
        for link in self._in.reset(backend, reason):
            out += self._producer.link_down(link, reason, now)
        return out

    # --- engine calls, on the control thread -----------------------------------------------------------------------

    def _offer(self, offer: Offered, after: Fence | None, now: float) -> list[Action]:
        return [] if self._fences.hold(offer, after) else self._unfenced(offer, None, now)

    def _unfenced(self, offer: Offered, error: str | None, now: float) -> list[Action]:
        if error is None:
            out = self._producer.offer(offer, now)
        else:
            out = self._producer.revoke(offer.transfer, offer.generation, f"its fence failed: {error}", True, now)
        self._forget_if_over(offer.transfer, offer.generation)
        return out

    def _revoke(
        self, transfer: TransferId, generation: int, reason: str, gone: bool, declared: bool, now: float
    ) -> list[Action]:  # fmt: skip
        self._fences.forget(transfer, generation)
        out = self._producer.revoke(transfer, generation, reason, gone, now)
        if declared:
            self._tally.take_in()
        self._forget_if_over(transfer, generation)
        return out

    def _forget_if_over(self, transfer: TransferId, generation: int) -> None:
        """Offers that come too late, or are taken back before they were announced, have no end of their own."""
        if not self._producer.holds(transfer):
            self._tally.over(transfer, generation)

    def _renew(self, transfer: TransferId, now: float) -> list[Action]:
        self._producer.renew(transfer, now)
        return []
