"""Staged parts that both sides move: the producer sends pieces from its slots, the consumer receives them into its own."""

from __future__ import annotations

from kvxfer.data.commands import SlotNews, SlotReady
from kvxfer.data.jobs.job import Wire
from kvxfer.data.jobs.staged import Staged
from kvxfer.data.staging import Slot
from kvxfer.protocol.values import Move
from kvxfer.transport import Completion, Verb

__all__ = ["StagedRecv", "StagedSend"]


class StagedSend(Staged):
    """Two-sided, producer: pack pieces and send them, tell the consumer which have a slot, free their slots."""

    def advance(self) -> None:
        self.settle_packs()
        last = None
        try:
            while (piece := self.begin()) is not None:
                self.one_run(Verb.SEND, piece, after=self.pack(piece))
                last = piece
        finally:
            # Told last, since telling takes time, for which a consumer that is short of slots can wait.
            if last is not None:
                self.wire.tell(SlotReady(self.ref, last.number, None, last.plan.nbytes))

    def completed(self, done: Completion) -> None:
        super().completed(done)
        self.give_back(self.held.pop(done.batch), done.quiet)


class StagedRecv(Staged):
    """Two-sided, consumer: receive a piece into a slot, unpack it.

    While slots are plenty, it begins before it is told that the piece is being sent (see ``staging.py``).
    """

    def __init__(self, action: Move, wire: Wire) -> None:
        super().__init__(action, wire)
        self._announced = 0

    def heard(self, news: SlotNews) -> None:
        self._announced = max(self._announced, news.piece + 1)

    def take(self) -> Slot | None:
        sure = (ahead := self.peek()) is not None and ahead[0] < self._announced
        slot = self.staging.take(self.ref.link, self.ref.role, sure)
        self._starving = slot is None
        return slot

    def advance(self) -> None:
        self.settle()
        while (piece := self.begin()) is not None:
            self.one_run(Verb.RECV, piece)
        self.get_ready()

    def completed(self, done: Completion) -> None:
        super().completed(done)
        piece = self.held.pop(done.batch)
        if done.error is None and self.error is None:
            self.land(piece)
        else:
            self.give_back(piece, done.quiet)
