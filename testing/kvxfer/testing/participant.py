"""One side of a conversation under test: a transport, its memory, and a record of how its batches ended.

The record is strict: a completion for a batch that was not submitted, or a second one, fails the test at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvxfer.geometry import HOST, Region
from kvxfer.geometry.region import flat_starts
from kvxfer.memory import Space, allocate
from kvxfer.transport.contract import Batch, Fence, Quieted, Transport

Bytes = NDArray[np.uint8]

PERIOD = 64 << 20
TAIL = 1 << 20
"""How many bytes ``allocate_repeating`` repeats, and how many at the end it does not."""

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_MAP_FIXED = 0x10


@dataclass(frozen=True)
class Result:
    """How a batch ended."""

    error: str | None
    quiet: bool  # whether the batch no longer reads or writes memory


class Buffer:
    """Memory of one device, which the host can read and write."""

    def __init__(self, nbytes: int, device: str) -> None:
        self._map: mmap.mmap | None = None
        self._space: Space | None = None
        if device == HOST:
            # Mapped, not from the heap, so that an access after ``free`` crashes.
            self._map = mmap.mmap(-1, nbytes)
            self.region = Region(np.frombuffer(self._map, np.uint8).ctypes.data, nbytes)
        else:
            self._space = allocate(nbytes, device)
            self.region = self._space.region

    def get(self) -> Bytes:
        """Return a copy of the content on the host."""
        return self.read(0, self.region.nbytes)

    def put(self, content: Bytes) -> None:
        self.write(0, content)

    def read(self, offset: int, nbytes: int) -> Bytes:
        """Return a copy of a stretch on the host."""
        if self._map is not None:
            return np.frombuffer(self._map, np.uint8, nbytes, offset).copy()
        assert self._space is not None, "it has been freed"
        out = np.empty(nbytes, np.uint8)
        self._space.gather(0, np.array([offset]), out[None])
        return out

    def write(self, offset: int, data: Bytes) -> None:
        """Overwrite a stretch."""
        if self._map is not None:
            np.frombuffer(self._map, np.uint8)[offset : offset + len(data)] = data
            return
        assert self._space is not None, "it has been freed"
        self._space.scatter(0, np.array([offset]), np.ascontiguousarray(data)[None])

    def repeat(self) -> None:
        """Map the same ``PERIOD`` bytes again and again all over this host buffer, except for its ``TAIL``.

        Raises:
            OSError: The kernel does not map them.
        """
        pages = os.memfd_create("kvxfer-conformance", os.MFD_CLOEXEC)
        try:
            os.ftruncate(pages, PERIOD)
            for at in range(0, self.region.nbytes - TAIL, PERIOD):
                nbytes = min(PERIOD, self.region.nbytes - TAIL - at)
                how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
                if _mmap(self.region.address + at, nbytes, *how, pages, 0) != self.region.address + at:
                    raise OSError(ctypes.get_errno(), "memory cannot be mapped again")
        finally:
            os.close(pages)

    def free(self) -> None:
        if self._map is not None:
            self._map.close()
        self._map = self._space = None


class Participant(Protocol):
    """What a clause may do with one side, in whichever process it runs.

    Errors are those of the transport. A memory is seen as one array over its flat offset space, in which
    gaps between regions are zero.
    """

    name: str

    def allocate(self, sizes: Sequence[int], seed: int) -> int: ...
    def allocate_untouched(self, sizes: Sequence[int]) -> int: ...
    def allocate_repeating(self, nbytes: int) -> int: ...
    def content(self, memory: int) -> Bytes: ...
    def read(self, memory: int, offset: int, nbytes: int) -> Bytes: ...
    def write(self, memory: int, offset: int, data: Bytes) -> None: ...
    def fill(self, memory: int, seed: int) -> None: ...
    def deregister(self, memory: int) -> None: ...
    def register_again(self, memory: int) -> int: ...
    def endpoint(self) -> bytes: ...
    def endpoint_lending(self, memories: Collection[int], writable: bool) -> bytes: ...
    def withdraw(self, endpoint: bytes) -> None: ...
    def connect(self, mine: bytes, theirs: bytes) -> int: ...
    def disconnect(self, peer: int) -> None: ...
    def submit(self, batch: Batch, after: Fence | None = None) -> int: ...
    def bytes_moved(self, batch: int) -> int: ...
    def result(self, batch: int) -> Result | None: ...
    def quiet(self) -> bool: ...
    def abort(self, batch: int) -> None: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...
    def stop(self) -> None: ...
    def resume(self) -> None: ...


class LocalParticipant:
    """A participant in this process. It makes progress only while a caller calls ``turn``."""

    def __init__(self, backend: type[Transport], options: Mapping[str, Any], name: str, device: str) -> None:
        self.name = name
        self.transport = backend(name, options)
        self._device = device
        self._memories: dict[int, list[Buffer]] = {}
        self._pending: set[int] = set()
        self._results: dict[int, Result] = {}
        self._touched = True
        self._polled = 0.0
        self.closed = False

    def allocate(self, sizes: Sequence[int], seed: int) -> int:
        """Register new memory with random content, one region for each size, and return its number."""
        memory = self.allocate_untouched(sizes)
        self.fill(memory, seed)
        return memory

    def allocate_untouched(self, sizes: Sequence[int]) -> int:
        """Register new memory without content; host memory is zero, and takes room only where it is written to."""
        return self._register([Buffer(n, self._device) for n in sizes])

    def allocate_repeating(self, nbytes: int) -> int:
        """Register gigabytes of host memory that take hardly any room: ``PERIOD`` bytes, repeated, and a ``TAIL``."""
        buffer = Buffer(nbytes, self._device)
        buffer.repeat()
        return self._register([buffer])

    def _register(self, buffers: list[Buffer]) -> int:
        memory = self.transport.register([b.region for b in buffers])
        self._memories[memory] = buffers
        return memory

    def read(self, memory: int, offset: int, nbytes: int) -> Bytes:
        """Return a copy of a stretch that lies in one region."""
        buffer, at = self._place(memory, offset)
        return buffer.read(at, nbytes)

    def write(self, memory: int, offset: int, data: Bytes) -> None:
        """Overwrite a stretch that lies in one region."""
        buffer, at = self._place(memory, offset)
        buffer.write(at, data)

    def _place(self, memory: int, offset: int) -> tuple[Buffer, int]:
        buffers = self._memories[memory]
        starts = flat_starts(tuple(b.region for b in buffers))
        i = bisect_right(starts, offset) - 1
        return buffers[i], offset - starts[i]

    def fill(self, memory: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        for b in self._memories[memory]:
            b.put(random.integers(0, 256, b.region.nbytes, dtype=np.uint8))

    def content(self, memory: int) -> Bytes:
        buffers = self._memories[memory]
        starts = flat_starts(tuple(b.region for b in buffers))
        flat = np.zeros(starts[-1] + buffers[-1].region.nbytes, np.uint8)
        for start, b in zip(starts, buffers, strict=True):
            flat[start : start + b.region.nbytes] = b.get()
        return flat

    def deregister(self, memory: int) -> None:
        self.give_back(memory)
        for b in self._memories.pop(memory):
            b.free()

    def give_back(self, memory: int) -> None:
        """Deregister a memory but keep its bytes, so that a clause can look at them."""
        self._touched = True
        self.transport.deregister(memory)

    def register_again(self, memory: int) -> int:
        """Deregister a memory, register the same bytes again, and return their new number."""
        self.give_back(memory)
        return self._register(self._memories.pop(memory))

    def endpoint(self) -> bytes:
        return self.transport.endpoint()

    def endpoint_lending(self, memories: Collection[int], writable: bool) -> bytes:
        return self.transport.endpoint_lending(memories, writable)

    def withdraw(self, endpoint: bytes) -> None:
        self._touched = True
        self.transport.withdraw(endpoint)

    def connect(self, mine: bytes, theirs: bytes) -> int:
        self._touched = True
        return self.transport.connect(mine, theirs)

    def disconnect(self, peer: int) -> None:
        self._touched = True
        self.transport.disconnect(peer)

    def submit(self, batch: Batch, after: Fence | None = None) -> int:
        self._touched = True
        number = self.transport.submit(batch, after)
        assert number not in self._pending and number not in self._results, f"batch number {number} was used twice"
        self._pending.add(number)
        return number

    def bytes_moved(self, batch: int) -> int:
        return self.transport.bytes_moved(batch)

    def result(self, batch: int) -> Result | None:
        return self._results.get(batch)

    def quiet(self) -> bool:
        """Return whether all batches that have ended are quiet."""
        return all(r.quiet for r in self._results.values())

    def forget(self) -> None:
        """Forget how batches ended, so that their record takes no memory."""
        self._results.clear()

    def abort(self, batch: int) -> None:
        self._touched = True
        self.transport.abort(batch)

    def close(self) -> None:
        """Close the transport. The memory stays, so that a clause can look at it. Idempotent."""
        self.closed = True
        self.transport.close()

    def free(self) -> None:
        for buffers in self._memories.values():
            for b in buffers:
                b.free()
        self._memories.clear()

    def wait(self) -> tuple[int | None, float]:
        """Return when to call ``turn`` next: a descriptor to wait for (or none), and for how many seconds at most."""
        fd = self.transport.fileno()
        if self._touched:
            return fd, 0.0
        if fd is not None:
            return fd, 1.0
        active, idle = self.transport.poll_interval_s
        return None, max(0.0, self._polled + (active if self._pending else idle) - time.monotonic())

    def turn(self, readable: bool) -> None:
        """Poll if the descriptor is readable, the interval is over, or another method was called since.

        Nothing else makes this participant poll, so that a back end that forgets to wake its thread is found out.
        """
        due = self.transport.fileno() is None and self.wait()[1] <= 0
        if not (readable or due or self._touched):
            return
        self._touched, self._polled = False, time.monotonic()
        for done in self.transport.poll():
            if isinstance(done, Quieted):
                known = self._results.get(done.batch)
                assert known is not None, f"batch {done.batch} became quiet before it ended"
                assert not known.quiet, f"batch {done.batch} became quiet, and was quiet already"
                self._results[done.batch] = replace(known, quiet=True)
                continue
            assert done.batch not in self._results, f"batch {done.batch} completed twice"
            assert done.batch in self._pending, f"batch {done.batch} completed, but was never submitted"
            assert done.error is None or isinstance(done.error, Exception), f"an error is an exception: {done.error!r}"
            self._pending.remove(done.batch)
            error = None if done.error is None else f"{type(done.error).__name__}: {done.error}"
            self._results[done.batch] = Result(error, done.quiet)

    def kill(self) -> None:
        raise NotImplementedError("a participant in this process cannot be killed")

    def stop(self) -> None:
        raise NotImplementedError("a participant in this process cannot be stopped")

    def resume(self) -> None:
        raise NotImplementedError("a participant in this process cannot be resumed")
