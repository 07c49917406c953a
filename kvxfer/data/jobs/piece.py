"""The life of a staged piece as a table, the same for every verb and both sides.

``docs/protocol.md`` draws it; ``tests/test_transitions.py`` checks that no pair is missing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.data.staging import Slot
from kvxfer.geometry import CopyPlan
from kvxfer.transitions import Transitions, pairs
from kvxfer.transport import Fence


class PieceState(enum.StrEnum):
    """The states of a piece on one side."""

    __hash__ = str.__hash__  # an enum's own takes as long as all else of a step

    WAITING = "waiting"  # it has no slot
    NAMED = "named"  # it has one at the peer, and none here
    PACKING = "packing"  # the device packs it
    OFFERED = "offered"  # the peer may read its slot
    LENT = "lent"  # the peer may write to its slot
    MOVING = "moving"  # a batch reads or writes its slot
    ARRIVED = "arrived"  # its bytes are in its slot
    UNPACKING = "unpacking"  # the device unpacks it
    STRANDED = "stranded"  # it is over, but the peer or the back end may still touch its slot
    SETTLING = "settling"  # it is over and has no slot, but the device may still be packing it
    OVER = "over"


class PieceEvent(enum.StrEnum):
    """What happens to a piece."""

    __hash__ = str.__hash__

    SLOT_READY = "slot ready at the peer"
    SLOT_FREE = "slot free at the peer"
    PACK = "packing begun"
    LEND = "slot lent"
    SUBMIT = "batch submitted"
    DEVICE_DONE = "device done"
    DEVICE_FAILED = "device failed"
    LEFT = "batch ended, bytes at the peer"
    CAME = "batch ended, bytes here"
    FAIL = "batch failed"
    FAIL_UNQUIET = "batch failed, memory not quiet"
    UNPACK = "unpacking begun"
    STOP = "part stopped"
    QUIET = "memory quiet"


_S, _e = PieceState, PieceEvent
_BATCH = (_e.LEFT, _e.CAME, _e.FAIL, _e.FAIL_UNQUIET)
_DEVICE = (_e.DEVICE_DONE, _e.DEVICE_FAILED)


PIECE: Transitions[PieceState, PieceEvent] = Transitions(
    moves={
        (_S.WAITING, _e.SLOT_READY): _S.NAMED,
        **{(s, _e.PACK): _S.PACKING for s in (_S.WAITING, _S.NAMED)},
        **{(s, _e.SUBMIT): _S.MOVING for s in (_S.WAITING, _S.NAMED, _S.PACKING)},
        (_S.WAITING, _e.LEND): _S.LENT,
        (_S.PACKING, _e.DEVICE_DONE): _S.OFFERED,
        (_S.OFFERED, _e.SLOT_FREE): _S.OVER,
        (_S.LENT, _e.SLOT_READY): _S.ARRIVED,
        (_S.MOVING, _e.LEFT): _S.OVER,
        (_S.MOVING, _e.CAME): _S.ARRIVED,
        (_S.ARRIVED, _e.UNPACK): _S.UNPACKING,
        (_S.UNPACKING, _e.DEVICE_DONE): _S.OVER,
        **{(s, _e.STOP): _S.OVER for s in (_S.WAITING, _S.NAMED, _S.OFFERED, _S.ARRIVED)},
        (_S.PACKING, _e.STOP): _S.SETTLING,
        (_S.LENT, _e.STOP): _S.STRANDED,
        (_S.MOVING, _e.FAIL): _S.SETTLING,
        (_S.MOVING, _e.FAIL_UNQUIET): _S.STRANDED,
        (_S.STRANDED, _e.QUIET): _S.SETTLING,
        (_S.SETTLING, _e.DEVICE_DONE): _S.OVER,
        **{(s, _e.DEVICE_FAILED): _S.OVER for s in (_S.PACKING, _S.UNPACKING, _S.SETTLING)},
    },
    ignored={
        "the peer has said it": pairs(set(_S) - {_S.WAITING, _S.LENT}, (_e.SLOT_READY,)),
        "only an offered slot is freed by the peer": pairs(set(_S) - {_S.OFFERED}, (_e.SLOT_FREE,)),
        "its batch has to end first": pairs((_S.MOVING,), (_e.STOP, *_DEVICE)),
        "the device ends what it has begun": pairs((_S.UNPACKING,), (_e.STOP,)),
        "it is over": pairs((_S.STRANDED, _S.SETTLING, _S.OVER), (_e.STOP,)),
        "the peer or the back end may still touch its slot": pairs((_S.STRANDED,), _DEVICE),
    },
    never={
        "it is packed once, before it moves": pairs(set(_S) - {_S.WAITING, _S.NAMED}, (_e.PACK,)),
        "its slot is lent before all else": pairs(set(_S) - {_S.WAITING}, (_e.LEND,)),
        "it moves in one batch": pairs(set(_S) - {_S.WAITING, _S.NAMED, _S.PACKING}, (_e.SUBMIT,)),
        "only a moving piece has a batch": pairs(set(_S) - {_S.MOVING}, _BATCH),
        "only what has arrived is unpacked": pairs(set(_S) - {_S.ARRIVED}, (_e.UNPACK,)),
        "the device has nothing of it": pairs(
            (_S.WAITING, _S.NAMED, _S.OFFERED, _S.LENT, _S.ARRIVED, _S.OVER), _DEVICE
        ),
        "its memory was quiet": pairs(set(_S) - {_S.STRANDED}, (_e.QUIET,)),
    },
)


@dataclass(slots=True, eq=False)
class StagedPiece:
    """A piece of a part on one side."""

    number: int  # in the part
    plan: CopyPlan  # what is packed or unpacked
    state: PieceState = PieceState.WAITING  # which only ``Staged.step`` changes
    slot: Slot | None = None  # its place in staging memory here, while it has one
    remote: int | None = None  # where its slot begins at the peer, if the peer has said so
    batch: int | None = None  # the number of its batch
    fence: Fence | None = None  # what the device has still to do for it
    since: float = 0.0  # when the device was last given something to do for it
    unpack: Callable[[Slot], Fence] | None = None  # begins to unpack it, if that is prepared
