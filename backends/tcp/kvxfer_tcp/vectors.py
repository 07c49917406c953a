"""Runs of memory as the kernel takes them: tables of ``struct iovec``, and the system calls that they are for."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import sys
import termios

import numpy as np
from numpy.typing import NDArray

from kvxfer.block_table import Ints

IOV_MAX = 1024
"""Rows that one system call takes (``UIO_MAXIOV``)."""

_SEND = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_RECEIVE = socket.MSG_DONTWAIT
_DISCARD = socket.MSG_DONTWAIT | socket.MSG_TRUNC


class _Message(ctypes.Structure):
    """``struct msghdr`` of 64-bit Linux."""

    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("rows", ctypes.c_void_p),
        ("row_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


# These let other threads of Python run while they copy.
_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("sendmsg", "recvmsg"):
    _function = getattr(_libc, _name)
    _function.argtypes = [ctypes.c_int, ctypes.POINTER(_Message), ctypes.c_int]
    _function.restype = ctypes.c_ssize_t
_libc.recv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.recv.restype = ctypes.c_ssize_t


def merged(addresses: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Join runs, int64 ``[n]``, that follow each other in memory, and drop empty ones; the bytes stay in their order."""
    if len(lengths) and int(lengths.min()) == 0:
        keep = lengths > 0
        addresses, lengths = addresses[keep], lengths[keep]
    if len(lengths) < 2:
        return addresses, lengths
    begins = np.flatnonzero(addresses[1:] != addresses[:-1] + lengths[:-1]) + 1
    if len(begins) + 1 == len(lengths):
        return addresses, lengths
    begins = np.concatenate(([0], begins))
    return addresses[begins], np.add.reduceat(lengths, begins)


class IovecTable:
    """Runs of memory as one stream of bytes, cut into chunks of equal size (the last may be shorter).

    The rows of all chunks stand one after the other with a spare row before each and after the last. A sender puts its
    frame's header into the one before a chunk, a receiver the room for the next header into the one after it.

    Attributes:
        nbytes: Of the stream.
        chunks: How many there are.
        rows: int64 ``[n, 2]``, of address and length.
        spare: Index of the spare row before each chunk, and of the last one.
    """

    def __init__(self, addresses: Ints, lengths: Ints, chunk: int) -> None:
        """Cut the runs at these addresses, int64 ``[n]``, into chunks of ``chunk`` bytes. There is at least one run, and none is empty."""
        addresses, lengths = merged(addresses, lengths)
        ends = np.cumsum(lengths)
        self.nbytes = int(ends[-1])
        self.chunks = -(-self.nbytes // chunk)
        self._chunk = chunk
        if self.chunks == 1:  # a short request, whose time would be that of the calls below
            self.rows = np.zeros((len(lengths) + 2, 2), np.int64)
            self.rows[1:-1, 0], self.rows[1:-1, 1] = addresses, lengths
            self.spare: list[int] = [0, len(lengths) + 1]
            self._address = self.rows.ctypes.data
            return
        cuts = np.union1d(ends, np.arange(1, self.chunks, dtype=np.int64) * chunk)
        begins = np.concatenate((np.zeros(1, np.int64), cuts[:-1]))
        run = np.searchsorted(ends, begins, side="right")
        owner = begins // chunk
        self.rows = np.zeros((len(begins) + self.chunks + 1, 2), np.int64)
        place = np.arange(1, len(begins) + 1) + owner
        self.rows[place, 0] = addresses[run] + begins - (ends - lengths)[run]
        self.rows[place, 1] = cuts - begins
        numbers = np.arange(self.chunks + 1)
        self.spare = (np.searchsorted(owner, numbers) + numbers).tolist()
        self._address = self.rows.ctypes.data

    def chunk_bytes(self, number: int) -> int:
        return min(self._chunk, self.nbytes - number * self._chunk)

    def row(self, index: int) -> int:
        return self._address + 16 * index

    def moved(self, lo: int, hi: int, nbytes: int) -> int:
        """Return the first of the rows ``[lo, hi)`` that is not done after ``nbytes``, cut to what is left of it."""
        ends = np.cumsum(self.rows[lo : min(hi, lo + IOV_MAX), 1])
        done = int(ends.searchsorted(nbytes, side="right"))
        part = nbytes - (int(ends[done - 1]) if done else 0)
        if part:
            self.rows[lo + done] += part, -part
        return lo + done

    def gather(self, lo: int, hi: int, most: int) -> memoryview:
        """Return a copy of the first bytes of the rows ``[lo, hi)``, at most ``most`` of them."""
        rows = self.rows[lo : min(hi, lo + IOV_MAX)]
        data = np.empty(min(most, int(rows[:, 1].sum())), np.uint8)
        self._copy(rows, data, True)
        return data.data

    def scatter(self, lo: int, hi: int, data: memoryview) -> int:
        """Copy bytes into the rows ``[lo, hi)``; returns how many, which may be fewer than either has."""
        rows = self.rows[lo : min(hi, lo + IOV_MAX)]
        return self._copy(rows, np.frombuffer(data, np.uint8), False)

    @staticmethod
    def _copy(rows: Ints, data: NDArray[np.uint8], out: bool) -> int:
        at, left = data.ctypes.data, len(data)
        for address, length in rows.tolist():
            nbytes = min(length, left)
            source, target = (address, at) if out else (at, address)
            ctypes.memmove(target, source, nbytes)
            at, left = at + nbytes, left - nbytes
            if not left:
                break
        return len(data) - left


class IovecBuffer(IovecTable):
    """Memory of its own, in its row 1."""

    def __init__(self, nbytes: int) -> None:
        self.data = np.zeros(nbytes, np.uint8)
        self.address = self.data.ctypes.data
        super().__init__(np.array([self.address]), np.array([nbytes]), nbytes)

    def empty(self, nbytes: int) -> None:
        """Have the row stand for the first ``nbytes``."""
        self.rows[1] = self.address, nbytes

    def read(self, nbytes: int) -> bytes:
        return self.data[:nbytes].tobytes()

    def write(self, content: bytes) -> None:
        self.data.data[:] = content


class Pipe:
    """A socket that never blocks. Its methods fail with ``OSError`` when the connection is over.

    ``unsent`` was taken and waits for room.
    """

    def __init__(self, connection: socket.socket, ahead: bytes = b"") -> None:
        """Take over a socket; ``ahead`` goes over it first, as it is."""
        self.socket = connection
        self.fd = connection.fileno()
        self.unsent = [memoryview(ahead)] if ahead else []
        self._message = _Message()
        self._reference = ctypes.byref(self._message)

    @property
    def held(self) -> int:
        """Bytes that have come and that no method has returned yet."""
        return 0

    @property
    def waiting(self) -> int:
        """Bytes that have come and that the kernel still has."""
        try:
            return int.from_bytes(fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)), sys.byteorder)
        except OSError:
            return 0

    def flush(self) -> bool:
        """Send what is ``unsent``; returns whether nothing is."""
        while self.unsent:
            try:
                count = self.socket.sendmsg(self.unsent)
            except BlockingIOError:
                return False
            while self.unsent and count >= len(self.unsent[0]):
                count -= len(self.unsent.pop(0))
            if count:
                self.unsent[0] = self.unsent[0][count:]
        return True

    def send(self, table: IovecTable, lo: int, hi: int) -> int:
        """Send from the rows ``[lo, hi)``; returns how many bytes were taken, -1 if there is no room."""
        return self._call(_libc.sendmsg, table, lo, hi, _SEND) if self.flush() else -1

    def write(self, data: bytes | bytearray) -> int:
        """Send bytes; returns how many were taken, -1 if there is no room."""
        try:
            return self.socket.send(data) if self.flush() else -1
        except BlockingIOError:
            return -1

    def read(self, nbytes: int) -> bytes | None:
        """Return at most ``nbytes`` of what has come, ``None`` if nothing has come yet.

        Raises:
            OSError: The connection broke, or its peer has closed it.
        """
        try:
            data = self.socket.recv(nbytes)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "closed by the other side")
        return data

    def receive(self, table: IovecTable, lo: int, hi: int) -> int:
        """Receive into the rows ``[lo, hi)``; return how many bytes have come, -1 if there are none yet.

        Raises:
            OSError: The connection broke, or its peer has closed it.
        """
        count = self._call(_libc.recvmsg, table, lo, hi, _RECEIVE)
        if count == 0:
            raise ConnectionResetError(errno.ECONNRESET, "closed by the other side")
        return count

    def discard(self, nbytes: int) -> int:
        """Drop at most ``nbytes`` of what has come, without a copy; return how many, -1 if nothing has come yet.

        Raises:
            OSError: The connection broke, or its peer has closed it.
        """
        count = int(_libc.recv(self.fd, None, nbytes, _DISCARD))
        if count < 0:
            return _again()
        if count == 0:
            raise ConnectionResetError(errno.ECONNRESET, "closed by the other side")
        return count

    def _call(self, function: ctypes._NamedFuncPointer, table: IovecTable, lo: int, hi: int, flags: int) -> int:
        message = self._message
        message.rows, message.row_count = table.row(lo), min(hi - lo, IOV_MAX)
        count = int(function(self.fd, self._reference, flags))
        return count if count >= 0 else _again()


class Pipes:
    """Makes the pipes of a link: here, such as send what they are given as it is."""

    def dialled(self, opened: socket.socket, number: int, ahead: bytes) -> Pipe:
        """Return the pipe of a connection of this number that was dialled here. ``ahead`` goes first, and as it is."""
        return Pipe(opened, ahead)

    def accepted(self, opened: socket.socket, number: int) -> Pipe:
        """Return the pipe of a connection of this number that the peer has dialled."""
        return Pipe(opened)


def _again() -> int:
    number = ctypes.get_errno()
    if number == errno.EAGAIN:
        return -1
    if number == errno.EINTR:
        return 0
    raise OSError(number, os.strerror(number))
