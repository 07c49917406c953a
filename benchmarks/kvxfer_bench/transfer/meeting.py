"""Lets the two sides of a benchmark start each round together, and exchange messages during it."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

SPIN_S, WAIT_S = 0.0002, 120.0


class Meeting:
    """One end of a pipe between the two sides."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._there = False

    def meet(self) -> None:
        """Wait until the other side is here as well.

        At first this spins, so that both begin at the same time; later it sleeps, so that the other side gets the
        processor.

        Raises:
            TimeoutError: The other side did not come within ``WAIT_S`` seconds.
        """
        self.pipe.send(None)
        until = time.monotonic() + SPIN_S
        while not self._there:
            if self.pipe.poll(0 if time.monotonic() < until else WAIT_S):
                self.hear()
            elif time.monotonic() > until + WAIT_S:
                raise TimeoutError("the other side did not come to the next round")
        self._there = False

    def tell(self, *words: int | None) -> None:
        """Send words to the other side."""
        self.pipe.send(words)

    def hear(self) -> Any:
        """Return the next words of the other side, or ``None`` if it has come for the next round."""
        words = self.pipe.recv()
        self._there |= words is None
        return words
