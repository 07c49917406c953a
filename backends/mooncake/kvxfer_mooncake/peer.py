"""A peer's engine: whether ours has a connection to it. The only thread of this back end is the one that makes it."""

from __future__ import annotations

import time

from kvxfer.errors import TransportError
from kvxfer.threads import NamedThread
from kvxfer_mooncake.cells import Cell
from kvxfer_mooncake.library import LibraryEngine

__all__ = ["Peer"]

ASK_S = 0.001


class Peer:
    """An engine that links of ours lead to.

    Attributes:
        name: Of the engine.
        posted: Requests to it that have not ended. It queues no more than a thousand, and fails the others.
        opened: Whether requests to it block nobody.
        error: Why it cannot be reached.
    """

    def __init__(self, name: str, engine: LibraryEngine, there: int, cell: Cell) -> None:
        """Begin to open it, by reading ``TOKEN_BYTES`` at its address ``there`` into the cell, which is the peer's from then on."""
        self.name, self.cell = name, cell
        self.posted = 0
        self.opened = False
        self.error: str | None = None
        self._given_up = False
        self._thread = NamedThread(target=self._open, args=(engine, there), name="kvxfer-mooncake")
        self._thread.start()

    @property
    def settled(self) -> bool:
        """Whether it has been opened, or cannot be: nothing is read into its cell any more."""
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Have the thread end, and wait for that: a minute, if the peer does not answer."""
        self._given_up = True
        self._thread.join()

    def _open(self, engine: LibraryEngine, there: int) -> None:
        """Try with a question first, which holds no lock: a peer that does not answer must not block requests to others."""
        try:
            if not engine.probe(self.name):
                raise TransportError(f"Mooncake's engine at {self.name} does not answer")
            request = engine.post(False, self.name, self.cell.seen_at, there, len(self.cell.seen))
            while (succeeded := engine.ended(request)) is None:
                if self._given_up:
                    return
                time.sleep(ASK_S)
            if not succeeded:
                raise TransportError(f"Mooncake's engine at {self.name} refuses to be read, or has died")
            self.opened = True
        except TransportError as e:
            self.error = str(e)
