"""Staged parts that the producer writes into slots that the consumer has lent it."""

from __future__ import annotations

from kvxfer.data.commands import SlotMessage
from kvxfer.data.jobs.piece import PieceEvent, PieceState, StagedPiece
from kvxfer.data.jobs.staged import SlotAtPeer, Staged
from kvxfer.protocol import messages as m
from kvxfer.transport import Verb

__all__ = ["StagedLend", "StagedWrite"]


class StagedWrite(SlotAtPeer):
    """One-sided write, producer: pack each piece for which a slot was lent, write it there, tell the consumer."""

    def advance(self) -> None:
        self.settle()
        while (piece := self.begin()) is not None:
            self.pack(piece)
            self.submit_piece(Verb.WRITE, piece)

    def moved(self, piece: StagedPiece) -> None:
        super().moved(piece)
        self.tell_ready(piece)


class StagedLend(Staged):
    """One-sided write, consumer: lend a slot for each piece, unpack what was written there.

    After it is stopped, lent slots stay in use until the producer has ended its half or the link is closed.
    """

    lends_memory = True

    def heard(self, said: SlotMessage) -> None:
        piece = self.pieces.get(said.piece)
        if (
            piece is not None
            and piece.state is PieceState.LENT
            and isinstance(said, m.SlotReady)
            and self.fits(said, piece)
        ):
            self.submitted += piece.plan.nbytes  # which the peer has written
            self.step(piece, PieceEvent.SLOT_READY)

    def advance(self) -> None:
        self.settle()
        for piece in [p for p in self.pieces.values() if p.state is PieceState.ARRIVED]:
            self.land(piece)
        while (piece := self.begin()) is not None:  # type: ignore[assignment]
            self.step(piece, PieceEvent.LEND)
            assert piece.slot is not None
            self.tell_ready(piece, piece.slot.offset)
        self.prepare()

    def remote_writes_ended(self) -> None:
        self.calm()
