"""One end of a link, whatever the library: it is made within a time, moves batches while it is up, and breaks for one reason.

A batch waits in it until the link is up and the batch's fence has passed. The subclass begins it then, and ends it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvxfer import clock
from kvxfer.errors import KvxferError, PeerError, TransportError
from kvxfer.transport.contract import Completion, Fence

__all__ = ["Submitted", "LinkBase"]

CHUNKS = 8
"""The parts in which the time to make a link is given. Each begins when the one before is seen to be over, so a host that stands
still for a while, peer and all, uses up one."""

FENCE_S = 0.00005, 0.0005
"""How often a fence is asked whether it has passed: at first (packing on a GPU takes no longer), and in the end."""


@dataclass(eq=False)
class Submitted:
    """A batch that has not ended. ``after`` is the fence that it waits for, if there is one."""

    number: int
    after: Fence | None


F = TypeVar("F", bound=Submitted)


class LinkBase(ABC, Generic[F]):
    """What ``Base`` drives: it calls ``look`` while something of the link is a matter of time.

    Its end is final: once ``broken`` is set, every batch ends with that error, and a new link has to be made.

    Attributes:
        up: Whether batches can move.
        broken: Why none can any more, or ``None``.
        flights: The batches that have not ended, by number, the oldest first.
        waiting: Those of them that were not posted yet.
    """

    unreached = "it cannot be reached (no answer in time)"
    """Why a link is broken that was not made in time."""

    def __init__(self, done: Callable[[Completion], None], within_s: float = math.inf) -> None:
        """Begin to make the link, which breaks if it is neither ``reached`` nor up after ``within_s``. ``done`` takes completions."""
        self.up = False
        self.broken: KvxferError | None = None
        self.flights: dict[int, F] = {}
        self.waiting: dict[int, F] = {}
        self._done = done
        self._chunk_s, self._chunks = within_s / CHUNKS, CHUNKS
        self._late_at = clock.now() + self._chunk_s
        self._pause = FENCE_S[0]

    @property
    def posted(self) -> list[F]:
        """The batches that were posted and have not ended, the oldest first."""
        return [flight for number, flight in self.flights.items() if number not in self.waiting]

    # What a subclass does

    @abstractmethod
    def greet(self) -> bool:
        """Go on with the making of the link; return whether it is up. If this raises, the link is broken for that reason."""

    @abstractmethod
    def post(self, flight: F) -> None:
        """Begin a batch; if this raises, the batch ends with that error. From now on the subclass ends it, by ``end``."""

    @abstractmethod
    def bye(self, cause: KvxferError, says: str | None) -> None:
        """Part from the peer, and have what was posted end: the link has just broken. ``says``: what the peer hears, if it can."""

    @abstractmethod
    def failed(self, flight: F, why: Exception) -> str:
        """Return with which words a batch fails."""

    def may(self, flight: F) -> bool:
        """Return whether a batch may be posted, now that the link is up."""
        return flight.after is None or flight.after.passed()

    # What a subclass calls

    def submit(self, flight: F) -> None:
        """Take a batch: it is posted as soon as it may be, and with it those whose fences have passed meanwhile."""
        self.flights[flight.number] = flight
        if self.broken is not None:
            self.end(flight, self.broken)
            return
        self.waiting[flight.number] = flight
        if self.up:
            self.look(clock.now())
        self._pause = FENCE_S[0]

    def end(self, flight: F, cause: Exception | None = None, quiet: bool = True) -> None:
        """Report the one end of a batch; ``cause``: why it failed."""
        del self.flights[flight.number]
        self.waiting.pop(flight.number, None)
        error = None
        if cause is not None:
            kind, same = (cause.kind, type(cause)) if isinstance(cause, KvxferError) else (None, TransportError)
            error = same(self.failed(flight, cause), kind=kind)
            error.__cause__ = cause
        self._done(Completion(flight.number, error, quiet))

    def reached(self) -> None:
        """Wait no longer for a sign of the peer, though the link may not be up."""
        self._late_at = math.inf

    def lose(self, why: str, says: str | None = None) -> None:
        """End the link because of what the peer did, or did not do."""
        self.cut(PeerError(why), says)

    def cut(self, cause: KvxferError, says: str | None = None) -> None:
        """End the link. Only the first reason counts."""
        if self.broken is not None:
            return
        self.broken = cause
        self.bye(cause, says)
        for flight in list(self.waiting.values()):
            self.end(flight, cause)

    # What ``Base`` calls

    def look(self, now: float) -> float:
        """Post what may be posted, and break if it is too late; return when to look again, at the latest."""
        if self.broken is not None:
            return math.inf
        if not (self.up or self._meets(now)):
            return self._late_at if self.broken is None else math.inf
        posted = False
        for flight in list(self.waiting.values()):
            if flight.number in self.waiting and self.may(flight):
                del self.waiting[flight.number]
                posted = True
                try:
                    self.post(flight)
                except Exception as e:  # whatever it is, it is how this batch ends
                    self.end(flight, e)
        if posted:
            return now
        if not self.waiting:
            return math.inf
        due, self._pause = now + self._pause, min(2 * self._pause, FENCE_S[1])
        return due

    def forget(self) -> None:
        """Forget all batches, at whose ends nobody looks any more."""
        self.flights.clear()
        self.waiting.clear()

    def _meets(self, now: float) -> bool:
        """Go on with the making of the link, within its time; return whether it is up."""
        try:
            self.up = self.greet()
        except KvxferError as e:
            self.cut(e)
            return False
        if not self.up and now >= self._late_at:
            self._chunks -= 1
            self._late_at = now + self._chunk_s
            if not self._chunks:
                self.lose(self.unreached, "the other side cannot reach this one (any more)")
        return self.up
