"""The wire form of a plan: its copies, for a process that executes a plan that another one made.

Peers do not need it (both derive the plan from what they exchange); a helper process or a dump for debugging does.
``CopyPlan.logical`` is not sent: it serves checksums, which the side that made the plan computes.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kvxfer.geometry.pattern import Axis, CopyPattern, Ints
from kvxfer.geometry.plan import CopyPlan
from kvxfer.geometry.strided_copy import StridedCopy

__all__ = ["decode", "encode"]

_MAX_ROWS = 1 << 24
_LITTLE = np.dtype("<i8")


class _Strided(msgspec.Struct, array_like=True, frozen=True):
    src_cells: bytes
    dst_cells: bytes
    axes: tuple[Axis, ...]
    unit: int
    src_at: bytes
    dst_at: bytes
    counts: bytes


_decoder = msgspec.msgpack.Decoder(tuple[_Strided, ...])


def encode(plan: CopyPlan) -> bytes:
    """Encode a plan's copies as msgpack: about 24 bytes a segment, and 16 a cell."""
    return msgspec.msgpack.encode(
        [
            _Strided(
                _pack(s.pattern.src_cells),
                _pack(s.pattern.dst_cells),
                s.pattern.axes,
                s.pattern.unit,
                _pack(s.src_at),
                _pack(s.dst_at),
                _pack(s.counts),
            )
            for s in plan.copies
        ]
    )


def decode(data: bytes) -> CopyPlan:
    """Return the plan that ``encode`` was given.

    Offsets are not checked against anybody's memory: the back end does that, as with any batch.

    Raises:
        ValueError: No plan encodes to this data.
    """
    try:
        return CopyPlan(tuple(_copy(s) for s in _decoder.decode(data)))
    except msgspec.MsgspecError as e:
        raise ValueError(f"not a plan: {e}") from e


def _copy(s: _Strided) -> StridedCopy:
    cells, places = [_unpack(x) for x in (s.src_cells, s.dst_cells)], [_unpack(x) for x in (s.src_at, s.dst_at)]
    counts = _unpack(s.counts)
    pattern = CopyPattern(cells[0], cells[1], s.axes, s.unit)
    sound = (
        len(cells[0]) == len(cells[1]) > 0
        and len(places[0]) == len(places[1]) == len(counts) > 0
        and len(s.axes) <= 2
        and all(1 < n <= _MAX_ROWS for n, _, _ in s.axes)
        and len(pattern) <= _MAX_ROWS
        and s.unit > 0
        and int(counts.min()) > 0
    )
    if not sound:
        raise ValueError("not a plan: its arrays do not fit each other")
    return StridedCopy(pattern, places[0], places[1], counts)


def _pack(a: Ints) -> bytes:
    return a.astype(_LITTLE, copy=False).tobytes()


def _unpack(data: bytes) -> Ints:
    if len(data) % 8:
        raise ValueError("not a plan: half a number")
    return np.frombuffer(data, _LITTLE).astype(np.int64, copy=False)
