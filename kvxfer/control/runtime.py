"""The runtime around the two state machines: it tells them what happens, and carries out the actions that they ask for.

Used by the control thread (``ControlLoop``) only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import assert_never

from kvxfer import clock
from kvxfer.config import Config
from kvxfer.control.calls import CallValidator
from kvxfer.control.events import EventQueue
from kvxfer.control.fences import Fences
from kvxfer.control.loop import ControlLoop, Step
from kvxfer.control.peers import AgentPeers
from kvxfer.control.revocations import SharedRevocationCounter
from kvxfer.control.stories import AgentStories
from kvxfer.data.commands import Connected, Disconnected, EndpointMade, LinkBroken, Reset, Result, SlotNews, ThreadDied
from kvxfer.data.hasher import Hasher
from kvxfer.data.plane import DataPlane
from kvxfer.errors import PeerError
from kvxfer.failures import Failure, FailureKind
from kvxfer.identity import Generation, TransferId
from kvxfer.logs import logger
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
    Move,
    Moved,
    Moving,
    Released,
    RemoteWritesEnded,
    Resolve,
    Role,
    Send,
    Stats,
)
from kvxfer.security import RateLimitedWarnings
from kvxfer.text import printable
from kvxfer.transport import Fence
from kvxfer.values import Fetch, Offer

log = logger("kvxfer.agent")


class AgentRuntime(AgentPeers):
    """What an agent does: both state machines, with its peers and everything else that they need."""

    def __init__(
        self,
        loop: ControlLoop,
        data: DataPlane,
        hasher: Hasher,
        revocations: SharedRevocationCounter,
        me: m.RankDescriptor,
        config: Config,
        engine: str,
        facts: dict[str, str] | None,
        calls: CallValidator,
        events: EventQueue,
    ) -> None:
        super().__init__(loop, data, revocations, me, config, engine, facts)
        self._hasher, self._revocations, self._calls, self._events = hasher, revocations, calls, events
        self._fences = Fences(config.lease)
        self._waiting: list[Callable[[], None]] = []  # to be called once no transfer is under way
        self._stories = AgentStories(me.epoch)
        self._direct = self._staged = 0  # parts that were begun without packing, and packed
        self._unclaimed = RateLimitedWarnings(log, every=10.0)  # about offers that nobody has asked for

    # --- what the engine says --------------------------------------------------------------------------------------

    def offer(self, offer: Offer, after: Fence | None, called: float, now: float) -> list[Action]:
        self._stories.offered(offer, called)
        return [] if self._fences.hold(offer, after, called) else self._unfenced(offer, called, None, now)

    def _unfenced(self, offer: Offer, called: float, error: str | None, now: float) -> list[Action]:
        if error is None:
            out = self.producer.offer(offer, now, called)
        else:
            why = Failure(FailureKind.BACKEND_FAILED, f"its fence failed: {error}")
            out = self.producer.revoke(offer.transfer, offer.generation, why, True, now)
        self._forget_if_over(offer.transfer, offer.generation)
        return out

    def revoke(
        self,
        transfer: TransferId,
        generation: Generation,
        reason: str,
        gone: bool,
        kept: bool,
        declared: bool,
        now: float,
    ) -> list[Action]:
        self._fences.forget(transfer, generation)
        why = Failure(FailureKind.WITHDRAWN if gone else FailureKind.REVOKED, reason)
        out = self.producer.revoke(transfer, generation, why, gone, now, kept)
        if declared:
            self._revocations.take_in()
        self._forget_if_over(transfer, generation)
        return out

    def _forget_if_over(self, transfer: TransferId, generation: Generation) -> None:
        """Forget what is kept of a transfer that the producer's machine does not hold.

        Offers that come too late, or are revoked before they were announced, never end by an event.
        """
        if not self.producer.holds(transfer):
            self._over(transfer, generation)
            self._stories.forget(transfer)
        if not self.producer.releases(transfer):
            self._calls.free(transfer, generation)

    def _over(self, transfer: TransferId, generation: Generation) -> None:
        self._revocations.over(transfer, generation)
        self._calls.over(transfer, generation)

    def renew(self, transfer: TransferId, now: float) -> list[Action]:
        self._fences.renew(transfer, now)
        self.producer.renew(transfer, now)
        return []

    def fetch(self, fetch: Fetch, called: float, now: float) -> list[Action]:
        self._stories.fetched(fetch, called)
        return self.consumer.fetch(fetch, now, called)

    # --- what the data plane says ----------------------------------------------------------------------------------

    def result(self, result: Result | Hashed, now: float) -> list[Action]:
        match result:
            case Moved():
                return self._machine(result.ref.role).moved(result, now)
            case Moving():
                self.consumer.moving(result, now)
                return self.producer.moving(result)
            case Hashed():
                return self._machine(result.ref.role).hashed(result, now)
            case EndpointMade() | Connected() | LinkBroken():
                return self._linked(result, now)
            case Disconnected():
                closed = self._data.disconnected(result.link)
                return self.consumer.link_closed(result.link, now) if closed else []
            case SlotNews():
                self._tell_peer(result)
            case Reset():
                return self._reset(result.backend, result.failure.about("the back end was reset: "), now)
            case ThreadDied():
                self._loop.begin_close(result.failure)
            case _:
                assert_never(result)
        return []

    def _machine(self, role: Role) -> ConsumerMachine | ProducerMachine:
        return self.consumer if role == "consumer" else self.producer

    # --- what is due -----------------------------------------------------------------------------------------------

    def next_due(self) -> float:
        held = self._fences.due(self.producer.awaited) if self._fences else 1e18
        clocks = self.consumer, self.producer, self._resolver, self._out, self._in
        return min([held, *(t for one in clocks if (t := one.next_tick()) is not None)])

    def passed(self, now: float) -> Iterator[Step]:
        for offer, called, error in self._fences.passed(now) if self._fences else ():
            yield partial(self._unfenced, offer, called, error)

    def due(self, now: float) -> Iterator[Step]:
        for machine in (self.consumer, self.producer):
            at = machine.next_tick()
            if at is not None and at <= clock.now():
                yield machine.tick
        yield from super().due(now)

    # --- what the machines ask for ---------------------------------------------------------------------------------

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            try:
                self._act(action)
            except BaseException as e:
                if not isinstance(e, PeerError):
                    log.exception("an action failed: %s", type(action).__name__)
                if isinstance(action, Send | Dial):
                    self._failed(action, Failure.of(e, FailureKind.PEER_LOST))
        if self._waiting and self._idle:
            self._tell_waiting()

    def _act(self, action: Action) -> None:
        if self._loop.over and not isinstance(action, Emit):
            return
        match action:
            case Emit():
                self._emit(action.event)
            case Send() | Dial() | Close() | Resolve():
                self._ask(action)
            case Move():
                self._direct += not action.piece_bytes
                self._staged += bool(action.piece_bytes)
                self._data.post(action)
            case Abort():
                self._data.post(action)
                self._hasher.cancel(action.ref)
            case RemoteWritesEnded():
                self._data.post(action)
            case Hash():
                self._hasher.hash(action)
            case _:
                assert_never(action)

    def _emit(self, event: Event) -> None:
        match event:
            case Ended():
                self._stories.ended(event)
                if event.role == "producer" and event.generation is not None:
                    self._over(event.transfer, event.generation)
                why = event.outcome.failure
                if why is not None:
                    names = printable(event.handle), printable(event.transfer)
                    # Where no request of the engine stands for an offer, somebody has asked for it and needs it no more.
                    asked = event.handle == str(event.transfer) and why.kind is FailureKind.WITHDRAWN
                    complain = log.info if asked else self._unclaimed if event.unclaimed else log.warning
                    complain("%s: request %s, transfer %s: %s", event.role, *names, why)
                    if why.kind is FailureKind.TIMED_OUT and event.role == "producer":
                        self._data.hangs()  # which says so in the log
            case Released(role="consumer"):
                self._calls.free(event.handle)
            case Released(generation=int(generation)):
                self._calls.free(event.transfer, generation)
            case _:
                pass
        self._events.put(event)

    def tell(self) -> None:
        self._events.tell()

    # --- the end ---------------------------------------------------------------------------------------------------

    def ends(self, why: Failure) -> Iterator[Step]:
        yield partial(self.producer.close, why)
        yield partial(self.consumer.close, why)
        for offer, called in self._fences.close():
            yield partial(self._unfenced, offer, called, None)

    def stop(self, timeout: float) -> None:
        until = clock.now() + timeout
        self._revocations.close()
        self._stop_examining(until)
        self._hasher.close(max(until - clock.now(), 0.1))
        self._data.close(max(until - clock.now(), 0.1))

    def ended(self) -> None:
        self._events.end()
        self._tell_waiting()

    def when_idle(self, call: Callable[[], None], now: float) -> list[Action]:
        """Call a function once no offer or fetch of this agent is under way, or the thread ends."""
        self._waiting.append(call)
        if self._loop.over:
            self._tell_waiting()
        return []

    @property
    def _idle(self) -> bool:
        return not (self._fences or self.producer.offered or len(self.consumer))

    def _tell_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def stats(self) -> Stats:
        """Return counts of what is under way now, and of what has happened since the start. Any thread."""
        return Stats(
            fetches=len(self.consumer),
            offers=len(self.producer) + self._fences.besides(self.producer.holds),
            quarantined_bytes=self._data.quarantined_bytes,
            corrupt=self.consumer.corrupt + self.producer.corrupt,
            direct=self._direct,
            staged=self._staged,
        )

    @property
    def held(self) -> int:
        return len(self.consumer) + len(self.producer)
