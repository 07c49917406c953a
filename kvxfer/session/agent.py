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

import zmq

from kvxfer.config import Config
from kvxfer.errors import ConfigError, PeerError
from kvxfer.geometry import Cache
from kvxfer.identity import TransferId, new_epoch
from kvxfer.session import messages as m
from kvxfer.session import mover as mv
from kvxfer.session import wire
from kvxfer.session.consumer import Consumer
from kvxfer.session.links import Inbound, Outbound
from kvxfer.session.producer import Offered, Producer
from kvxfer.session.resolver import Resolver
from kvxfer.session.terms import Terms, stager
from kvxfer.session.values import (
    Abort,
    Action,
    Close,
    Dial,
    Ended,
    Event,
    Fetch,
    LinkId,
    Move,
    Moved,
    Report,
    Resolve,
    Send,
)
from kvxfer.transport import Fence, load

__all__ = ["Agent"]

log = logging.getLogger("kvxfer.agent")

START_S = 60.0


class Agent:
    """Move KV in and out of one worker's cache.

    Make it once the cache is allocated; ``cache`` describes memory that must stay where it is until ``close``. Raises
    ``ConfigError`` (unknown back end, bad options), ``TransportError`` (it cannot start) or ``OSError`` (no port).
    All methods may be called from any thread and return at once, save ``close``.
    """

    def __init__(self, cache: Cache, config: Config, engine: str = "") -> None:
        cache.check()
        self.cache, self.config, self.epoch = cache, config, new_epoch()
        backend = load(config.backend)
        name = f"{engine or 'engine'}-{cache.rank.pp}.{cache.rank.tp}-{self.epoch:x}"
        self._mover = mv.Mover(
            lambda: backend(name, config.backend_options), cache.regions, stager(cache, config.staging_bytes),
            self._post, grace=config.peer_timeout, quarantine_limit=sum(r.nbytes for r in cache.regions) // 4,
        )  # fmt: skip
        terms = Terms.of(config.backend, *self._mover.start(START_S), cache)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router, port = wire.listen(self._context, config.listen, 0)
        self.member = m.Member(wire.address(config.advertise or config.listen, port), self.epoch, cache)
        self._consumer = Consumer(config.transfer_timeout)
        self._producer = Producer(config.lease)
        self._in = Inbound(self._router, self._mover, terms, self.epoch, config.peer_timeout)
        self._out = Outbound(self._context, self._mover, terms, self.epoch, engine, config.peer_timeout)
        self._resolver = Resolver(self._context, self.member, config.backend)
        self._inbox: deque[Callable[[float], list[Action]]] = deque()
        self._fenced: list[tuple[Offered, Fence]] = []
        self._events: deque[Event] = deque()
        self._pull, self._push = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._pull.bind("inproc://wake")
        self._push.connect("inproc://wake")
        self._push_lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvxfer-control", daemon=True)
        self._thread.start()

    # --- any thread ------------------------------------------------------------------------------------------------

    def offer(self, offer: Offered, after: Fence | None = None) -> None:
        """Let consumers have these blocks. ``after``: the fence behind which their content is complete. Ends in one
        ``Ended`` and one ``Released`` event; until then the blocks must not be reused."""
        if after is None or after.passed():
            self._do(lambda now: self._producer.offer(offer, now))
        else:
            self._do(lambda now: self._hold(offer, after))

    def revoke(self, transfer: TransferId, generation: int, reason: str, gone: bool) -> None:
        """Blocks of this generation are given up; whoever has read them will be told not to trust them."""
        self._do(lambda now: self._revoke(transfer, generation, reason, gone, now))

    def renew(self, transfer: TransferId) -> None:
        """Keep an offer's lease: its consumer is alive, though it has not come yet."""
        self._do(lambda now: self._renew(transfer, now))

    def fetch(self, fetch: Fetch) -> None:
        """Bring a transfer into our blocks. Ends in one ``Ended`` within the configured deadline, and in one ``Released``,
        until which the blocks must be neither used nor freed."""
        self._do(lambda now: self._fetch(fetch, now))

    def cancel(self, handle: str, reason: str) -> None:
        """The engine no longer wants this fetch."""
        self._do(lambda now: self._consumer.cancel(handle, reason, now))

    def events(self) -> list[Event]:
        """Outcomes and releases since the last call, in order."""
        out: list[Event] = []
        with contextlib.suppress(IndexError):
            while True:
                out.append(self._events.popleft())
        return out

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of ended transfers whose memory may still be touched by the back end."""
        return self._mover.quarantined_bytes

    def close(self, timeout: float = 5.0) -> None:
        """Stop threads, close sockets and the back end; memory is quiet afterwards. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join(timeout)
        self._mover.close(timeout)
        if not self._thread.is_alive():
            self._push.close(0)
            self._context.term()

    # --- waking the control thread ---------------------------------------------------------------------------------

    def _do(self, call: Callable[[float], list[Action]]) -> None:
        self._inbox.append(call)
        self._wake()

    def _wake(self) -> None:
        with self._push_lock, contextlib.suppress(zmq.ZMQError):
            self._push.send(b"", zmq.NOBLOCK)

    def _post(self, result: mv.Result) -> None:
        self._do(lambda now: self._result(result, now))

    # --- the control thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception:
                log.exception("a message or event could not be handled; it is dropped")
        for sock in (self._router, self._pull):
            sock.close(0)
        self._out.close()
        self._resolver.close()

    def _turn(self) -> None:
        poller = zmq.Poller()
        for sock in (self._router, self._pull, *self._out.sockets, *self._resolver.sockets):
            poller.register(sock, zmq.POLLIN)
        ready = {id(sock) for sock, _ in poller.poll(self._timeout_ms())}
        while wire.receive(self._pull) is not None:
            pass
        while self._inbox:
            self._perform(self._inbox.popleft()(time.monotonic()))
        if id(self._router) in ready:
            self._read_router()
        now = time.monotonic()
        for link, msg in self._out.receive(now):
            self._perform(self._from_producer(link, msg, now))
        for source, route in self._resolver.receive(now):
            if not isinstance(route, str):
                self._out.know(route.targets)
            resolved = route if isinstance(route, str) else route.resolved
            self._perform(self._consumer.resolved(source, resolved, now))
        self._timers(time.monotonic())

    def _timeout_ms(self) -> int:
        if self._fenced:
            return 1
        now = time.monotonic()
        times = [self._consumer.next_tick(), self._producer.next_tick(), self._resolver.next_tick()]
        times += [self._out.next_tick(self._consumer.busy_links), self._in.next_tick(self._producer.busy_links)]
        due = min((t for t in times if t is not None), default=now + 1.0)
        return int(min(max(due - now, 0.001), 1.0) * 1000) + 1

    def _timers(self, now: float) -> None:
        for offer, fence in [x for x in self._fenced if x[1].passed()]:
            self._fenced.remove((offer, fence))
            self._perform(self._producer.offer(offer, now))
        self._perform(self._consumer.tick(now))
        self._perform(self._producer.tick(now))
        for source, why in self._resolver.tick(now):
            self._perform(self._consumer.resolved(source, why, now))
        for link, reason in self._out.tick(self._consumer.busy_links, now):
            self._perform(self._consumer.link_down(link, reason, now))
        for link, reason in self._in.tick(self._producer.busy_links, now):
            self._perform(self._producer.link_down(link, reason, now))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            now = time.monotonic()
            match action:
                case Send():
                    owner = self._out if action.link in self._out else self._in
                    owner.send(action.link, action.message)
                case Move():
                    self._mover.move(action)
                case Abort():
                    self._mover.abort(action.ref)
                case Report():
                    self._events.append(action.event)
                    if isinstance(action.event, Ended) and not action.event.outcome.delivered:
                        e = action.event
                        log.warning("%s of %s %s: %s", e.role, e.transfer, e.outcome.kind, e.outcome.reason)
                case Dial():
                    self._out.dial(action.link, now)
                case Close():
                    self._out.drop(action.link, action.reason)
                case Resolve():
                    self._resolver.ask(action.source, action.own, now)

    def _read_router(self) -> None:
        for _ in range(256):  # a flood from outside must not keep the rest waiting
            frames = wire.receive(self._router)
            if frames is None:
                return
            now = time.monotonic()
            try:
                if len(frames) != 2:
                    raise PeerError(f"{len(frames)} frames where two were expected")
                link, msg = self._in.receive(frames[0], m.decode(frames[1]), now)
            except PeerError as e:
                log.warning("ignored a message: %s", e)
                continue
            if isinstance(msg, m.Taken):
                self._mover.slot(self._in.ref(link, msg), msg.piece, 0, 0)
            elif msg is not None:
                self._perform(self._producer.message(link, msg, now))

    def _from_producer(self, link: LinkId, msg: m.Message | str, now: float) -> list[Action]:
        if isinstance(msg, str):
            return self._consumer.link_down(link, msg, now)
        if isinstance(msg, m.Slot):
            self._mover.slot(self._out.ref(link, msg), msg.piece, msg.offset, msg.nbytes)
            return []
        return self._consumer.message(link, msg, now)

    def _result(self, result: mv.Result, now: float) -> list[Action]:
        match result:
            case Moved():
                machine = self._consumer if result.ref.role == "consumer" else self._producer
                return machine.moved(result, now)
            case mv.Endpoint() | mv.Connected():
                if result.link in self._out:
                    up = self._out.result(result)
                    if isinstance(up, str):
                        return self._consumer.link_down(result.link, up, now)
                    return [] if up is None else self._consumer.link_up(result.link, up, now)
                info = self._in.result(result)
                return [] if info is None else self._producer.link_up(result.link, info, now)
            case mv.SlotReady():
                self._in.send(result.ref.link, m.Slot(
                    result.ref.transfer, result.ref.attempt, result.ref.part, result.piece, result.offset, result.nbytes
                ))  # fmt: skip
            case mv.SlotTaken():
                r = result.ref
                self._out.send(r.link, m.Taken(r.transfer, r.attempt, r.part, result.piece))
            case mv.Reset():
                return self._reset(result.reason, now)
        return []

    def _reset(self, reason: str, now: float) -> list[Action]:
        out: list[Action] = []
        for link in list(self._out.links):
            out += self._consumer.link_down(link, f"the back end was reset: {reason}", now)
        for link in list(self._in.links):
            self._in.drop(link, reason)
            out += self._producer.link_down(link, reason, now)
        return out

    # --- engine calls, on the control thread -----------------------------------------------------------------------

    def _hold(self, offer: Offered, after: Fence) -> list[Action]:
        self._fenced.append((offer, after))
        return []

    def _revoke(self, transfer: TransferId, generation: int, reason: str, gone: bool, now: float) -> list[Action]:
        kept = [(o, f) for o, f in self._fenced if o.transfer != transfer or o.generation > generation]
        fenced = len(kept) < len(self._fenced)
        self._fenced = kept
        return self._producer.revoke(transfer, generation, reason, gone, now, offered=fenced)

    def _renew(self, transfer: TransferId, now: float) -> list[Action]:
        self._producer.renew(transfer, now)
        return []

    def _fetch(self, fetch: Fetch, now: float) -> list[Action]:
        try:
            return self._consumer.fetch(fetch, now)
        except ValueError as e:
            raise ConfigError(f"fetch of {fetch.transfer}: {e}") from None
