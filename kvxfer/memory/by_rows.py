"""What a space can do by ``gather`` and ``scatter`` alone: pack, unpack and checksum, through host memory."""

from __future__ import annotations

import numpy as np

from kvxfer.geometry import CopyPlan, StridedCopy
from kvxfer.geometry.pattern import Ints
from kvxfer.memory.checksum import Sum, fine, logical_copies, spans, sum_of_packed
from kvxfer.memory.cpu import CpuSpace
from kvxfer.memory.row_moves import row_moves
from kvxfer.memory.space import Bytes, Checksum, Side, Space

__all__ = ["checksum_of", "pack_rows", "unpack_rows"]

_CHUNK = 16 << 20
"""Bytes that a checksum brings to the host at once."""


def pack_rows(space: Space, plan: CopyPlan, out: Space, at: int) -> None:
    """Implement ``Space.pack``."""
    if isinstance(out, CpuSpace):
        _gather(space, plan, "source", out.bytes(at, plan.nbytes))
        return
    region, offset = _place(space, out, at, plan.nbytes)
    stream = np.empty(plan.nbytes, np.uint8)
    _gather(space, plan, "source", stream)
    if plan.nbytes:
        out.scatter(region, np.array([offset]), stream[None])


def unpack_rows(space: Space, plan: CopyPlan, staged: Space, at: int) -> None:
    """Implement ``Space.unpack``."""
    if isinstance(staged, CpuSpace):
        stream = staged.bytes(at, plan.nbytes)
    else:
        region, offset = _place(space, staged, at, plan.nbytes)
        stream = np.empty(plan.nbytes, np.uint8)
        if plan.nbytes:
            staged.gather(region, np.array([offset]), stream[None])
    for move in list(row_moves(space, plan.copies, "destination")):
        rows = (
            _adjacent(stream, move.packed, move.nbytes) if move.adjacent else _windows(stream, move.nbytes)[move.packed]
        )
        space.scatter(move.region, move.at, rows)


def checksum_of(space: Space, plan: CopyPlan, side: Side) -> Checksum:
    """Compute ``Space.checksum`` on the host, some megabytes at a time."""
    total = 0
    for part in logical_copies(plan):
        for tokens, at, first in spans(part, side):
            units = fine(part.view_group, tokens)
            step = max(1, _CHUNK // units.nbytes)
            for lo in range(0, len(at), step):
                here = at[lo : lo + step]
                rows = StridedCopy(units, here, here, np.ones(len(here), np.int64))
                stream = np.empty(rows.nbytes, np.uint8)
                _gather(space, CopyPlan((rows,)), side, stream)
                total += sum_of_packed(stream, part.view_group, tokens, first[lo : lo + step])
    return Sum(total % (1 << 64))


def _gather(space: Space, plan: CopyPlan, side: Side, stream: Bytes) -> None:
    for move in list(row_moves(space, plan.copies, side)):
        if move.adjacent:
            space.gather(move.region, move.at, _adjacent(stream, move.packed, move.nbytes))
        else:
            rows = np.empty((len(move.at), move.nbytes), np.uint8)
            space.gather(move.region, move.at, rows)
            _windows(stream, move.nbytes)[move.packed] = rows


def _adjacent(stream: Bytes, packed: Ints, nbytes: int) -> Bytes:
    """Return rows that follow each other in the stream, as a view of it."""
    begin = int(packed[0])
    return stream[begin : begin + len(packed) * nbytes].reshape(-1, nbytes)


def _windows(stream: Bytes, nbytes: int) -> Bytes:
    """Return all rows of ``nbytes`` that begin anywhere in the stream, as an overlapping view of it."""
    return np.lib.stride_tricks.sliding_window_view(stream, nbytes, writeable=True)


def _place(space: Space, packed: Space, at: int, nbytes: int) -> tuple[int, int]:
    if packed.device != space.device:
        raise ValueError(f"memory of {space.device} is packed into the same device or into host memory only")
    return packed.locate(at, nbytes)
