"""The base class of all jobs, and what they know of their link."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvxfer.data.commands import SlotMessage, SlotNews
from kvxfer.data.staging import Slot, Staging
from kvxfer.failures import Failure
from kvxfer.protocol.values import HeldUp, Move
from kvxfer.transport import Batch, Capabilities, Completion, Fence, PlanBatch, Transport

CACHE, STAGE = 0, 1
PIECES = 1 << 20
"""Stream numbers set aside for each part: pieces of part n are numbered from ``n * PIECES``."""


@dataclass(eq=False)
class LinkContext:
    """A link that is connected, and what its jobs need from the data thread."""

    transport: Transport
    can: Capabilities
    peer: int  # the back end's number for the link
    number: int  # of this attempt to make it
    most: int  # the most bytes of a batch, if a part may be cut
    staging: Staging
    batches: dict[int, Sequence[Job]]  # the jobs of each batch in flight; short parts share one
    tell: Callable[[SlotNews], None]  # tells the peer about slots
    broken: bool = False  # whether nothing can move on it any more


class Job:
    """One part on its way.

    ``advance`` is called after every event. The job has ended when nothing of it is in flight and it is either complete
    or stopped.

    Attributes:
        lends_memory: Whether the peer writes into memory here for it.
    """

    lends_memory = False

    def __init__(self, action: Move, context: LinkContext) -> None:
        self.ref = action.ref
        self.action = action
        self.context = context
        self.batches: dict[int, int] = {}  # in flight, and the bytes of each
        self.submitted = 0  # bytes of all batches so far
        self.error: Failure | None = None
        self.quiet = True
        self.collateral = False
        self.nbytes = action.plan.nbytes
        self.begun = 0.0  # when the data thread began with it
        # Sends and receives of a link are submitted in the order of its parts, one whole part after the other, as the peer
        # expects. A job submits when it is the first in line.
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
        """Whether it should be advanced without an event, because the device may be done."""
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
        """Record that what was not quiet has become so."""
        self.quiet = True

    def remote_writes_ended(self) -> None:
        """Record that the peer has ended its half and will not go on; matters only to jobs that lend it memory."""

    def calmed_by_close(self, caps: Capabilities) -> bool:
        """Return whether closing its link makes its memory quiet."""
        return caps.quiet == "peer_close" or (self.lends_memory and caps.quiet == "batch")

    def heard(self, said: SlotMessage) -> None:
        """Handle what the peer says about a slot; matters only to staged jobs."""

    def stop(self, why: Failure) -> None:
        """Submit nothing more; the first reason counts."""
        if self.error is None:
            self.error = why

    def completed(self, done: Completion) -> None:
        """Handle the end of a batch."""
        self.batches.pop(done.batch, None)
        self.quiet &= done.quiet
        if done.error is not None:
            self.stop(Failure.of(done.error))

    def bytes_so_far(self) -> int:
        """Return how many bytes of it have moved, as far as is known."""
        out, moved = self.submitted, self.context.transport.bytes_moved
        for batch, nbytes in self.batches.items():
            out -= nbytes
            with suppress(Exception):  # then it is not known of this batch
                out += min(max(moved(batch), 0), nbytes)
        return out

    def held_up(self, now: float) -> HeldUp | None:
        """Return what it waits for if it stands still for want of something other than its batches; ``None`` if it does not."""
        return None

    def _submit(self, batch: Batch | PlanBatch, nbytes: int, after: Fence | None = None) -> int:
        number = self.context.transport.submit(batch, after)
        self.batches[number] = nbytes
        self.submitted += nbytes
        self.context.batches[number] = (self,)
        return number
