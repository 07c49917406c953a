"""The base of jobs whose part passes packed through slots of staging memory, piece by piece, several pieces in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from kvxfer import clock
from kvxfer.data.commands import SlotMessage, SlotNews
from kvxfer.data.jobs.job import PIECES, STAGE, Job, LinkContext
from kvxfer.data.jobs.piece import PIECE, PieceEvent, PieceState, StagedPiece
from kvxfer.data.staging import Slot
from kvxfer.failures import Failure, FailureKind
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import HeldUp, Move
from kvxfer.transport import Batch, Completion, Verb

WITHOUT_SLOT = frozenset({PieceState.SETTLING, PieceState.OVER})
ON_ITS_WAY = frozenset({PieceState.WAITING, PieceState.NAMED, PieceState.MOVING, PieceState.LENT})
DEVICE_S = 2.0
"""The seconds after which a device counts as hanging that has not packed or unpacked a piece."""
ON_DEVICE = frozenset({PieceState.PACKING, PieceState.UNPACKING, PieceState.SETTLING})


def _pieces(action: Move) -> Iterator[StagedPiece]:
    """Yield a part's pieces, the same on both sides.

    If there are many pieces, the first is half as long, so that they do not all end at once. A library that shares its link
    between two pieces of equal length ends both at the same time, and then the link stands still.
    """
    nbytes = action.piece_bytes
    plans = action.plan.split(nbytes, nbytes // 2 if action.plan.nbytes > 2 * nbytes else 0)
    return (StagedPiece(number, plan) for number, plan in enumerate(plans))


class Staged(Job):
    """The base of staged jobs: takes each piece through its life (``piece.py``).

    Attributes:
        pieces: The pieces that have begun and are not over, by their numbers.
    """

    def __init__(self, action: Move, context: LinkContext) -> None:
        super().__init__(action, context)
        self.staging = context.staging
        self.pieces: dict[int, StagedPiece] = {}
        self._rest = _pieces(action)
        self._ahead: StagedPiece | None = None
        self._starving = False  # wants a slot, and there was none

    def peek(self) -> StagedPiece | None:
        """Return the piece to begin next, or ``None`` after the last.

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
        return [piece.slot for piece in self.pieces.values() if piece.slot is not None]

    @property
    def complete(self) -> bool:
        return self.peek() is None and not self.pieces

    @property
    def ended(self) -> bool:
        return super().ended and not self.waiting_on_device

    @property
    def waiting_on_device(self) -> bool:
        """Whether the device is at work for it. Once stopped, it ends only after that, because its blocks may then be unmapped."""
        stopped = self.error is not None
        return any(p.state in ON_DEVICE or (stopped and p.fence is not None) for p in self.pieces.values())

    def step(self, piece: StagedPiece, event: PieceEvent) -> None:
        """Have a piece go on as its table says; a piece that needs its slot no more gives it back."""
        after = PIECE.after(piece.state, event)
        if after is None:
            return
        piece.state = after
        if after in WITHOUT_SLOT and piece.slot is not None:
            self.staging.give(piece.slot)
            piece.slot = None
        if after is PieceState.STRANDED:
            self.quiet = False
        elif after is PieceState.OVER:
            self.pieces.pop(piece.number, None)
        elif after is PieceState.SETTLING and piece.fence is None:
            self.step(piece, PieceEvent.DEVICE_DONE)

    def settle(self) -> None:
        """Take in what the device has done."""
        for piece in [p for p in self.pieces.values() if p.fence is not None]:
            try:
                assert piece.fence is not None
                if not piece.fence.passed():
                    continue
            except BaseException as e:  # a device that has failed does nothing any more
                piece.fence = None
                self.step(piece, PieceEvent.DEVICE_FAILED)
                raise self.staging.failed("passed() of a fence", e) from e
            piece.fence = None
            self.step(piece, PieceEvent.DEVICE_DONE)

    def stop(self, why: Failure) -> None:
        super().stop(why)
        self._ahead, self._rest = None, iter(())
        for piece in list(self.pieces.values()):
            self.step(piece, PieceEvent.STOP)

    def calm(self) -> None:
        super().calm()
        for piece in [p for p in self.pieces.values() if p.state is PieceState.STRANDED]:
            self.step(piece, PieceEvent.QUIET)

    def begin(self) -> StagedPiece | None:
        """Return the next piece with a slot for it, or ``None`` if there is nothing to begin now."""
        piece = self.peek()
        if piece is None or self.error is not None or not self.my_turn or not self._take(piece):
            return None
        self._ahead = None
        return piece

    def _take(self, piece: StagedPiece) -> bool:
        """Take a slot for a piece; return whether there was one."""
        piece.slot = self.staging.take(self.ref.link, self.ref.role, self._sure(piece))
        self._starving = piece.slot is None
        if piece.slot is not None:
            self.pieces[piece.number] = piece
        return not self._starving

    def _sure(self, piece: StagedPiece) -> bool:
        """Return whether the peer need not wait for a slot of its own for a piece."""
        return True

    def pack(self, piece: StagedPiece) -> None:
        """Begin to pack a piece."""
        assert piece.slot is not None
        piece.fence, piece.since = self.staging.pack(piece.plan, piece.slot), clock.now()
        self.step(piece, PieceEvent.PACK)

    def submit_piece(self, verb: Verb, piece: StagedPiece) -> None:
        """Move a piece in a batch of its own, once it is packed."""
        assert piece.slot is not None
        here, there = piece.slot.offset, piece.remote
        batch = Batch(
            verb,
            self.context.peer,
            STAGE,
            np.array([piece.plan.nbytes], dtype=np.int64),
            np.array([here], dtype=np.int64),
            STAGE,
            None if there is None else np.array([there], dtype=np.int64),
            self.action.stream * PIECES + piece.number,
        )
        piece.batch = self._submit(batch, piece.plan.nbytes, piece.fence)
        self.step(piece, PieceEvent.SUBMIT)

    def completed(self, done: Completion) -> None:
        super().completed(done)
        piece = next(p for p in self.pieces.values() if p.batch == done.batch)
        if done.error is None and self.error is None:
            self.moved(piece)
        else:
            self.step(piece, PieceEvent.FAIL if done.quiet else PieceEvent.FAIL_UNQUIET)

    def moved(self, piece: StagedPiece) -> None:
        """Handle the end of a piece's batch."""
        if self.ref.role == "producer":
            self.step(piece, PieceEvent.LEFT)
        else:
            self.step(piece, PieceEvent.CAME)
            self.land(piece)

    def prepare(self, expected: Iterable[StagedPiece] = ()) -> None:
        """Prepare to unpack the pieces that are on their way, and others.

        Call it while the peer has everything that it needs to go on, so that it costs no time.
        """
        if self.error is not None:
            return
        for piece in chain(self.pieces.values(), expected):
            if piece.unpack is None and piece.state in ON_ITS_WAY:
                piece.unpack = self.staging.unpack(piece.plan)

    def land(self, piece: StagedPiece) -> None:
        """Begin to unpack a piece that has arrived in its slot."""
        assert piece.slot is not None
        unpack = piece.unpack or self.staging.unpack(piece.plan)
        piece.fence, piece.since = unpack(piece.slot), clock.now()
        self.step(piece, PieceEvent.UNPACK)

    def held_up(self, now: float) -> HeldUp | None:
        for piece in self.pieces.values():
            if piece.fence is not None and now - piece.since > DEVICE_S and not piece.fence.passed():
                return HeldUp.DEVICE
        return HeldUp.SLOT if self.starving and not self.pieces else None

    def tell_ready(self, piece: StagedPiece, offset: int | None = None) -> None:
        """Tell the peer that there is a slot for a piece, and where if it must know."""
        self.context.tell(SlotNews(self.ref, m.SlotReady(*self.ref[2:], piece.number, offset, piece.plan.nbytes)))

    def fits(self, said: m.SlotReady, piece: StagedPiece) -> bool:
        """Return whether a piece is as long at the peer; if it is not, stop."""
        if piece.plan.nbytes != said.nbytes:
            what = f"piece {said.piece} has {said.nbytes} bytes at the peer and {piece.plan.nbytes} here"
            self.stop(Failure(FailureKind.MISUSE, what))
        return self.error is None


class SlotAtPeer(Staged):
    """A job whose pieces begin when the peer names a slot of its own for them, in any order."""

    def __init__(self, action: Move, context: LinkContext) -> None:
        super().__init__(action, context)
        self.unbegun = {piece.number: piece for piece in self._rest}
        self._named: deque[StagedPiece] = deque()  # those of them that the peer has named, in that order

    @property
    def complete(self) -> bool:
        return super().complete and not self.unbegun

    def heard(self, said: SlotMessage) -> None:
        piece = self.unbegun.get(said.piece)
        if piece is None or isinstance(said, m.SlotFree):
            return
        if said.offset is None:
            self.stop(Failure(FailureKind.MISUSE, f"the peer has named no slot for piece {said.piece}"))
        elif self.fits(said, piece) and piece.state is PieceState.WAITING:
            piece.remote = said.offset
            self.step(piece, PieceEvent.SLOT_READY)
            self._named.append(piece)

    def begin(self) -> StagedPiece | None:
        """Return the next piece that has a slot on both sides, or ``None`` if there is none now."""
        if self.error is not None or not self._named or not self._take(self._named[0]):
            return None
        piece = self._named.popleft()
        del self.unbegun[piece.number]
        return piece
