"""Cut runs of a batch that are too long to move at once."""

from __future__ import annotations

import numpy as np

from kvxfer.block_table import Ints

__all__ = ["split_long"]


def split_long(limit: int, lengths: Ints, *offsets: Ints) -> tuple[Ints, ...]:
    """Cut runs longer than ``limit`` bytes and drop empty ones; return the new lengths, then each new array of offsets."""
    if not len(lengths) or (int(lengths.max()) <= limit and int(lengths.min()) > 0):
        return lengths, *offsets
    pieces = -(-lengths // limit)
    run = np.repeat(np.arange(len(lengths)), pieces)
    skip = (np.arange(len(run)) - (np.cumsum(pieces) - pieces)[run]) * limit
    return np.minimum(lengths[run] - skip, limit), *(o[run] + skip for o in offsets)
