"""What all jobs share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvxfer.data.commands import PieceNews
from kvxfer.data.staging import Slot, Staging
from kvxfer.failures import Failure
from kvxfer.protocol.values import Move
from kvxfer.transport import Batch, Capabilities, Completion, Fence, PlanBatch, Transport

__all__ = ["CACHE", "PIECES", "STAGE", "Job", "Wire"]

CACHE, STAGE = 0, 1
PIECES = 1 << 20
"""Stream numbers set aside for each part: pieces of part n are numbered from ``n * PIECES``."""


@dataclass(eq=False)
class Wire:
    """A link that is connected, and what its jobs need of the data thread.

    Attributes:
        transport: The back end.
        can: What that can do.
        peer: The back end's number for the link.
        number: Tells this making of the link from earlier ones.
        most: Bytes of a batch at the most, where a part may be cut.
        staging: Staging memory.
        batches: The jobs of each batch in flight: short parts share one.
        tell: Tells the peer of pieces.
        broken: Whether nothing can move on it any more.
    """

    transport: Transport
    can: Capabilities
    peer: int
    number: int
    most: int
    staging: Staging
    batches: dict[int, Sequence[Job]]
    tell: Callable[[PieceNews], None]
    broken: bool = False


class Job:
    """One part on its way.

    ``advance`` is called after every event. The job has ended when nothing of it is in flight and it is either complete
    or stopped.

    Attributes:
        lends_memory: Whether the peer writes into memory of ours for it.
    """

    lends_memory = False

    def __init__(self, action: Move, wire: Wire) -> None:
        self.ref = action.ref
        self.action = action
        self.wire = wire
        self.batches: set[int] = set()
        self.error: Failure | None = None
        self.quiet = True
        self.collateral = False
        self.nbytes = action.plan.nbytes
        self.begun = 0.0  # when the data thread took it up
        # What is sent and received on a link goes in the order of its parts, whole parts one after the other: the order in which
        # the peer expects it. A job submits when it is the first in line.
        self.line: deque[Job] | None = None

    @property
    def complete(self) -> bool:
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        return not self.batches and (self.complete or self.error is not None)

    @property
    def submitting(self) -> bool:
        """Whether it has batches still to submit."""
        raise NotImplementedError

    @property
    def my_turn(self) -> bool:
        return self.line is None or (len(self.line) > 0 and self.line[0] is self)

    @property
    def waiting_on_device(self) -> bool:
        """Whether it should be advanced without an event of its own, for the device may be done."""
        return False

    @property
    def starving(self) -> bool:
        """Whether it waits for a slot of staging memory."""
        return False

    @property
    def slots(self) -> list[Slot]:
        """The slots of staging memory that it holds."""
        return []

    def advance(self) -> None:
        """Do what can be done now."""

    def calm(self) -> None:
        """Note that what was not quiet has become so."""
        self.quiet = True

    def remote_writes_ended(self) -> None:
        """Note that the peer has ended its half for good; only jobs that lend it memory care."""

    def calmed_by_close(self, caps: Capabilities) -> bool:
        """Whether closing its link makes its memory quiet."""
        return caps.quiet == "peer_close" or (self.lends_memory and caps.quiet == "batch")

    def heard(self, news: PieceNews) -> None:
        """Process what the peer says of a piece; only staged jobs care."""

    def stop(self, why: Failure) -> None:
        """Submit nothing more; the first reason counts."""
        if self.error is None:
            self.error = why

    def completed(self, done: Completion) -> None:
        """Handle the end of a batch."""
        self.batches.discard(done.batch)
        self.quiet &= done.quiet
        if done.error is not None:
            self.stop(Failure.of(done.error))

    def _submit(self, batch: Batch | PlanBatch, after: Fence | None = None) -> int:
        number = self.wire.transport.submit(batch, after)
        self.batches.add(number)
        self.wire.batches[number] = (self,)
        return number
