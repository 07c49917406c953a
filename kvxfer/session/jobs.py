"""Jobs: how one part becomes batches. Run by the mover on the data thread; never block.

A direct job submits the plan's runs as they are. Staged jobs cut the plan into pieces and pass them through slots of
staging memory: pack, move as one long run, unpack, several pieces in flight at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvxfer.errors import TransportError
from kvxfer.geometry import CopyPlan, Region
from kvxfer.session.staging import Slot, Staging
from kvxfer.session.values import Move, PartRef
from kvxfer.transport import Batch, Completion, Fence, Transport, Verb

__all__ = ["Job", "Wire", "make_job"]

CACHE, STAGE = 0, 1
PIECES = 1 << 20
"""Stream numbers set aside for each part: pieces of part n are numbered from ``n * PIECES``."""

SlotSink = Callable[[PartRef, int, int, int], None]


@dataclass(frozen=True)
class Wire:
    """What a job needs of the mover: the back end, the peer, memory, and the table of batches in flight."""

    transport: Transport
    peer: int
    regions: tuple[Region, ...]
    staging: Staging | None
    batches: dict[int, Job]


class Job:
    """One part on its way. ``advance`` is called after every event; the job has ended when nothing of it is in flight
    and it is either complete or stopped."""

    def __init__(self, action: Move, wire: Wire) -> None:
        self.ref = action.ref
        self.action = action
        self.wire = wire
        self.batches: set[int] = set()
        self.error: str | None = None
        self.quiet = True
        self.collateral = False
        self.nbytes = action.plan.nbytes
        # What is sent, received or served on a link goes in the order of its parts, whole parts one after the other:
        # the order in which the peer expects it. A job submits when it is the first in line.
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
        return False

    @property
    def restless(self) -> bool:
        """Whether it should be advanced without an event of its own: when the device is done, or a slot is free."""
        return self.waiting_on_device

    def advance(self) -> None:
        """Do what can be done now."""

    def calm(self) -> None:
        """What was not quiet has become so."""
        self.quiet = True

    def slot(self, piece: int, offset: int, nbytes: int) -> None:
        """The peer speaks of a piece; only staged jobs care."""

    def stop(self, reason: str) -> None:
        """Submit nothing more; the first reason counts."""
        if self.error is None:
            self.error = reason

    def completed(self, done: Completion) -> None:
        self.batches.discard(done.batch)
        self.quiet &= done.quiet
        if done.error is not None:
            self.stop(str(done.error) or type(done.error).__name__)

    def _submit(self, batch: Batch, after: Fence | None = None) -> int:
        number = self.wire.transport.submit(batch, after)
        self.batches.add(number)
        self.wire.batches[number] = self
        return number


class Direct(Job):
    """The plan's own runs in one batch."""

    def __init__(self, action: Move, wire: Wire) -> None:
        super().__init__(action, wire)
        self._begun = False

    @property
    def complete(self) -> bool:
        return self._begun

    @property
    def submitting(self) -> bool:
        return not self._begun and self.error is None

    def advance(self) -> None:
        if not self.submitting or not self.my_turn:
            return
        self._begun = True
        plan, verb = self.action.plan, self.action.verb
        if plan.nbytes == 0:
            return
        incoming = verb in (Verb.READ, Verb.RECV)
        stream = self.action.stream * PIECES
        if self.wire.transport.capabilities.factored:
            none = np.empty(0, dtype=np.int64)
            self._submit(Batch(verb, self.wire.peer, CACHE, none, none, CACHE, none, stream, plan))
            return
        runs = plan.runs()
        local, remote = (runs.dst, runs.src) if incoming else (runs.src, runs.dst)
        one_sided = verb in (Verb.READ, Verb.WRITE)
        self._submit(
            Batch(verb, self.wire.peer, CACHE, runs.length, local, CACHE, remote if one_sided else None, stream)
        )


@dataclass
class _Piece:
    number: int
    plan: CopyPlan
    slot: Slot
    fence: Fence | None = None


class Staged(Job):
    """What all staged jobs share: the pieces still to begin, and the slots they hold."""

    def __init__(self, action: Move, wire: Wire) -> None:
        super().__init__(action, wire)
        if wire.staging is None:
            raise TransportError("a staged part needs staging memory, and there is none")
        self.staging = wire.staging
        self.pieces = deque(enumerate(action.plan.split(action.piece_bytes)))
        self.held: dict[int, _Piece] = {}  # batch or piece number -> the piece that holds a slot
        self.unpacking: list[_Piece] = []
        self.stranded: list[_Piece] = []  # their slots may still be touched
        self.starving = False  # wants a slot, and there was none

    @property
    def submitting(self) -> bool:
        return bool(self.pieces) and self.error is None

    @property
    def restless(self) -> bool:
        return self.starving or self.waiting_on_device

    @property
    def complete(self) -> bool:
        return not self.pieces and not self.held and not self.unpacking

    @property
    def ended(self) -> bool:
        return super().ended and not self.unpacking

    @property
    def waiting_on_device(self) -> bool:
        return bool(self.unpacking)

    def stop(self, reason: str) -> None:
        super().stop(reason)
        self.pieces.clear()

    def begin(self) -> _Piece | None:
        """The next piece with a slot for it, or nothing now."""
        if not self.submitting or not self.my_turn:
            return None
        slot = self.take()
        if slot is None:
            return None
        number, plan = self.pieces.popleft()
        return _Piece(number, plan, slot)

    def take(self) -> Slot | None:
        slot = self.staging.take(self.ref.link, self.ref.role)
        self.starving = slot is None
        return slot

    def one_run(self, verb: Verb, piece: _Piece, remote: int | None = None, after: Fence | None = None) -> None:
        one = np.array([piece.plan.nbytes], dtype=np.int64)
        batch = Batch(
            verb, self.wire.peer, STAGE, one, np.array([piece.slot.offset], dtype=np.int64), STAGE,
            None if remote is None else np.array([remote], dtype=np.int64), self.action.stream * PIECES + piece.number,
        )  # fmt: skip
        try:
            self.held[self._submit(batch, after)] = piece
        except Exception:
            self.staging.give(piece.slot)
            raise

    def pack(self, piece: _Piece) -> Fence:
        try:
            return self.staging.pack(piece.plan, piece.slot)
        except Exception:
            self.staging.give(piece.slot)
            raise

    def land(self, piece: _Piece) -> None:
        """A piece has arrived in its slot: begin to unpack it."""
        try:
            piece.fence = self.staging.unpack(piece.plan, piece.slot)
        except Exception:
            self.staging.give(piece.slot)
            raise
        self.unpacking.append(piece)

    def settle(self) -> list[_Piece]:
        """Pieces whose unpacking has finished; their slots are free again."""
        over = [p for p in self.unpacking if p.fence is None or p.fence.passed()]
        for piece in over:
            self.unpacking.remove(piece)
            self.staging.give(piece.slot)
        return over

    def give_back(self, piece: _Piece, quiet: bool) -> None:
        """A piece that ends here; a slot that is not quiet stays out until it is."""
        if quiet:
            self.staging.give(piece.slot)
        else:
            self.stranded.append(piece)

    def calm(self) -> None:
        super().calm()
        for piece in self.stranded:
            self.staging.give(piece.slot)
        self.stranded.clear()


class StagedSend(Staged):
    """Two-sided, producer: pack a piece, send it (and say so), free its slot."""

    def __init__(self, action: Move, wire: Wire, sink: SlotSink) -> None:
        super().__init__(action, wire)
        self._sink = sink

    def advance(self) -> None:
        while (piece := self.begin()) is not None:
            self.one_run(Verb.SEND, piece, after=self.pack(piece))
            self._sink(self.ref, piece.number, piece.slot.offset, piece.plan.nbytes)

    def completed(self, done: Completion) -> None:
        super().completed(done)
        self.give_back(self.held.pop(done.batch), done.quiet)


class StagedRecv(Staged):
    """Two-sided, consumer: receive a piece into a slot, unpack it. It begins before it is told that the piece is being
    sent only while slots are plenty (see ``staging.py``)."""

    def __init__(self, action: Move, wire: Wire) -> None:
        super().__init__(action, wire)
        self._announced = 0

    def slot(self, piece: int, offset: int, nbytes: int) -> None:
        self._announced = max(self._announced, piece + 1)

    def take(self) -> Slot | None:
        slot = self.staging.take(self.ref.link, self.ref.role, sure=self.pieces[0][0] < self._announced)
        self.starving = slot is None
        return slot

    def advance(self) -> None:
        self.settle()
        while (piece := self.begin()) is not None:
            self.one_run(Verb.RECV, piece)

    def completed(self, done: Completion) -> None:
        super().completed(done)
        piece = self.held.pop(done.batch)
        if done.error is None and self.error is None:
            self.land(piece)
        else:
            self.give_back(piece, done.quiet)


class StagedServe(Staged):
    """One-sided read, producer: pack pieces, tell the consumer where they lie, free each when it says it took it."""

    def __init__(self, action: Move, wire: Wire, sink: SlotSink) -> None:
        super().__init__(action, wire)
        self._sink = sink
        self._packing: list[_Piece] = []

    @property
    def waiting_on_device(self) -> bool:
        return bool(self._packing)

    @property
    def complete(self) -> bool:
        return super().complete and not self._packing

    def advance(self) -> None:
        while (piece := self.begin()) is not None:
            piece.fence = self.pack(piece)
            self._packing.append(piece)
        for piece in [p for p in self._packing if p.fence is None or p.fence.passed()]:
            self._packing.remove(piece)
            self.held[piece.number] = piece
            self._sink(self.ref, piece.number, piece.slot.offset, piece.plan.nbytes)

    def slot(self, piece: int, offset: int, nbytes: int) -> None:
        taken = self.held.pop(piece, None)
        if taken is not None:
            self.staging.give(taken.slot)

    def stop(self, reason: str) -> None:
        """Slots may still be read by the consumer, which does no harm here; what it reads is not confirmed any more."""
        super().stop(reason)
        for piece in [*self.held.values(), *self._packing]:
            self.staging.give(piece.slot)
        self.held.clear()
        self._packing.clear()


class StagedRead(Staged):
    """One-sided read, consumer: read each announced piece into a slot of our own, unpack it, say so."""

    def __init__(self, action: Move, wire: Wire, sink: SlotSink) -> None:
        super().__init__(action, wire)
        self._sink = sink
        self._plans = dict(self.pieces)
        self._announced: deque[tuple[int, int]] = deque()
        self.pieces.clear()

    @property
    def complete(self) -> bool:
        return super().complete and not self._plans

    def slot(self, piece: int, offset: int, nbytes: int) -> None:
        plan = self._plans.get(piece)
        if plan is None:
            return
        if plan.nbytes != nbytes:
            self.stop(f"piece {piece} has {nbytes} bytes at the producer and {plan.nbytes} here")
            return
        self._announced.append((piece, offset))

    def advance(self) -> None:
        for piece in self.settle():
            self._sink(self.ref, piece.number, -1, 0)
        while self.error is None and self._announced:
            slot = self.take()
            if slot is None:
                return
            number, offset = self._announced.popleft()
            plan = self._plans.pop(number, None)
            if plan is None:
                self.staging.give(slot)
                continue
            self.one_run(Verb.READ, _Piece(number, plan, slot), remote=offset)

    def completed(self, done: Completion) -> None:
        super().completed(done)
        piece = self.held.pop(done.batch)
        if done.error is None and self.error is None:
            self.land(piece)
        else:
            self.give_back(piece, done.quiet)


def make_job(action: Move, wire: Wire, sink: SlotSink) -> Job:
    """The job for a part, by verb and whether it is staged."""
    if not action.piece_bytes:
        return Direct(action, wire)
    match action.verb, action.ref.role:
        case Verb.SEND, _:
            return StagedSend(action, wire, sink)
        case Verb.RECV, _:
            return StagedRecv(action, wire)
        case Verb.READ, "producer":
            return StagedServe(action, wire, sink)
        case Verb.READ, _:
            return StagedRead(action, wire, sink)
    raise TransportError(f"a staged {action.verb} is not something this version can do")
