"""The revocation counter: how often a producer has given up something that it had announced.

Bytes can be trusted if the generation still held when the last of them had arrived. A producer sends the count with each
announcement. A consumer that can read the counter, and finds it unchanged once the last byte has arrived, knows so without
asking. If the count has changed, the consumer has to ask, because something else may have been given up.

The counter goes up before blocks can be reused. That takes two counts: an engine's thread *declares* that it gives blocks up,
and may reuse them at once; the control thread *takes it in* later. What is announced in between carries a count that the
shared word has already passed, so that it cannot be trusted without asking.
"""

from __future__ import annotations

import threading

from kvxfer.identity import Generation, TransferId


class RevocationCounter:
    """A count of what a producer has given up.

    Args:
        word: Eight bytes of memory that consumers on the host can read, as one unsigned integer; ``None`` means private memory,
            for tests.

    Attributes:
        taken_in: The number of declarations that the control thread has acted upon.
        declared: The number of declarations so far.
    """

    def __init__(self, word: memoryview | None = None) -> None:
        self._word = memoryview(bytearray(8)).cast("Q") if word is None else word
        self._lock = threading.Lock()
        self._offered: dict[TransferId, Generation] = {}  # not over yet, with the last generation
        self.taken_in = 0

    @property
    def declared(self) -> int:
        return int(self._word[0])

    def offered(self, transfer: TransferId, generation: Generation) -> None:
        """Record that a transfer may be announced from now on. Any thread."""
        with self._lock:
            self._offered[transfer] = generation

    def over(self, transfer: TransferId, generation: Generation) -> None:
        """Record that nothing of this generation will be announced any more, and what was has been counted. Control thread."""
        with self._lock:
            if self._offered.get(transfer, generation + 1) <= generation:
                del self._offered[transfer]

    def declare(self, transfer: TransferId) -> bool:
        """Declare that a transfer is given up. Any thread, before its blocks can be used for something else.

        Returns:
            False if that matters to nobody, because the transfer was over or never offered. So requests that end well, as
            most do, do not disturb others.
        """
        with self._lock:
            if transfer not in self._offered:
                return False
            self._word[0] += 1
            return True

    def vouch(self, transfer: TransferId) -> int | None:
        """Return the count to send with an announcement; ``None`` if a declaration would no longer be counted. Control thread."""
        with self._lock:
            return self.taken_in if transfer in self._offered else None

    def take_in(self) -> None:
        """Record that a declaration has been acted upon, so that later announcements include it. Control thread."""
        self.taken_in += 1

    def count(self) -> None:
        """Count something that the control thread itself gives up. Control thread."""
        with self._lock:
            self._word[0] += 1
        self.take_in()
