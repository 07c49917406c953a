"""Packing with torch's indexing alone: an index a row, a launch for each length of rows and each region."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import numpy as np
import torch

from kvxfer.block_table import Ints
from kvxfer.geometry import CopyPlan
from kvxfer.memory.regions import Bytes, Side, row_moves
from kvxfer.memory.space import Space

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def move_indexed(
    space: Space, plan: CopyPlan, side: Side, stream: Any, memory: Callable[[int], Any], *, pack: bool
) -> None:
    """Move bytes between a plan's rows on one side, in ``space``, and its packed stream: into that if ``pack``.

    ``stream`` is a tensor of uint8, of as many bytes as the plan, on the device of the rows. ``memory`` returns the memory of the region
    with a number as such a tensor.

    Raises:
        ValueError: A row would leave its region.
    """
    for move in list(row_moves(space, plan.copies, side)):
        held = memory(move.region)
        word = _word(move.nbytes, (held, move.at), (stream, move.packed))
        cache, packed = (_windows(t, word, move.nbytes) for t in (held, stream))
        at, to = (torch.from_numpy(x // word).to(held.device) for x in (move.at, move.packed))
        if pack:
            packed.index_copy_(0, to, cache.index_select(0, at))
        else:
            cache.index_copy_(0, at, packed.index_select(0, to))


def copy_rows(held: Any, at: Ints, rows: Bytes, *, pack: bool) -> None:
    """Implement ``Space.gather`` if ``pack``, else ``Space.scatter``, for a region that is the tensor ``held``, of uint8.

    What is gathered is there on return.
    """
    n, nbytes = rows.shape
    there = torch.from_numpy(rows.reshape(-1))
    word = _word(nbytes, (held, at), (there, np.arange(min(n, 2)) * nbytes))
    cache, index = _windows(held, word, nbytes), torch.from_numpy(at // word).to(held.device)
    if pack:
        there.copy_(cache.index_select(0, index).view(torch.uint8).reshape(-1))
    else:
        cache.index_copy_(0, index, there.to(held.device).view(_WORDS[word]).reshape(n, -1))


def _word(nbytes: int, *sides: tuple[Any, Ints]) -> int:
    """Return the largest word, up to 8 bytes, that divides a row and where rows begin in tensors of uint8."""
    begins = (x for tensor, at in sides for x in (tensor.data_ptr(), tensor.storage_offset(), int(np.gcd.reduce(at))))
    return gcd(8, nbytes, *begins)


def _windows(memory: Any, word: int, length: int) -> Any:
    """All windows of ``length`` bytes that begin at a word: ``[windows, words]``, overlapping."""
    words = memory[: len(memory) // word * word].view(_WORDS[word])
    return words.as_strided((len(words) - length // word + 1, length // word), (1, 1))
