"""Tables of segments in pinned host memory, from where kernels can read them as they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kvxfer.block_table import Ints
from kvxfer.fence import Fence

_SEGMENTS = 512


@dataclass(frozen=True, eq=False)
class Table:
    """A table of segments in pinned host memory, with room for ``pitch``; ``columns`` are the same as an array, int64 ``[3, pitch]``."""

    tensor: Any
    columns: Ints
    pitch: int


class Tables:
    """Tables that are used again once the device has read them.

    There are about as many as there ever were launches prepared or under way at once.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._given: deque[tuple[Fence, Table]] = deque()

    def take(self, segments: int) -> Table:
        """Return a table with room for this many segments."""
        if self._given and self._given[0][0].passed():
            _, table = self._given.popleft()
            if table.pitch >= segments:
                return table
        pitch = max(_SEGMENTS, 1 << (segments - 1).bit_length())
        tensor = torch.empty((3, pitch), dtype=torch.int64, pin_memory=self._pinned)
        return Table(tensor, tensor.numpy(), pitch)

    def give(self, tables: Iterable[Table], fence: Fence) -> None:
        """Take back tables that nobody reads any more once the fence has passed."""
        self._given += [(fence, table) for table in tables]
