"""The tally: how a consumer on the same host learns without asking that a producer has given nothing up.

Whether bytes can be trusted is known once they have arrived: did the generation hold until then? A message to ask costs as
much as moving a gigabyte between two GPUs. So a producer counts, in a word of memory that others may read, how often it has
given up anything that it had announced, *before* the blocks in question can be used for something else. It names the count
with what it announces; a consumer that finds it unchanged when the last byte has come knows the answer. One that finds
another number has to ask: it may have been about something else.

Two counts make that safe. An engine's thread *declares* that it gives blocks up, and may use them at once; the control thread
*takes it in* when it gets there. What is announced in between carries a count that the word has left behind already.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import stat
import threading

from kvxfer.identity import TransferId

__all__ = ["SharedTally", "Sight", "Tally"]

_SIZE = 4096
_TOKEN_AT, _TOKEN_BYTES = 8, 16
_NAME = "kvxfer-tally"
_PLACE = re.compile(r"(\d{1,10})/(\d{1,7})/([0-9a-f]{32})")


class Tally:
    """In memory of its own, for machines without a shell. ``taken_in``: how many declarations have been."""

    def __init__(self, word: memoryview | None = None) -> None:
        self._word = memoryview(bytearray(8)).cast("Q") if word is None else word
        self._lock = threading.Lock()
        self._offered: dict[TransferId, int] = {}  # and not over; the last generation
        self.taken_in = 0

    @property
    def declared(self) -> int:
        return int(self._word[0])

    def offered(self, transfer: TransferId, generation: int) -> None:
        """From now on it may be announced. Any thread."""
        with self._lock:
            self._offered[transfer] = generation

    def over(self, transfer: TransferId, generation: int) -> None:
        """Of this generation nothing is announced any more, and what was has been counted. Control thread."""
        with self._lock:
            if self._offered.get(transfer, generation + 1) <= generation:
                del self._offered[transfer]

    def declare(self, transfer: TransferId) -> bool:
        """It is given up. Any thread, before its blocks can be used for something else. False when that is no news to
        anybody: it was over, or never offered. So requests that end well, as most do, disturb no others."""
        with self._lock:
            if transfer not in self._offered:
                return False
            self._word[0] += 1
            return True

    def vouch(self, transfer: TransferId) -> int:
        """For an announcement: the count that has to hold. -1, which nothing equals, when a declaration would not be counted
        any more. Control thread."""
        with self._lock:
            return self.taken_in if transfer in self._offered else -1

    def take_in(self) -> None:
        """A declaration has been acted upon: what is announced from now on knows of it. Control thread."""
        self.taken_in += 1

    def count(self) -> None:
        """The control thread itself gives something up."""
        with self._lock:
            self._word[0] += 1
        self.take_in()


class SharedTally(Tally):
    """A tally that other processes of this host and user can read. ``place``: what a ``Sight`` takes. Raises ``OSError``."""

    def __init__(self) -> None:
        # Goes with the process, however that ends.
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, _SIZE)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._memory = mmap.mmap(self._fd, _SIZE)
        except BaseException:
            os.close(self._fd)
            raise
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._memory[_TOKEN_AT : _TOKEN_AT + _TOKEN_BYTES] = token
        self.place = f"{os.getpid()}/{self._fd}/{token.hex()}"
        super().__init__(memoryview(self._memory)[:8].cast("Q"))

    def close(self) -> None:
        """All is given up that was announced, or will be. Any thread; idempotent."""
        with self._lock:
            if self._fd >= 0:
                self._word[0] += 1
                self._word.release()
                self._word = memoryview(bytearray(8)).cast("Q")
                self._memory.close()
                os.close(self._fd)
                self._fd = -1


class Sight:
    """A consumer's view of a producer's tally. Called, it tells how much has been declared so far. Any thread."""

    def __init__(self, place: str) -> None:
        """Raises ``OSError`` or ``ValueError`` when there is no such tally to be seen from here: the producer runs on another
        host, in another container, or as another user."""
        found = _PLACE.fullmatch(place)
        if found is None:
            raise ValueError(f"{place!r} names no tally")
        pid, fd, token = found.groups()
        path = f"/proc/{pid}/fd/{fd}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # opening something else might do something
            raise ValueError(f"{path} is no tally")
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(opened)
            if not stat.S_ISREG(status.st_mode) or status.st_size != _SIZE or not _sealed(opened):
                raise ValueError(f"{path} is no tally")
            self._memory = mmap.mmap(opened, _SIZE, access=mmap.ACCESS_READ)
        finally:
            os.close(opened)
        if self._memory[_TOKEN_AT : _TOKEN_AT + _TOKEN_BYTES] != bytes.fromhex(token):
            self._memory.close()
            raise ValueError(f"{path} is the tally of somebody else")
        self._word = memoryview(self._memory)[:8].cast("Q")

    @classmethod
    def of(cls, place: str) -> Sight | None:
        """``None`` when it cannot be seen."""
        try:
            return cls(place)
        except (OSError, ValueError):
            return None

    def __call__(self) -> int:
        return int(self._word[0])


def _sealed(fd: int) -> bool:
    """Whether nobody can make it smaller any more: to read what is mapped and not there would end this process."""
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
