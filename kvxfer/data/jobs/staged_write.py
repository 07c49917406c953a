"""Staged parts that the producer writes into slots that the consumer has lent it."""

from __future__ import annotations

from collections import deque

from kvxfer.data.commands import SlotFree, SlotNews, SlotReady
from kvxfer.data.jobs.job import Wire
from kvxfer.data.jobs.staged import SlotAtPeer, Staged, StagedPiece, misfit
from kvxfer.failures import Failure
from kvxfer.protocol.values import Move
from kvxfer.transport import Completion, Verb

__all__ = ["StagedLend", "StagedWrite"]


class StagedWrite(SlotAtPeer):
    """One-sided write, producer: pack each piece for which a slot was lent, write it there, tell the consumer."""

    def advance(self) -> None:
        self.settle_packs()
        while (named := self.next_named()) is not None:
            piece, offset = named
            self.one_run(Verb.WRITE, piece, remote=offset, after=self.pack(piece))

    def completed(self, done: Completion) -> None:
        super().completed(done)
        piece = self.held.pop(done.batch)
        self.give_back(piece, done.quiet)
        if done.error is None and self.error is None:
            self.wire.tell(SlotReady(self.ref, piece.number, None, piece.plan.nbytes))


class StagedLend(Staged):
    """One-sided write, consumer: lend a slot for each piece, unpack what was written there.

    After it is stopped, lent slots stay in use until the producer has ended its half or the link is closed.
    """

    lends_memory = True

    def __init__(self, action: Move, wire: Wire) -> None:
        super().__init__(action, wire)
        self._written: deque[StagedPiece] = deque()

    @property
    def complete(self) -> bool:
        return super().complete and not self._written

    def heard(self, news: SlotNews) -> None:
        lent = self.held.get(news.piece)
        if lent is None or isinstance(news, SlotFree):
            return
        if lent.plan.nbytes != news.nbytes:
            self.stop(misfit(news, lent.plan))
            return
        self._written.append(self.held.pop(news.piece))

    def advance(self) -> None:
        self.settle()
        while self._written:
            self.land(self._written.popleft())
        while (piece := self.begin()) is not None:
            self.held[piece.number] = piece
            self.wire.tell(SlotReady(self.ref, piece.number, piece.slot.offset, piece.plan.nbytes))
        self.get_ready()

    def stop(self, why: Failure) -> None:
        super().stop(why)
        for piece in self._written:
            self.staging.give(piece.slot)
        self._written.clear()
        self.quiet &= not self.held
        self.stranded += self.held.values()
        self.held.clear()

    def remote_writes_ended(self) -> None:
        self.calm()
