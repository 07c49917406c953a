"""The control thread: what is due, what was called, what peers have said, each in its turn and none for long.

It sleeps in a poll, and never does what may block. What is to be done in each case is its ``Work``.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from kvxfer.control.sockets import ControlConnection, ControlSockets
from kvxfer.errors import PeerError
from kvxfer.failures import Failure, FailureKind
from kvxfer.protocol.values import Action
from kvxfer.security import Complaints, Security
from kvxfer.threads import NamedThread

__all__ = ["CLOSED", "CLOSE_S", "LINGER_S", "ControlLoop", "Step"]

log = logging.getLogger("kvxfer.agent")

LONGEST_WAIT_S = 1.0
STALL_S = 0.5
"""A turn later than this was not waiting for anything."""
SLICE_S = 0.002
"""What a turn spends on calls, and what on messages."""
FEW = 16
"""Messages of one connection after which others have their turn; calls and messages after which the clock is looked at."""
CLOSE_S = 5.0
LINGER_S = 0.2
"""For so long, at the most, peers' connections take to hear of our end."""

CLOSED = Failure(FailureKind.CANCELLED, "the agent was closed")

Step = Callable[[float], list[Action]]
"""Something to do on the control thread, given the time."""


class Work(Protocol):
    """What the control thread does. All of it is called on that thread, ``perform`` later on others, one at a time."""

    def perform(self, actions: list[Action]) -> None:
        """Do what a step asks for."""

    def message(self, connection: ControlConnection, frame: bytes, now: float) -> list[Action]:
        """Handle a frame."""

    def hung_up(self, connection: ControlConnection, now: float) -> list[Action]:
        """Record that a connection is gone."""

    def due(self, now: float) -> Iterator[Step]:
        """Yield what is due, each to be done before the next is asked for."""

    def next_due(self) -> float:
        """Return the time at which something is due next."""

    def tell(self) -> None:
        """Let the engine know what has happened; called at the end of each turn."""

    def pardon(self, seconds: float) -> None:
        """Do not count so many seconds as peers' silence."""

    def ends(self, why: Failure) -> Iterator[Step]:
        """Yield what ends all transfers."""

    def stop(self, timeout: float) -> None:
        """End whatever may still touch their memory."""

    def ended(self) -> None:
        """Note that nothing follows but what comes too late."""

    @property
    def held(self) -> int:
        """How many transfers are not released."""


class ControlLoop:
    """The control thread. Other threads call ``do``, ``begin_close`` and ``close``.

    Args:
        security: Who may connect and be dialled.
        closing: Called, on whatever thread, when it begins to close.

    Attributes:
        sockets: The control sockets.
        why: Why it ends; ``None`` while it does not.
        over: Whether the thread has ended its work; then ``do`` has things done on the thread that calls it.
    """

    def __init__(self, security: Security, closing: Callable[[], None]) -> None:
        self._inbox: deque[Step] = deque()
        self._taken = 0  # of what has been in the inbox
        self.sockets = ControlSockets(security, self._inbox)
        self.why: Failure | None = None
        self._closing = closing
        self.over = False
        self._close_s = 0.0  # the longest that anybody has who closes it
        self._late = threading.RLock()
        self._closed = threading.Event()
        self._complain = Complaints(log)
        self._awake = time.monotonic()
        self._work: Work  # from ``start`` on
        self.thread = NamedThread(target=self._run, name="kvxfer-control")

    # --- any thread ------------------------------------------------------------------------------------------------

    def start(self, work: Work) -> None:
        """Begin to do this work."""
        self._work, self._awake = work, time.monotonic()
        self.thread.start()

    def do(self, step: Step) -> None:
        """Have a step done, after those that came before."""
        self._inbox.append(step)
        if self.over:
            self._drain_late()
        else:
            self.sockets.wake()

    def begin_close(self, why: Failure = CLOSED) -> None:
        """Have all transfers end for this reason, and then the thread; the first reason counts."""
        if self.why is None:
            self.why = why
            self._closing()
            self.sockets.wake()

    def close(self, timeout: float) -> bool:
        """End it, and wait for that ``timeout`` seconds at the most; return whether nothing is held any more."""
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
                    log.exception("a turn of the control thread ended early; the next one goes on where it was")
        except BaseException as e:
            self.begin_close(Failure(FailureKind.BACKEND_FAILED, f"the control thread has died: {e!r}"))
            raise
        finally:
            self._end()

    def _end(self) -> None:
        """End all transfers, then whatever may touch their memory, then the sockets, which nobody else may close."""
        work = self._work
        try:
            self._drain()
            for step in work.ends(self.why or CLOSED):
                self._take(step)
            self._drain()
            self.sockets.flush()
            work.tell()
            work.stop(self._close_s or CLOSE_S)
            self._drain()  # what those had still to say, which may be news for peers
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
        """Look at what is due, then take in calls, then what peers have said.

        Of calls and messages only some are taken in each turn, so that neither keeps the other waiting.
        """
        work = self._work
        wait = min(max(work.next_due() - time.monotonic(), 0.001), LONGEST_WAIT_S)
        news = self.sockets.poll(wait)
        now = time.monotonic()
        self._pardon(now)
        # What the engine has said before a message came counts: a check must meet every revocation.
        said = self._taken + len(self._inbox)
        for connection in news:
            connection.after = said
        try:
            for step in work.due(now):
                self._take(step)
            self._drain(time.monotonic() + SLICE_S)
            self._hear(time.monotonic() + SLICE_S)
            self.sockets.flush()
        finally:
            work.tell()

    def _pardon(self, now: float) -> None:
        """Do not count time in which this process did not run as the peers' silence.

        While the process or its host was stopped, frozen or starved, nobody could be heard.
        """
        stalled, self._awake = now - self._awake - LONGEST_WAIT_S, now
        if stalled > STALL_S:
            log.warning("this process did not run for about %.1f s", stalled)
            self._work.pardon(stalled)

    def _drain(self, until: float = math.inf) -> None:
        """Process what the engine and the data threads have said, up to this time."""
        while self._inbox:
            for _ in range(min(FEW, len(self._inbox))):
                self._taken += 1
                self._take(self._inbox.popleft())
            if time.monotonic() >= until:
                return

    def _drain_late(self) -> None:
        """Process what is said once the control thread has ended, on the thread that says it, one thread at a time."""
        with self._late:
            self._drain()
            self._work.tell()

    def _hear(self, until: float) -> None:
        """Process what peers have said, each in its turn, up to this time."""
        for connection in self.sockets.ready():
            if connection.after > self._taken:
                continue
            for _ in range(FEW):
                frame = connection.receive()
                if frame is None:
                    break
                self._take(partial(self._work.message, connection, frame))
            if connection.lost is not None and not connection.ready:
                self._take(partial(self._work.hung_up, connection))
            if time.monotonic() >= until:
                return

    def _take(self, step: Step) -> None:
        """Do one thing; whatever goes wrong with it must not keep others from being done."""
        try:
            self._work.perform(step(time.monotonic()))
        except PeerError as e:
            self._complain("%s was ignored: %s", _described(step), e)
        except BaseException:  # of what engines and back ends raise, anything may be
            log.exception("%s could not be handled and is dropped; other transfers go on", _described(step))


def _described(step: Step) -> str:
    """Return what a step was about, for the log."""
    if not isinstance(step, partial):
        return f"the step {getattr(step, '__name__', step)!r}"
    peers = [f" from {a.host}" for a in step.args if isinstance(a, ControlConnection)]
    return f"the step {step.func.__name__!r}{''.join(peers)}"
