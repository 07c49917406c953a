"""The staged jobs: what each side of a part does, by the verb that moves its pieces."""

from __future__ import annotations

from itertools import islice

from kvxfer.data.commands import SlotMessage, SlotNews
from kvxfer.data.jobs.job import LinkContext
from kvxfer.data.jobs.piece import PieceEvent, PieceState, StagedPiece
from kvxfer.data.jobs.staged import SlotAtPeer, Staged
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import HeldUp, Move
from kvxfer.transport import Verb

READY = 2
"""The number of pieces that a reader prepares to unpack before it is told that they can be read."""


class StagedSend(Staged):
    """Two-sided, producer: pack pieces and send them, tell the consumer which have a slot, free their slots."""

    def advance(self) -> None:
        self.settle()
        last = None
        try:
            while (piece := self.begin()) is not None:
                self.pack(piece)
                self.submit_piece(Verb.SEND, piece)
                last = piece
        finally:
            # Told last, because telling takes time, for which a consumer that is short of slots can wait.
            if last is not None:
                self.tell_ready(last)


class StagedRecv(Staged):
    """Two-sided, consumer: receive a piece into a slot, unpack it.

    While slots are plenty, it begins before it is told that the piece is being sent (see ``staging.py``).
    """

    def __init__(self, action: Move, context: LinkContext) -> None:
        super().__init__(action, context)
        self._announced = 0

    def heard(self, said: SlotMessage) -> None:
        self._announced = max(self._announced, said.piece + 1)

    def _sure(self, piece: StagedPiece) -> bool:
        return piece.number < self._announced

    def advance(self) -> None:
        self.settle()
        while (piece := self.begin()) is not None:
            self.submit_piece(Verb.RECV, piece)
        self.prepare()


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
