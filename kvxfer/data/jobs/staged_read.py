"""Staged parts that the consumer reads from slots in which the producer has packed them."""

from __future__ import annotations

from itertools import islice

from kvxfer.data.commands import SlotFree, SlotNews, SlotReady
from kvxfer.data.jobs.job import Wire
from kvxfer.data.jobs.staged import SlotAtPeer, Staged, StagedPiece
from kvxfer.data.staging import Slot
from kvxfer.failures import Failure
from kvxfer.protocol.values import Move
from kvxfer.transport import Completion, Verb

__all__ = ["StagedRead", "StagedServe"]

READY = 2
"""The number of pieces that a reader prepares to unpack before it is told that they can be read."""


class StagedServe(Staged):
    """One-sided read, producer: pack pieces, tell the consumer where they are, free each slot when it has read the piece."""

    def __init__(self, action: Move, wire: Wire) -> None:
        super().__init__(action, wire)
        self._packing: list[StagedPiece] = []

    @property
    def waiting_on_device(self) -> bool:
        return super().waiting_on_device or bool(self._packing)

    @property
    def slots(self) -> list[Slot]:
        return [*super().slots, *(piece.slot for piece in self._packing)]

    @property
    def complete(self) -> bool:
        return super().complete and not self._packing

    def advance(self) -> None:
        self.settle_packs()
        self._announce()
        while (piece := self.begin()) is not None:
            piece.fence = self.pack(piece)
            self._packing.append(piece)
            self._announce()  # a device packs a piece in less time than it takes to start the next

    def _announce(self) -> None:
        """Tell the consumer which pieces are packed."""
        for piece in [p for p in self._packing if p.fence is None or p.fence.passed()]:
            self._packing.remove(piece)
            self.held[piece.number] = piece
            self.wire.tell(SlotReady(self.ref, piece.number, piece.slot.offset, piece.plan.nbytes))

    def heard(self, news: SlotNews) -> None:
        taken = self.held.pop(news.piece, None)
        if taken is not None:
            self.staging.give(taken.slot)

    def stop(self, why: Failure) -> None:
        """Stop, and free all slots.

        The consumer may still read them, which does no harm here, since what it reads will not be confirmed: before the control
        thread has a part aborted or its link closed, it counts a revocation.
        """
        super().stop(why)
        for piece in [*self.held.values(), *self._packing]:
            self.staging.give(piece.slot)
        self.held.clear()
        self._packing.clear()


class StagedRead(SlotAtPeer):
    """One-sided read, consumer: read each announced piece into a slot here, tell the producer, unpack it."""

    def advance(self) -> None:
        self.settle()
        while (named := self.next_named()) is not None:
            piece, offset = named
            self.one_run(Verb.READ, piece, remote=offset)
        self.get_ready(islice(self._plans.items(), READY))

    def completed(self, done: Completion) -> None:
        super().completed(done)
        piece = self.held.pop(done.batch)
        if done.error is None and self.error is None:
            self.wire.tell(SlotFree(self.ref, piece.number))
            self.land(piece)
        else:
            self.give_back(piece, done.quiet)
