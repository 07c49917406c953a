"""A producer's revocation counter in shared memory, which consumers on the same host read instead of sending a message.

A round trip of messages takes as long as moving a gigabyte between two GPUs. ``kvxfer.protocol.revocations`` says what the
counter is for.

A producer tells where its counter is, but not which process it is: a consumer connects to a Unix socket of that name, which it finds
on its own host only, and the kernel says whose it is. So no peer can have another process's files opened.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import socket
import stat
from contextlib import suppress

from kvxfer.backend.door import knock
from kvxfer.backend.process import PeerProcess
from kvxfer.errors import TransportError
from kvxfer.protocol.revocations import RevocationCounter

_SIZE = 4096
_TOKEN_AT, _TOKEN_BYTES = 8, 16
_NAME = "kvxfer-revocations"
_PLACE = re.compile(rf"({_NAME}-[0-9a-f]{{32}})/(\d{{1,7}})/([0-9a-f]{{32}})")
_WAITING = 128
"""The most consumers that may look at the same time; another asks by message."""


class SharedRevocationCounter(RevocationCounter):
    """A revocation counter that other processes of this host and user can read.

    Raises:
        OSError: No shared memory is available.
    """

    def __init__(self) -> None:
        # It vanishes with the process, however that ends.
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, _SIZE)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._memory = mmap.mmap(self._fd, _SIZE)
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            try:
                name = f"{_NAME}-{os.urandom(16).hex()}"
                self._socket.bind(f"\0{name}")
                self._socket.listen(_WAITING)
            except BaseException:
                self._socket.close()
                raise
        except BaseException:
            os.close(self._fd)
            raise
        token = os.urandom(_TOKEN_BYTES)
        self._memory[_TOKEN_AT : _TOKEN_AT + _TOKEN_BYTES] = token
        self._place = f"{name}/{self._fd}/{token.hex()}"
        super().__init__(memoryview(self._memory)[:8].cast("Q"))

    def invite(self) -> str:
        """Return where it is, to tell one more consumer, for ``RevocationView``."""
        with suppress(OSError):  # nobody else has connected since, or it is closed
            while True:
                self._socket.accept()[0].close()  # they have seen whose socket it is, which is all that it is for
        return self._place

    def close(self) -> None:
        """Revoke everything that was announced, or will be. Any thread; idempotent."""
        with self._lock:
            if self._fd >= 0:
                self._word[0] += 1
                self._word.release()
                self._word = memoryview(bytearray(8)).cast("Q")
                self._memory.close()
                os.close(self._fd)
                self._socket.close()
                self._fd = -1


class RevocationView:
    """A consumer's view of a producer's revocation counter.

    Calling it, from any thread, returns how much has been declared so far.
    """

    def __init__(self, place: str) -> None:
        """Map the counter at ``place``.

        Raises:
            OSError, TransportError: The counter cannot be found or opened from here.
            ValueError: What is there is not that counter. Each error means that the producer runs on another host, in
                another container, or as another user.
        """
        found = _PLACE.fullmatch(place)
        if found is None:
            raise ValueError(f"{place!r} names no revocation counter")
        name, fd, token = found.groups()
        with knock(name, "the producer") as connected:
            owner = PeerProcess(connected)
        try:
            self._memory = _mapped(owner, int(fd))
        finally:
            owner.close()
        if self._memory[_TOKEN_AT : _TOKEN_AT + _TOKEN_BYTES] != bytes.fromhex(token):
            self._memory.close()
            raise ValueError(f"{place!r} names another agent's revocation counter")
        self._word = memoryview(self._memory)[:8].cast("Q")

    @classmethod
    def of(cls, place: str) -> RevocationView | None:
        """Return the view of the counter at ``place``, or ``None`` if it cannot be opened from here."""
        try:
            return cls(place)
        except (OSError, ValueError, TransportError):
            return None

    def __call__(self) -> int:
        return int(self._word[0])


def _mapped(owner: PeerProcess, fd: int) -> mmap.mmap:
    """Map what should be a counter, of which its owner has this descriptor.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is none.
    """
    path = f"/proc/{owner.pid}/fd/{fd}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # opening some other file might have effects
        raise ValueError(f"{path} is no revocation counter")
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode) or status.st_size != _SIZE or not _sealed(opened):
            raise ValueError(f"{path} is no revocation counter")
        return mmap.mmap(opened, _SIZE, access=mmap.ACCESS_READ)
    finally:
        os.close(opened)


def _sealed(fd: int) -> bool:
    """Return whether the memory can no longer be made smaller: reading a mapping beyond its end would kill this process."""
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
