"""How often a producer has given up anything that it had announced, counted before the blocks can be used again.

Whether bytes can be trusted is known once they have arrived: did the generation hold until then? A producer names the count
with what it announces. A consumer that sees the count, and finds it unchanged when the last byte has come, knows the answer
without asking. One that finds another number has to ask, because something else may have been given up.

Two counts make that safe. An engine's thread *declares* that it gives blocks up, and may use them at once; the control thread
*takes it in* when it gets there. What is announced in between carries a count that the shared word has already passed.
"""

from __future__ import annotations

import threading

from kvxfer.identity import TransferId

__all__ = ["RevocationCounter"]


class RevocationCounter:
    """A count of what a producer has given up.

    Args:
        word: Eight bytes of memory that consumers on the host can see, as one unsigned integer; ``None`` means private memory,
            for machines without a shell.

    Attributes:
        taken_in: How many declarations the control thread has acted upon.
        declared: How many there have been.
    """

    def __init__(self, word: memoryview | None = None) -> None:
        self._word = memoryview(bytearray(8)).cast("Q") if word is None else word
        self._lock = threading.Lock()
        self._offered: dict[TransferId, int] = {}  # and not over; the last generation
        self.taken_in = 0

    @property
    def declared(self) -> int:
        return int(self._word[0])

    def offered(self, transfer: TransferId, generation: int) -> None:
        """Note that a transfer may be announced from now on. Any thread."""
        with self._lock:
            self._offered[transfer] = generation

    def over(self, transfer: TransferId, generation: int) -> None:
        """Note that nothing of this generation is announced any more, and that what was has been counted. Control thread."""
        with self._lock:
            if self._offered.get(transfer, generation + 1) <= generation:
                del self._offered[transfer]

    def declare(self, transfer: TransferId) -> bool:
        """Declare that a transfer is given up. Any thread, before its blocks can be used for something else.

        Returns:
            False when that is no news to anybody, because the transfer was over or never offered. So requests that end well, as
            most do, disturb no others.
        """
        with self._lock:
            if transfer not in self._offered:
                return False
            self._word[0] += 1
            return True

    def vouch(self, transfer: TransferId) -> int | None:
        """Return the count that has to hold for an announcement. Control thread.

        There is none when a declaration would not be counted any more.
        """
        with self._lock:
            return self.taken_in if transfer in self._offered else None

    def take_in(self) -> None:
        """Note that a declaration has been acted upon, so that later announcements allow for it. Control thread."""
        self.taken_in += 1

    def count(self) -> None:
        """Count what the control thread itself gives up. Control thread."""
        with self._lock:
            self._word[0] += 1
        self.take_in()
