"""Packing with torch's indexing alone, where there is no Triton: an index a row, a launch for each copy and region."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import numpy as np
import torch

from kvxfer.geometry import StridedCopy
from kvxfer.memory.space import Side, Space

__all__ = ["move_indexed"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def move_indexed(
    space: Space, strided: StridedCopy, side: Side, stream: int, wrap: Callable[[int, int], Any], *, pack: bool
) -> None:
    """Move bytes between a copy's rows on one side, in ``space``, and the packed stream at an address: into it if ``pack``.

    ``wrap`` makes a uint8 tensor over (address, bytes).
    """
    rows, places = (strided.src_rows, strided.src_at) if side == "source" else (strided.dst_rows, strided.dst_at)
    base, size = strided.stream()
    regions = space.of_cells(rows)
    for length in np.unique(size).tolist():
        here = size == length
        for r in np.unique(regions).tolist():
            mine, region = regions == r, space.regions[r]
            at = (places[here][:, None] + (rows[mine] - space.starts[r])[None, :]).ravel()
            to = (base[here][:, None] + (np.flatnonzero(mine) * length)[None, :]).ravel()
            word = gcd(8, length, region.address, stream, int(np.gcd.reduce(at)), int(np.gcd.reduce(to)))
            cache, packed = (
                _windows(wrap(address, nbytes), word, length)
                for address, nbytes in ((region.address, region.nbytes), (stream, strided.nbytes))
            )
            at_index, to_index = (torch.from_numpy(x // word).to(cache.device) for x in (at, to))
            if pack:
                packed.index_copy_(0, to_index, cache.index_select(0, at_index))
            else:
                cache.index_copy_(0, at_index, packed.index_select(0, to_index))


def _windows(memory: Any, word: int, length: int) -> Any:
    """All windows of ``length`` bytes that begin at a word: ``[windows, words]``, overlapping."""
    words = memory[: len(memory) // word * word].view(_WORDS[word])
    return words.as_strided((len(words) - length // word + 1, length // word), (1, 1))
