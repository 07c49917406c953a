"""Words that peers read with Mooncake itself: how each link is doing. So no connection of ours is needed beside it.

Each end of a link has a *cell*: 16 bytes of registered memory. It holds the end's own token before the link is made, the
peer's token while it is up, and zeros once it is closed. Only the two ends know the tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvxfer.backend.endpoint import TOKEN_BYTES
from kvxfer.geometry.region import Region
from kvxfer_mooncake.spans import Spans

__all__ = ["Cell", "Cells"]

SHEET = 256
"""Links for which memory is registered at once."""


class Cell:
    """``shown``: what the peer reads. ``seen``: where this side reads what the peer shows."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._shown, self._seen = memory
        self.address, self.seen_at = self._shown.ctypes.data, self._seen.ctypes.data

    def show(self, token: bytes) -> None:
        self._shown[:] = np.frombuffer(token, np.uint8)

    def wipe(self) -> None:
        self._shown.fill(0)

    @property
    def seen(self) -> bytes:
        return bytes(self._seen)


class Cells:
    """The cells of a transport."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._free: list[Cell] = []
        self._sheets: list[NDArray[np.uint8]] = []

    def take(self) -> Cell:
        """Return a wiped cell.

        Raises:
            TransportError: No more memory can be registered.
        """
        if not self._free:
            sheet = np.zeros((SHEET, 2, TOKEN_BYTES), np.uint8)
            self._spans.add([Region(sheet.ctypes.data, sheet.nbytes)])
            self._sheets.append(sheet)
            self._free.extend(map(Cell, sheet))
        return self._free.pop()

    def give_back(self, cell: Cell) -> None:
        """Let another link have a cell, which nobody is reading into any more."""
        cell.wipe()
        self._free.append(cell)
