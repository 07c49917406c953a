"""A GPU at work for one transport: a stream of its own, and launches under way on it."""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvxfer import clock
from kvxfer.block_table import Ints
from kvxfer.errors import TransportError
from kvxfer_cuda_ipc.driver import NOT_READY, Context
from kvxfer_cuda_ipc.library import CudaError, check
from kvxfer_cuda_ipc.options import Options
from kvxfer_cuda_ipc.tables import HELD, LANES, MAX_ROWS, MAX_SEGMENTS, AddressRows, Launch, divisor

SLOTS = 8
"""Launches that may be under way: enough to keep the GPU busy while the host does something else."""

SEGMENT_BYTES = 3 * 8
ARENA_BYTES = 16 * MAX_ROWS * 16
THREADS = 1024
"""Of a block; the kernels are compiled for it. As many as there can be: what counts is how much is under way across the link,
and few blocks leave most multiprocessors to others."""

CLOSE_S = 10.0

LARGE = 8 << 20
"""The bytes of a launch that shows how fast the link is."""

NON_BLOCKING, TIMED = 1, 0
WORK = struct.Struct("<QQIIIIIIQQII")
"""``Work`` of the kernel."""


@dataclass(eq=False)
class _Slot:
    """Where the segments of one launch stand, on the host and on the device, and the events around it."""

    host: Ints
    host_address: int
    device: int
    begin: Any
    end: Any
    nbytes: int = 0


class Gpu:
    """Starts launches and tells when they are over; they run one after the other. Any one thread at a time.

    ``pace``: bytes a second of the last large launch, by the GPU's own clock: what the host sees has its delays in it.
    """

    def __init__(self, context: Context, options: Options) -> None:
        self.context, self._api = context, context.api
        self.pace = 400e9
        self._copies = CopyEngines() if options.engine == "copy" else None
        self._ctas = options.ctas
        self._started = self._finished = 0
        self._under_way: deque[_Slot] = deque()
        self._resident: dict[AddressRows, int] = {}
        self._arena_used = 0
        self._work = ctypes.create_string_buffer(WORK.size)
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._work))
        self._arguments_at = ctypes.addressof(self._arguments)
        with context, ExitStack() as made:  # all of it is given back where one thing cannot be had
            context.kernel(16, HELD)  # compiled now, not in front of the first copy
            self._make(made)
            self._made = made.pop_all()

    def _make(self, made: ExitStack) -> None:
        """Make the stream, memory for tables, and events; ``made`` gives them back."""
        api = self._api

        def kept(what: str, result: tuple[Any, ...], end: Callable[[Any], tuple[Any, ...]]) -> Any:
            value = check(what, result)
            made.callback(lambda: check(f"undoing: {what}", end(value)))
            return value

        lowest, _ = check("asking for stream priorities", api.cuCtxGetStreamPriorityRange())
        stream = api.cuStreamCreateWithPriority(NON_BLOCKING, lowest)
        self._stream = kept("making a stream", stream, api.cuStreamDestroy)
        size = SLOTS * MAX_SEGMENTS * SEGMENT_BYTES
        host = int(kept("allocating pinned memory", api.cuMemHostAlloc(size, 0), api.cuMemFreeHost))
        device = int(kept("allocating GPU memory", api.cuMemAlloc(size + ARENA_BYTES), api.cuMemFree))
        self._arena = device + size
        words = np.ctypeslib.as_array((ctypes.c_int64 * (size // 8)).from_address(host)).reshape(SLOTS, -1)
        self._free = [
            _Slot(
                words[i],
                host + i * size // SLOTS,
                device + i * size // SLOTS,
                *(kept("making an event", api.cuEventCreate(TIMED), api.cuEventDestroy) for _ in range(2)),
            )
            for i in range(SLOTS)
        ]

    @property
    def ready(self) -> bool:
        """Whether ``start`` may be called; if not, then after ``finished`` has told of some launch."""
        return bool(self._free)

    def start(self, launch: Launch, after: int | None) -> int:
        """Queue a launch, behind a CUDA event if one is given, and return its number (1, 2 ...).

        Raises:
            CudaError: It cannot be queued; nothing of it is under way.
        """
        slot = self._free[-1]  # taken once nothing can fail any more
        with self.context:
            if after is not None:
                check("waiting for the engine's event", self._api.cuStreamWaitEvent(self._stream, after, 0))
            check("recording an event", self._api.cuEventRecord(slot.begin, self._stream))
            try:
                if self._copies is not None:
                    self._copies.start(launch, int(self._stream))
                else:
                    self._launch(launch, slot)
                check("recording an event", self._api.cuEventRecord(slot.end, self._stream))
            except BaseException:
                # Some of its copies may have been queued. No event tells of them, and the batch is quiet when it has ended.
                self._api.cuStreamSynchronize(self._stream)
                raise
        slot.nbytes = launch.nbytes
        self._under_way.append(self._free.pop())
        self._started += 1
        return self._started

    def finished(self, until: float = 0.0) -> int:
        """Return the number of the last launch that is over; all before it are too.

        Asks until this time of ``kvxfer.clock`` if none is.

        Raises:
            CudaError: , after which nothing can be done on this GPU any more.
        """
        if self._under_way:
            before = self._finished
            with self.context:
                while self._under_way:
                    (error,) = self._api.cuEventQuery(self._under_way[0].end)
                    if error == NOT_READY:
                        if self._finished == before and clock.now() < until:
                            continue
                        break
                    check("a copy on the GPU", (error,))
                    slot = self._under_way.popleft()
                    if slot.nbytes >= LARGE:
                        error, took = self._api.cuEventElapsedTime(slot.begin, slot.end)
                        if error == 0:  # else the pace stays as it is: the copy is over all the same
                            self.pace = slot.nbytes / max(took * 1e-3, 1e-6)
                    self._free.append(slot)
                    self._finished += 1
        return self._finished

    def close(self) -> None:
        """Wait for what is under way and give everything back.

        Raises:
            TransportError: It does not end.
        """
        until = clock.now() + CLOSE_S
        while self.finished() < self._started:
            if clock.now() > until:
                raise TransportError(f"copies on GPU {self.context.ordinal} have not ended {CLOSE_S:g} s after closing")
            clock.wait(0.0005)
        with self.context:
            self._made.close()

    def _launch(self, launch: Launch, slot: _Slot) -> None:
        n = len(launch.counts)
        table = slot.host[: 3 * n].reshape(3, n)
        table[0], table[1], table[2] = launch.src_at, launch.dst_at, launch.counts
        self._upload(slot.device, slot.host_address, n * SEGMENT_BYTES)
        write_work(launch, self._rows_at(launch.rows), slot.device, self._work)
        kernel = self.context.kernel(launch.word, launch.tile.steps)
        blocks = min(self._ctas, blocks_for(launch))
        check(
            "starting the copy kernel",
            self._api.cuLaunchKernel(kernel, blocks, 1, 1, THREADS, 1, 1, 0, self._stream, self._arguments_at, 0),
        )

    def _rows_at(self, rows: AddressRows) -> int:
        """Where the rows stand on the device.

        They stay until the arena is full; what overwrites them then is queued behind the launches that use them.
        """
        at = self._resident.get(rows)
        if at is None:
            nbytes = rows.table.nbytes
            if self._arena_used + nbytes > ARENA_BYTES:
                self._resident.clear()
                self._arena_used = 0
            at = self._arena + self._arena_used
            self._upload(at, rows.table.ctypes.data, nbytes)
            self._resident[rows] = at  # only now: an upload may fail
            self._arena_used += nbytes
        return at

    def _upload(self, device: int, host: int, nbytes: int) -> None:
        check("uploading tables", self._api.cuMemcpyHtoDAsync(device, host, nbytes, self._stream))


def write_work(launch: Launch, rows_at: int, segments_at: int, work: ctypes.Array[ctypes.c_char]) -> None:
    """Write the kernel's ``Work`` for tables that stand at these addresses."""
    rows, tile = len(launch.rows), launch.tile
    by_chunks, shift_chunks = divisor(launch.chunks)
    by_rows, shift_rows = divisor(rows)
    WORK.pack_into(
        work,
        0,
        rows_at,
        segments_at,
        rows,
        len(launch.counts),
        launch.unit,
        tile.lanes.bit_length() - 1,
        launch.chunks,
        launch.total,
        by_chunks,
        by_rows,
        shift_chunks,
        shift_rows,
    )


def blocks_for(launch: Launch) -> int:
    """With how many blocks no thread has more than one turn."""
    at_once = LANES // launch.tile.lanes * (HELD // launch.tile.steps) * (THREADS // LANES)
    return -(-launch.total // at_once)


class CopyEngines:
    """``cuMemcpyBatchAsync``, called by its own name: cuda-bindings would make three Python objects of every run.

    Raises:
        TransportError: The driver is too old to have it.
    """

    class _Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_int) for name in ("order", "from_type", "from_id", "to_type", "to_id", "flags")]

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            newer = hasattr(library, "cuMemcpyBatchAsync_v2")
            self._call = library.cuMemcpyBatchAsync_v2 if newer else library.cuMemcpyBatchAsync
        except (OSError, AttributeError) as e:
            raise TransportError(f"`engine: copy` needs a driver of CUDA 12.8 or later ({e})") from e
        self._failed = [] if newer else [ctypes.byref(ctypes.c_size_t())]
        self._attributes = self._Attributes(order=1)  # sources are read in the order of the stream
        self._first = ctypes.c_size_t(0)

    def start(self, launch: Launch, stream: int) -> None:
        src, dst, length = (np.ascontiguousarray(a) for a in launch.runs())
        at = [ctypes.c_void_p(a.ctypes.data) for a in (dst, src, length)]
        error = self._call(
            *at,
            ctypes.c_size_t(len(src)),
            ctypes.byref(self._attributes),
            ctypes.byref(self._first),
            ctypes.c_size_t(1),
            *self._failed,
            ctypes.c_void_p(stream),
        )
        if error:
            raise CudaError("starting the copy engines", f"error {error}")
