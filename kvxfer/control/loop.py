"""The control thread: in turns, and none for long, it handles what is due, what was called and what peers have sent.

It sleeps in a poll, and never blocks otherwise. How each is handled is up to its ``Work``.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from kvxfer import clock
from kvxfer.control.connection import ControlConnection
from kvxfer.control.sockets import ControlSockets
from kvxfer.data.commands import Result
from kvxfer.errors import PeerError
from kvxfer.failures import Failure, FailureKind
from kvxfer.logs import logger
from kvxfer.protocol.values import Action, Hashed
from kvxfer.security import RateLimitedWarnings, Security
from kvxfer.threads import NamedThread

log = logger("kvxfer.agent")

MAX_WAIT_S = 1.0
STALL_S = 0.5
"""A turn that begins this many seconds late means that the process did not run."""
SLICE_S = 0.002
"""Seconds that a turn spends on calls, and on messages."""
MESSAGES_A_TURN = 16
"""The messages of one connection that are handled before others have their turn, and the calls before the clock is read."""
CLOSE_S = 5.0
LINGER_S = 0.2
"""The most seconds that are spent on telling peers of the end."""

CLOSED = Failure(FailureKind.CANCELLED, "the agent was closed")

Step = Callable[[float], list[Action]]
"""Something to do on the control thread, given the time."""


class Work(Protocol):
    """What the control thread does. All methods are called on that thread; after its end, some on others, one at a time."""

    def perform(self, actions: list[Action]) -> None:
        """Carry out the actions of a step."""

    def message(self, connection: ControlConnection, frame: bytes, now: float) -> list[Action]:
        """Handle a frame."""

    def hung_up(self, connection: ControlConnection, now: float) -> list[Action]:
        """Record that a connection is gone."""

    def due(self, now: float) -> Iterator[Step]:
        """Yield the steps that are due; each is done before the next is asked for. Called only once ``next_due`` has passed."""

    def passed(self, now: float) -> Iterator[Step]:
        """Yield the steps for which there was something else to wait for than a time; asked in each turn."""

    def next_due(self) -> float:
        """Return the time at which something is due next, or to be looked at."""

    def tell(self) -> None:
        """Tell the engine what has happened; called at the end of each turn."""

    def discount_stall(self, seconds: float, now: float) -> None:
        """Do not count the ``seconds`` up to ``now`` as peers' silence."""

    def result(self, result: Result | Hashed, now: float) -> list[Action]:
        """Process what another thread of the agent has done."""

    def ends(self, why: Failure) -> Iterator[Step]:
        """Yield the steps that end all transfers."""

    def stop(self, timeout: float) -> None:
        """End everything that may still touch the memory of transfers."""

    def ended(self) -> None:
        """Record that the loop has ended; only late steps can follow."""

    @property
    def held(self) -> int:
        """The number of transfers that are not released."""


class ControlLoop:
    """The control thread. Other threads call ``do``, ``begin_close`` and ``close``.

    Args:
        security: Who may connect and be dialled.
        closing: Called when it begins to close, on whichever thread does that.

    Attributes:
        sockets: The control sockets.
        why: Why it ends; ``None`` before that.
        over: Whether the thread has ended its work; ``do`` then does steps on the thread that calls it.
    """

    def __init__(self, security: Security, closing: Callable[[], None]) -> None:
        self._inbox: deque[Step] = deque()
        self._taken = 0  # how many steps were taken from the inbox
        self.sockets = ControlSockets(security, self._inbox)
        self.why: Failure | None = None
        self._closing = closing
        self.over = False
        self._close_s = 0.0  # the longest timeout of any call of ``close``
        self._late = threading.RLock()
        self._closed = threading.Event()
        self._complain = RateLimitedWarnings(log)
        self._awake = clock.now()
        self._work: Work  # from ``start`` on
        self.thread = NamedThread(target=self._run, name="kvxfer-control")

    # --- any thread ------------------------------------------------------------------------------------------------

    def start(self, work: Work) -> None:
        self._work, self._awake = work, clock.now()
        self.thread.start()

    def do(self, step: Step) -> None:
        """Have a step done, after all earlier ones."""
        self._inbox.append(step)
        if self.over:
            self._drain_late()
        else:
            self.sockets.wake()

    def post(self, result: Result | Hashed) -> None:
        """Have a result processed. The work is known by then: threads that post may be made before it."""
        self.do(lambda now: self._work.result(result, now))

    def begin_close(self, why: Failure = CLOSED) -> None:
        """Begin to end all transfers for this reason, and then the thread; the first reason counts."""
        if self.why is None:
            self.why = why
            self._closing()
            self.sockets.wake()

    def close(self, timeout: float) -> bool:
        """End the thread, and wait for that for up to ``timeout`` seconds; return whether all transfers are released."""
        self._close_s = max(self._close_s, timeout)
        self.begin_close()
        if threading.current_thread() is not self.thread and not self._closed.wait(timeout + LINGER_S + 0.1):
            log.error("the agent did not close within %g s; its threads are abandoned", timeout)
        return self.over and not self._work.held

    # --- the control thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self.why is None:
                try:
                    self._turn()
                except BaseException:
                    log.exception("a turn of the control thread failed; the next one goes on from there")
        except BaseException as e:
            self.begin_close(Failure(FailureKind.BACKEND_FAILED, f"the control thread has died: {e!r}"))
            raise
        finally:
            self._end()

    def _end(self) -> None:
        """End all transfers, then whatever may touch their memory, then the sockets, which only this thread may close."""
        work = self._work
        try:
            self._drain()
            for step in work.ends(self.why or CLOSED):
                self._take(step)
            self._drain()
            self.sockets.flush()
            work.tell()
            work.stop(self._close_s or CLOSE_S)
            self._drain()  # their last results, of which peers may have to be told
            self.sockets.linger(LINGER_S)
            self.sockets.close()
        finally:
            self.over = True
            self._drain_late()
            work.ended()
            if work.held:
                log.error(
                    "memory of %d transfers that have ended may still be touched; it must not be freed", work.held
                )
            self._closed.set()

    def _turn(self) -> None:
        """Do what is due, then handle calls, then messages of peers.

        Only some calls and messages are handled in each turn, so that neither keeps the other waiting.
        """
        work = self._work
        due_at = work.next_due()
        wait = min(max(due_at - clock.now(), 0.001), MAX_WAIT_S)
        news = self.sockets.poll(wait)
        now = clock.now()
        self._discount_stall(now)
        # Calls of the engine before a message came are handled first: a commit request must see every revocation.
        said = self._taken + len(self._inbox)
        for connection in news:
            connection.after = said
        try:
            for step in work.passed(now):  # before the messages that ask for it
                self._take(step)
            if now >= due_at:  # nothing but this thread changes what is due, and it has only polled since
                for step in work.due(now):
                    self._take(step)
            self._drain(clock.now() + SLICE_S)
            self._hear(clock.now() + SLICE_S)
            self.sockets.flush()
        finally:
            work.tell()

    def _discount_stall(self, now: float) -> None:
        """Do not count time in which this process was stopped or starved as silence of the peers."""
        stalled, self._awake = now - self._awake - MAX_WAIT_S, now
        if stalled > STALL_S:
            log.warning("this process stalled for %.1f s (it was suspended or starved)", stalled)
            self._work.discount_stall(stalled, now)

    def _drain(self, until: float = math.inf) -> None:
        """Do the steps that the engine and the data threads have queued, up to this time."""
        while self._inbox:
            for _ in range(min(MESSAGES_A_TURN, len(self._inbox))):
                self._taken += 1
                self._take(self._inbox.popleft())
            if clock.now() >= until:
                return

    def _drain_late(self) -> None:
        """Do steps queued after the control thread has ended, on the threads that queue them, one thread at a time."""
        with self._late:
            self._drain()
            self._work.tell()

    def _hear(self, until: float) -> None:
        """Handle messages of peers, who take turns, up to this time."""
        for connection in self.sockets.ready():
            if connection.after > self._taken:
                continue
            for _ in range(MESSAGES_A_TURN):
                frame = connection.receive()
                if frame is None:
                    break
                self._take(partial(self._work.message, connection, frame))
            if connection.lost is not None and not connection.ready:
                self._take(partial(self._work.hung_up, connection))
            if clock.now() >= until:
                return

    def _take(self, step: Step) -> None:
        """Do one step; whatever goes wrong with it must not keep others from being done."""
        try:
            self._work.perform(step(clock.now()))
        except PeerError as e:
            self._complain("%s was ignored: %s", _described(step), e)
        except BaseException:  # code of engines and back ends may raise anything
            log.exception("%s could not be handled and is dropped; other transfers go on", _described(step))


def _described(step: Step) -> str:
    """Describe a step for the log."""
    if not isinstance(step, partial):
        return f"the step {getattr(step, '__name__', step)!r}"
    peers = [f" from {a.host}" for a in step.args if isinstance(a, ControlConnection)]
    return f"the step {step.func.__name__!r}{''.join(peers)}"
