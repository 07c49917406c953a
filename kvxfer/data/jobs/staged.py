"""The base of jobs whose part passes packed through slots of staging memory, piece by piece, several pieces in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from kvxfer.data.commands import SlotFree, SlotNews, SlotReady
from kvxfer.data.jobs.job import PIECES, STAGE, Job, Wire
from kvxfer.data.staging import Slot
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import CopyPlan
from kvxfer.protocol.values import Move
from kvxfer.transport import Batch, Fence, Verb

__all__ = ["StagedPiece", "SlotAtPeer", "Staged", "misfit"]


@dataclass
class StagedPiece:
    """A piece of a part, with its slot; the fence passes when the device is done with it."""

    number: int
    plan: CopyPlan
    slot: Slot
    fence: Fence | None = None


def _pieces(action: Move) -> Iterator[CopyPlan]:
    """Yield the plans of a part's pieces, the same on both sides.

    If there are many pieces, the first is half as long, so that they do not all end at once: a library that shares its link
    between two pieces of equal length ends both at the same time, and then the link stands still.
    """
    nbytes = action.piece_bytes
    return action.plan.split(nbytes, nbytes // 2 if action.plan.nbytes > 2 * nbytes else 0)


def misfit(news: SlotReady, plan: CopyPlan) -> Failure:
    """Return the failure of a piece that has another length at the peer."""
    what = f"piece {news.piece} has {news.nbytes} bytes at the peer and {plan.nbytes} here"
    return Failure(FailureKind.MISUSE, what)


class Staged(Job):
    """The base of staged jobs: keeps the pieces still to begin, and the slots that are held."""

    def __init__(self, action: Move, wire: Wire) -> None:
        super().__init__(action, wire)
        self.staging = wire.staging
        self._rest: Iterator[tuple[int, CopyPlan]] = enumerate(_pieces(action))
        self._ahead: tuple[int, CopyPlan] | None = None
        self.held: dict[int, StagedPiece] = {}  # batch or piece number -> the piece that holds a slot
        self.unpacking: list[StagedPiece] = []
        self._packs: deque[Fence] = deque()  # of pieces that the device may still be packing
        self.stranded: list[StagedPiece] = []  # pieces that have ended while their slots may still be touched
        self._starving = False  # wants a slot, and there was none
        self._unpackers: dict[int, Callable[[Slot], Fence]] = {}  # by piece

    def peek(self) -> tuple[int, CopyPlan] | None:
        """Return the number and plan of the piece to begin next, or ``None`` after the last.

        It is cut when first asked for, while the one before is being packed.
        """
        if self._ahead is None:
            self._ahead = next(self._rest, None)
        return self._ahead

    @property
    def submitting(self) -> bool:
        return self.error is None and self.peek() is not None

    @property
    def starving(self) -> bool:
        return self._starving and self.error is None

    @property
    def slots(self) -> list[Slot]:
        return [piece.slot for piece in (*self.held.values(), *self.unpacking)]

    @property
    def complete(self) -> bool:
        return self.peek() is None and not self.held and not self.unpacking

    @property
    def ended(self) -> bool:
        return super().ended and not self.unpacking and not (self.error is not None and self._packs)

    @property
    def waiting_on_device(self) -> bool:
        return bool(self.unpacking or (self.error is not None and self._packs))

    def stop(self, why: Failure) -> None:
        super().stop(why)
        self._ahead, self._rest = None, iter(())
        self._unpackers.clear()

    def begin(self) -> StagedPiece | None:
        """Return the next piece with a slot for it, or ``None`` if there is nothing to begin now."""
        ahead = self.peek()
        if ahead is None or self.error is not None or not self.my_turn:
            return None
        slot = self.take()
        if slot is None:
            return None
        self._ahead = None
        return StagedPiece(*ahead, slot)

    def take(self) -> Slot | None:
        slot = self.staging.take(self.ref.link, self.ref.role)
        self._starving = slot is None
        return slot

    def one_run(self, verb: Verb, piece: StagedPiece, remote: int | None = None, after: Fence | None = None) -> None:
        one = np.array([piece.plan.nbytes], dtype=np.int64)
        batch = Batch(
            verb,
            self.wire.peer,
            STAGE,
            one,
            np.array([piece.slot.offset], dtype=np.int64),
            STAGE,
            None if remote is None else np.array([remote], dtype=np.int64),
            self.action.stream * PIECES + piece.number,
        )
        try:
            self.held[self._submit(batch, after)] = piece
        except BaseException:
            self.staging.give(piece.slot)
            raise

    def pack(self, piece: StagedPiece) -> Fence:
        try:
            self.settle_packs()
            fence = self.staging.pack(piece.plan, piece.slot)
        except BaseException:
            self.staging.give(piece.slot)
            raise
        self._packs.append(fence)
        return fence

    def settle_packs(self) -> None:
        """Forget the packing that is done. Once stopped, the job ends only after that, since its blocks may then be unmapped."""
        try:
            while self._packs and self._packs[0].passed():
                self._packs.popleft()
        except BaseException:
            self._packs.clear()  # a device that has failed packs nothing
            raise

    def get_ready(self, expected: Iterable[tuple[int, CopyPlan]] = ()) -> None:
        """Prepare to unpack the pieces that are on their way, and others.

        Call it while the peer has everything that it needs to go on, so that it costs no time.

        Args:
            expected: Numbers and plans of the other pieces.
        """
        if self.error is not None:
            return
        for number, plan in chain(((p.number, p.plan) for p in self.held.values()), expected):
            if number not in self._unpackers:
                self._unpackers[number] = self.staging.unpack(plan)

    def land(self, piece: StagedPiece) -> None:
        """Begin to unpack a piece that has arrived in its slot."""
        try:
            unpack = self._unpackers.pop(piece.number, None) or self.staging.unpack(piece.plan)
            piece.fence = unpack(piece.slot)
        except BaseException:
            self.staging.give(piece.slot)
            raise
        self.unpacking.append(piece)

    def settle(self) -> None:
        """Free the slots of the pieces whose unpacking has finished."""
        for piece in [p for p in self.unpacking if p.fence is None or p.fence.passed()]:
            self.unpacking.remove(piece)
            self.staging.give(piece.slot)

    def give_back(self, piece: StagedPiece, quiet: bool) -> None:
        """Free the slot of a piece that ends here; if it is not quiet, the slot stays in use until it is."""
        if quiet:
            self.staging.give(piece.slot)
        else:
            self.stranded.append(piece)

    def calm(self) -> None:
        super().calm()
        for piece in self.stranded:
            self.staging.give(piece.slot)
        self.stranded.clear()


class SlotAtPeer(Staged):
    """A job whose pieces begin when the peer names a slot of its own for them, in any order."""

    def __init__(self, action: Move, wire: Wire) -> None:
        super().__init__(action, wire)
        self._plans = dict(self._rest)
        self._named: dict[int, int] = {}  # the offsets at the peer of the pieces that it has named, in that order

    @property
    def complete(self) -> bool:
        return super().complete and not self._plans

    def heard(self, news: SlotNews) -> None:
        plan = self._plans.get(news.piece)
        if plan is None or isinstance(news, SlotFree):
            return
        if news.offset is None:
            self.stop(Failure(FailureKind.MISUSE, f"the peer has named no slot for piece {news.piece}"))
            return
        if plan.nbytes != news.nbytes:
            self.stop(misfit(news, plan))
            return
        self._named.setdefault(news.piece, news.offset)

    def next_named(self) -> tuple[StagedPiece, int] | None:
        """Return the next piece that has a slot on both sides, and its offset at the peer; ``None`` if there is none now."""
        if self.error is not None or not self._named or (slot := self.take()) is None:
            return None
        number = next(iter(self._named))
        return StagedPiece(number, self._plans.pop(number), slot), self._named.pop(number)
