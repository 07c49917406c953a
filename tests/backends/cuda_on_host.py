"""The cuda_ipc back end without a GPU: host memory in place of GPU memory, and copies by the CPU.

Everything is the back end's own but what lies below ``Gpu`` and ``Context``: those here take the same tables, copy in a thread
that plays the stream, and "finish" a launch some polls after it was started.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar

from kvxfer.geometry import Region
from kvxfer.transport import Capabilities, Probe
from kvxfer_cuda_ipc import CudaIpcTransport
from kvxfer_cuda_ipc.library import CudaError
from kvxfer_cuda_ipc.tables import Launch

MAPPED: list[int] = [0]
"""Processes whose memory was opened: it appears at the addresses there plus the process's index here times 2**48."""

LATER = 3
"""Looks at a launch before it is over."""


class HostContext:
    """An allocation is the page that an address is in and all behind it; its handle says whose it is and where."""

    ordinal = 0
    uuid = b"host"

    def __enter__(self) -> HostContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def reaches(self, uuid: bytes) -> bool | None:
        return True if uuid == self.uuid else None

    def allocation(self, address: int) -> tuple[int, int]:
        return address & -4096, 1 << 40

    def share(self, base: int) -> bytes:
        return os.getpid().to_bytes(32, "little") + base.to_bytes(32, "little")

    def open(self, shared: bytes) -> int:
        pid, base = int.from_bytes(shared[:32], "little"), int.from_bytes(shared[32:], "little")
        if not os.path.exists(f"/proc/{pid}"):
            raise CudaError("opening shared memory", "CUDA_ERROR_INVALID_VALUE")
        if pid not in MAPPED:
            MAPPED.append(pid)
        return MAPPED.index(pid) << 48 | base

    def unmap(self, address: int) -> None:
        pass


class HostGpu:
    slots: ClassVar[int] = 3
    pace: ClassVar[float] = 1e9
    context: ClassVar[HostContext] = HostContext()

    def __init__(self) -> None:
        self._stream = ThreadPoolExecutor(1, "played-stream")
        self._under_way: deque[Future[None]] = deque()
        self._looks = self._started = self._finished = 0

    @property
    def ready(self) -> bool:
        return len(self._under_way) < self.slots

    def start(self, launch: Launch, after: int | None) -> int:
        assert after is None
        self._started += 1
        self._under_way.append(self._stream.submit(_copy, launch))
        return self._started

    def finished(self, until: float = 0.0) -> int:
        if self._under_way:
            self._looks += 1
        if self._looks >= LATER and self._under_way[0].done():
            self._looks = 0
            self._under_way.popleft().result()
            self._finished += 1
        return self._finished

    def close(self) -> None:
        self._stream.shutdown()
        for copied in self._under_way:
            copied.result()


def _copy(launch: Launch) -> None:
    for src, dst, n in zip(*(a.tolist() for a in launch.runs()), strict=True):
        _write(dst, _read(src, n))


def _place(address: int) -> tuple[str, int]:
    return f"/proc/{MAPPED[address >> 48] or 'self'}/mem", address & (1 << 48) - 1


def _read(address: int, n: int) -> bytes:
    path, at = _place(address)
    try:
        with open(path, "rb", buffering=0) as memory:
            found = os.pread(memory.fileno(), n, at)
    except OSError:
        found = b""
    return found.ljust(n, b"\0")  # a dead process's GPU memory can still be read, whatever is in it


def _write(address: int, content: bytes) -> None:
    path, at = _place(address)
    try:
        with open(path, "r+b", buffering=0) as memory:
            os.pwrite(memory.fileno(), content, at)
    except OSError:
        assert path != "/proc/self/mem"


class OnHost(CudaIpcTransport):
    """Moves CPU memory, which it takes for that of GPU 0."""

    def __init__(self, agent: str, options: Any) -> None:
        super().__init__(agent, options)
        self._host_gpu: Any = HostGpu()

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, "the host stands in for a GPU", frozenset({"cpu"}))

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, memory=frozenset({"cpu", "cuda"}))

    def register(self, regions: Sequence[Region]) -> int:
        return super().register(
            [Region(r.address, r.nbytes, "cuda:0" if r.device == "cpu" else r.device) for r in regions]
        )

    def _open_gpu(self, ordinal: int) -> Any:
        return self._host_gpu
