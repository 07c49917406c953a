"""Staged parts that the consumer reads from slots in which the producer has packed them."""

from __future__ import annotations

from itertools import islice

from kvxfer.data.commands import SlotMessage, SlotNews
from kvxfer.data.jobs.piece import PieceEvent, PieceState, StagedPiece
from kvxfer.data.jobs.staged import SlotAtPeer, Staged
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import HeldUp
from kvxfer.transport import Verb

__all__ = ["StagedRead", "StagedServe"]

READY = 2
"""The number of pieces that a reader prepares to unpack before it is told that they can be read."""


class StagedServe(Staged):
    """One-sided read, producer: pack pieces, tell the consumer where they are, free each slot when it has read the piece.

    When it is stopped, it frees all slots. The consumer may still read them, which does no harm here, because what it reads will not
    be confirmed: before the control thread has a part aborted or its link closed, it counts a revocation.
    """

    def advance(self) -> None:
        self.settle()
        while (piece := self.begin()) is not None:
            self.pack(piece)
            self.settle()  # a device packs a piece in less time than it takes to start the next

    def step(self, piece: StagedPiece, event: PieceEvent) -> None:
        super().step(piece, event)
        if event is PieceEvent.DEVICE_DONE and piece.state is PieceState.OFFERED and piece.slot is not None:
            self.tell_ready(piece, piece.slot.offset)

    def heard(self, said: SlotMessage) -> None:
        piece = self.pieces.get(said.piece)
        if piece is not None and isinstance(said, m.SlotFree):
            self.step(piece, PieceEvent.SLOT_FREE)


class StagedRead(SlotAtPeer):
    """One-sided read, consumer: read each announced piece into a slot here, tell the producer, unpack it."""

    def advance(self) -> None:
        self.settle()
        while (piece := self.begin()) is not None:
            self.submit_piece(Verb.READ, piece)
        self.prepare(islice(self.unbegun.values(), READY))

    def held_up(self, now: float) -> HeldUp | None:
        waits = bool(self.unbegun) and not self.pieces and not self._named
        return super().held_up(now) or (HeldUp.PEER if waits else None)

    def moved(self, piece: StagedPiece) -> None:
        self.context.tell(SlotNews(self.ref, m.SlotFree(*self.ref[2:], piece.number)))
        super().moved(piece)
