"""Copies through shared memory, for two processes that may not touch each other's memory.

The side that has batches (the *asker*) owns a few slots of anonymous shared memory, and hands them to the other side (the *server*)
over the socket of the link (``Liveness``). Each further message names one slot: to read, the server gathers the runs listed in the slot
into it and answers, and the asker scatters them; to write, the asker gathers first and the server scatters. Slots keep both sides busy
at once and bound the memory; when either process ends, the other sees the socket close.

A request that was aborted must not be served later, when the server's memory may belong to another request: two words of each slot
see to that. The asker writes the request's number into the one, and 0 when it gives the request up; the server writes the
number into the other before it copies, and then looks whether it still stands in the first.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np

from kvxfer import clock
from kvxfer.backend.liveness import Liveness
from kvxfer.backend.memories import Memories
from kvxfer.backend.runs import split_long
from kvxfer.block_table import Ints
from kvxfer.errors import PeerError, TransportError
from kvxfer_cma.copy import CopyStep
from kvxfer_cma.vm import IOV_MAX, Pieces, copy_own

LEND, ASK, ANSWERED = b"S", b"R", b"A"
"""How messages begin: with the slots, of the asker, of the server."""

SLOTS = 8
HEAD_BYTES = 64
TABLE_BYTES = IOV_MAX * 16
DATA_BYTES = 512 << 10
PIECE_BYTES = 64 << 10
SLOT_BYTES = HEAD_BYTES + TABLE_BYTES + DATA_BYTES

COPYING_S = 0.005
"""How long an abort waits for a copy that the server has begun: a slot takes a tenth of a millisecond."""

REQUEST = struct.Struct("<IIIIq")  # slot, 1 to write and 0 to read, memory, runs, number of the request
ANSWER = struct.Struct("<II")  # slot, one of the below
OK, UNKNOWN_MEMORY, OUTSIDE, UNMAPPED, GIVEN_UP = range(5)
REASONS = {
    UNKNOWN_MEMORY: "has no such memory registered",
    OUTSIDE: "was asked for bytes outside its registered memory",
    UNMAPPED: "cannot reach its registered memory any more",
    GIVEN_UP: "was told that the request is given up",
}


class Slots:
    """The shared memory as one side sees it: in each slot a table of runs and room for their bytes.

    A table is int64 ``[runs, 2]``: flat offset and length in the server's memory.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SLOTS * SLOT_BYTES)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._address = self._bytes.ctypes.data
        self._order = threading.Lock()

    def wanted(self, slot: int) -> Ints:
        """Where the asker writes the number of its request in this slot; int64 ``[1]``."""
        return self._bytes[slot * SLOT_BYTES : slot * SLOT_BYTES + 8].view(np.int64)

    def copying(self, slot: int) -> Ints:
        """Where the server writes the number of the request that it copies; int64 ``[1]``."""
        return self._bytes[slot * SLOT_BYTES + 8 : slot * SLOT_BYTES + 16].view(np.int64)

    def settle(self) -> None:
        """Have what was written before this reach the other process before anything is read after it."""
        with self._order:  # its exchange is a full barrier
            pass

    def table(self, slot: int, runs: int) -> Ints:
        at = slot * SLOT_BYTES + HEAD_BYTES
        return self._bytes[at : at + runs * 16].view(np.int64).reshape(runs, 2)

    def fill(self, slot: int, pieces: Pieces, lo: int, hi: int) -> None:
        """Copy pieces of this process into the slot.

        Raises:
            OSError: The kernel does not copy.
        """
        copy_own(True, pieces, lo, hi, self._address + slot * SLOT_BYTES + HEAD_BYTES + TABLE_BYTES)

    def empty(self, slot: int, pieces: Pieces, lo: int, hi: int) -> None:
        """Copy the slot into pieces of this process."""
        copy_own(False, pieces, lo, hi, self._address + slot * SLOT_BYTES + HEAD_BYTES + TABLE_BYTES)


class Asker:
    """This side's end of the slots. ``Relayed`` batches share it."""

    def __init__(self, liveness: Liveness) -> None:
        """Hand the slots to the peer."""
        self.peer = liveness.peer
        self.free = list(range(SLOTS))
        self._liveness = liveness
        self._lent: dict[int, Relayed] = {}
        self._requests = 0
        fd = os.memfd_create("kvxfer-cma", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, SLOTS * SLOT_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # the server relies on its size
            self.slots = Slots(fd)
            with suppress(OSError):  # it is gone, as its socket will say
                liveness.tell(LEND, fd)
        finally:
            os.close(fd)

    def ask(self, slot: int, copy: Relayed, write: bool, memory: int, runs: int) -> None:
        """Ask for a copy.

        Raises:
            PeerError: The peer is gone.
        """
        self._lent[slot] = copy
        self._requests += 1
        self.slots.wanted(slot)[0] = self._requests
        try:
            self._liveness.tell(ASK + REQUEST.pack(slot, write, memory, runs, self._requests))
        except OSError as e:
            raise PeerError(f"{self.peer} is gone, or has closed this link; connect again") from e

    def give_up(self, slots: Iterable[int]) -> None:
        """Have the server touch nothing for the requests in these slots any more."""
        left = list(slots)
        for slot in left:
            self.slots.wanted(slot)[0] = 0
        self.slots.settle()
        until = clock.now() + COPYING_S
        # One that stands still in the midst of a copy cannot be had back; it ends that slot whenever it goes on.
        while any(self.slots.copying(slot)[0] for slot in left) and clock.now() < until:
            clock.wait(0.0001)

    def answered(self, answer: bytes) -> None:
        """Hand an answer to its batch, and take the slot back.

        Raises:
            PeerError: It makes no sense.
        """
        slot, status = ANSWER.unpack(answer) if len(answer) == ANSWER.size else (-1, 0)
        copy = self._lent.pop(slot, None)
        if copy is None:
            raise PeerError("it sent a message that makes no sense")
        copy.answered(slot, status)
        self.free.append(slot)


class Relayed:
    """A batch that goes through the slots of an asker."""

    def __init__(
        self, asker: Asker, write: bool, local: Ints, memory: int, remote_offsets: Ints, lengths: Ints
    ) -> None:
        lengths, local, remote_offsets = split_long(PIECE_BYTES, lengths, local, remote_offsets)
        self._asker, self._write, self._memory = asker, write, memory
        self._local, self._table = Pieces(local, lengths), np.stack([remote_offsets, lengths], axis=1)
        self._at, self._end, self._nbytes = 0, len(lengths), int(lengths.sum())
        self._runs_a_slot = min(DATA_BYTES // int(lengths.max(initial=1)), IOV_MAX)
        self._asked: dict[int, tuple[int, int]] = {}  # slot -> runs [lo, hi)
        self._error: Exception | None = None

    def step(self) -> CopyStep:
        if self._error is not None:
            raise self._error
        free = self._asker.free
        if self._at < self._end and free:
            slot, lo, hi = free[-1], self._at, min(self._at + self._runs_a_slot, self._end)
            self._asker.slots.table(slot, hi - lo)[:] = self._table[lo:hi]
            if self._write:
                self._asker.slots.fill(slot, self._local, lo, hi)
            free.pop()  # not sooner: a slot that was never asked for never comes back
            self._at, self._asked[slot] = hi, (lo, hi)
            self._asker.ask(slot, self, self._write, self._memory, hi - lo)
        if self._at < self._end:
            return CopyStep.MORE if free else CopyStep.WAIT
        return CopyStep.WAIT if self._asked else CopyStep.DONE

    def answered(self, slot: int, status: int) -> None:
        runs = self._asked.pop(slot, None)
        if runs is None:
            return  # dropped meanwhile
        if status != OK:
            self._error = PeerError(f"{self._asker.peer} {REASONS.get(status, f'answered {status}')}")
        elif not self._write:
            try:
                self._asker.slots.empty(slot, self._local, *runs)
            except OSError as e:
                self._error = e

    def moved(self) -> int:
        left = [(self._at, self._end), *self._asked.values()]
        return self._nbytes - sum(self._local.nbytes(lo, hi) for lo, hi in left)

    def drop(self) -> None:
        self._at = self._end
        if self._asked:
            self._asker.give_up(self._asked)
        self._asked.clear()


class Server:
    """The other end: copies what the asker asks for, within the memory that is lent to it."""

    def __init__(self, fd: int, memories: Memories, lends: Callable[[int, bool], bool]) -> None:
        """Take the slots. ``lends``: whether the asker may read a memory, or write to it.

        Raises:
            PeerError: They are not what they should be.
        """
        self._memories, self._lends = memories, lends
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(fd).st_size != SLOTS * SLOT_BYTES:
                raise PeerError("it sent a message that makes no sense")
            self._slots = Slots(fd)
        except (OSError, ValueError) as e:
            raise PeerError("it sent a message that makes no sense") from e

    def answer(self, request: bytes) -> bytes:
        """Make a copy, and return the answer.

        Raises:
            PeerError: The request makes no sense.
        """
        if len(request) != REQUEST.size:
            raise PeerError("it sent a message that makes no sense")
        slot, write, memory, runs, number = REQUEST.unpack(request)
        if slot >= SLOTS or runs > IOV_MAX:
            raise PeerError("it sent a message that makes no sense")
        self._slots.copying(slot)[0] = number
        self._slots.settle()
        if self._slots.wanted(slot)[0] == number:
            status = self._copy(self._slots, slot, bool(write), memory, runs)
        else:
            status = GIVEN_UP
        self._slots.copying(slot)[0] = 0
        return ANSWER.pack(slot, status)

    def _copy(self, slots: Slots, slot: int, write: bool, memory: int, runs: int) -> int:
        if memory not in self._memories or not self._lends(memory, write):
            return UNKNOWN_MEMORY
        # Taken out first: the asker could change the table after it was checked.
        offsets, lengths = slots.table(slot, runs).T.copy()
        try:
            addresses = self._memories.addresses(memory, offsets, lengths)
        except TransportError:
            return OUTSIDE
        if int(lengths.sum()) > DATA_BYTES:
            return OUTSIDE
        pieces = Pieces(addresses, lengths)
        try:
            if write:
                slots.empty(slot, pieces, 0, runs)
            else:
                slots.fill(slot, pieces, 0, runs)
        except OSError:
            return UNMAPPED
        return OK
