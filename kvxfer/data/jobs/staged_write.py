"""Staged parts that the producer writes into slots that the consumer has lent it."""

from __future__ import annotations

from kvxfer.data.commands import SlotNews, SlotReady
from kvxfer.data.jobs.piece import Piece, PieceEvent, PieceState
from kvxfer.data.jobs.staged import SlotAtPeer, Staged
from kvxfer.transport import Verb

__all__ = ["StagedLend", "StagedWrite"]


class StagedWrite(SlotAtPeer):
    """One-sided write, producer: pack each piece for which a slot was lent, write it there, tell the consumer."""

    def advance(self) -> None:
        self.settle()
        while (piece := self.begin()) is not None:
            self.pack(piece)
            self.submit_piece(Verb.WRITE, piece)

    def moved(self, piece: Piece) -> None:
        super().moved(piece)
        self.wire.tell(SlotReady(self.ref, piece.number, None, piece.plan.nbytes))


class StagedLend(Staged):
    """One-sided write, consumer: lend a slot for each piece, unpack what was written there.

    After it is stopped, lent slots stay in use until the producer has ended its half or the link is closed.
    """

    lends_memory = True

    def heard(self, news: SlotNews) -> None:
        piece = self.pieces.get(news.piece)
        if (
            piece is not None
            and piece.state is PieceState.LENT
            and isinstance(news, SlotReady)
            and self.fits(news, piece)
        ):
            self.step(piece, PieceEvent.SLOT_READY)

    def advance(self) -> None:
        self.settle()
        for piece in [p for p in self.pieces.values() if p.state is PieceState.ARRIVED]:
            self.land(piece)
        while (piece := self.begin()) is not None:  # type: ignore[assignment]
            self.step(piece, PieceEvent.LEND)
            assert piece.slot is not None
            self.wire.tell(SlotReady(self.ref, piece.number, piece.slot.offset, piece.plan.nbytes))
        self.prepare()

    def remote_writes_ended(self) -> None:
        self.calm()
