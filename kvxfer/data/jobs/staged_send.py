"""Staged parts that both sides move: the producer sends pieces from its slots, the consumer receives them into its own."""

from __future__ import annotations

from kvxfer.data.commands import SlotMessage
from kvxfer.data.jobs.job import LinkContext
from kvxfer.data.jobs.piece import StagedPiece
from kvxfer.data.jobs.staged import Staged
from kvxfer.protocol.values import Move
from kvxfer.transport import Verb

__all__ = ["StagedRecv", "StagedSend"]


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
