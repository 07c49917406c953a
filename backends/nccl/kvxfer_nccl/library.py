"""The binding to NCCL itself, by nccl4py, with streams and events of torch (fences are torch's, too)."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from kvxfer import clock
from kvxfer.errors import TransportError
from kvxfer.memory.fence import Events
from kvxfer.transport.contract import Fence
from kvxfer_nccl.binding import Binding, Mark, Pipe, PipeSpec

PIP_LINE = "in a checkout: pip install ./backends/nccl"

TICK_S = 0.0005
"""How often a thread that waits for the device asks."""

WORD = 128
"""Bytes of the first operation of a communicator."""

# ncclResult_t
_FINE = (0, 7)  # success, in progress


class NcclPipe:
    """Fulfils ``Pipe``. ``word``: returns memory of ``WORD`` bytes whose contents nobody needs; it may block.

    The communicator blocks (in NCCL's sense), for then an operation costs a tenth of what it costs on one that does
    not; what can block for long, init and the first operation, is done in ``open``.
    """

    def __init__(self, nccl: Any, bindings: Any, torch: Any, spec: PipeSpec, word: Callable[[], int]) -> None:
        self._nccl, self._bindings, self._torch, self._spec, self._word = nccl, bindings, torch, spec, word
        self._byte = int(nccl.UINT8)
        self._device = torch.device(spec.device)
        self._peer = 1 if spec.sends else 0
        self._comm: Any = None
        self._handle: Any = None  # the communicator, for the functions below
        self._aborted = False
        self._lock = threading.Lock()
        self._fences: deque[Fence] = deque()
        self._owned: Any = None  # the stream, and torch's view of it
        self._stream: Any = None
        self._events = Events()

    def open(self) -> None:
        nccl, torch = self._nccl, self._torch
        torch.cuda.set_device(self._device)  # of this thread
        self._make_stream()
        unique_id = nccl.UniqueId.from_bytes(self._spec.unique_id)
        config = nccl.NCCLConfig(blocking=True, max_ctas=self._spec.options.channels)
        try:
            comm = nccl.Communicator.init(2, 1 - self._peer, unique_id, config)
        except Exception as e:
            raise TransportError(f"NCCL's init failed: {e}") from e
        with self._lock:
            if not self._aborted:
                self._comm, self._handle = comm, self._bindings.Comm(comm.ptr)
        if self._aborted:
            # While nobody could reach it, so that it falls to us.
            comm.abort()
            raise TransportError("the communicator was aborted")
        # The first operation connects the two, and waits for that on the host.
        try:
            self._act(self._word(), WORD)
            mark = self.mark()
            while not mark.passed():
                if self._aborted:
                    raise TransportError("the communicator was aborted")
                clock.wait(TICK_S)
        except TransportError:
            raise
        except Exception as e:
            raise TransportError(f"NCCL could not connect the two GPUs: {e}") from e

    def move(self, runs: Sequence[tuple[int, int]]) -> None:
        try:
            if len(runs) == 1:
                self._act(*runs[0])
                return
            with self._nccl.group():
                for address, nbytes in runs:
                    self._act(address, nbytes)
        except Exception as e:
            raise TransportError(
                f"NCCL did not take {len(runs)} runs of {sum(nbytes for _, nbytes in runs)} bytes: {e}"
            ) from e

    def _act(self, address: int, nbytes: int) -> None:
        """One send or receive, by the functions below nccl4py's ``Communicator``.

        That wants a tensor for each piece, and to look at it takes longer than to start the operation.
        """
        act = self._bindings.send if self._spec.sends else self._bindings.recv
        act(address, nbytes, self._byte, self._peer, self._handle, self._stream.cuda_stream)

    def wait(self, fence: Fence) -> None:
        while self._fences and self._fences[0].passed():
            self._fences.popleft()
        self._fences.append(fence)
        self._stream.wait_event(fence.event)

    def mark(self) -> Mark:
        return self._events.record(self._stream)

    def error(self) -> str | None:
        code = int(self._comm.get_async_error())
        if code in _FINE:
            return None
        return f"{self._nccl.get_error_string(code)} ({self._comm.get_last_error() or 'no details'})"

    def abort(self) -> None:
        with self._lock:
            self._aborted, comm = True, self._comm
            self._comm = self._handle = None
        if comm is None:
            return
        try:
            # What waits for a fence is not launched yet, and must not be once NCCL has freed its memory.
            while self._fences:
                if self._fences[0].passed():
                    self._fences.popleft()
                else:
                    clock.wait(TICK_S)
            comm.abort()
            self._stream.synchronize()
            self._owned.close()
        except Exception as e:
            raise TransportError(f"NCCL did not abort a communicator cleanly: {e}") from e

    def _make_stream(self) -> None:
        """Return a stream that nobody else has: torch hands out 32, one after the other, and what NCCL runs on one may wait for long."""
        from cuda.core import Device, StreamOptions

        device = Device(self._device.index)
        device.set_current()
        priority = -1 if self._spec.options.priority == "high" else 0
        self._owned = device.create_stream(options=StreamOptions(nonblocking=True, priority=priority))
        self._stream = self._torch.cuda.ExternalStream(int(self._owned.handle), device=self._device)


class NcclBinding:
    """NCCL as ``Binding`` describes it.

    Raises:
        TransportError: There is no libnccl.
    """

    memory = frozenset({"cuda"})

    def __init__(self, nccl: Any, bindings: Any, torch: Any) -> None:
        self._nccl, self._bindings, self._torch = nccl, bindings, torch
        self._words: dict[str, Any] = {}
        found = nccl.get_version()
        if found.libnccl is None:
            raise TransportError("back end 'nccl' found no libnccl; it comes with torch for CUDA, or nvidia-nccl-cu13")
        self.release = str(found.libnccl.version)
        self.versions = {
            "nccl": str(found.libnccl),
            "nccl4py": str(found.nccl4py),
            "torch": str(torch.__version__),
            "cuda devices": str(torch.cuda.device_count()),
        }

    def default_device(self) -> str:
        return f"cuda:{self._torch.cuda.current_device()}"

    def identity(self, device: str) -> str:
        return str(self._torch.cuda.get_device_properties(self._torch.device(device)).uuid)

    def unique_id(self) -> bytes:
        return bytes(self._nccl.get_unique_id())

    def pipe(self, spec: PipeSpec) -> Pipe:
        return NcclPipe(self._nccl, self._bindings, self._torch, spec, lambda: self._word(spec.device))

    def _word(self, device: str) -> int:
        """Return the address of ``WORD`` bytes that all communicators of a device move first.

        They are not of a communicator's own stream: torch keeps what it gives to a stream for that stream, 2 MiB at least, even when
        the stream is no more.
        """
        word = self._words.get(device)
        if word is None:
            word = self._torch.empty(WORD, dtype=self._torch.uint8, device=device)
            # The former user of this memory may still be at work in it, on the stream for which torch gave it.
            self._torch.cuda.current_stream(word.device).synchronize()
            word = self._words.setdefault(device, word)
        return int(word.data_ptr())


@cache
def load() -> Binding:
    """Load what NCCL needs.

    Raises:
        TransportError: nccl4py, torch, libnccl or a GPU is missing.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as e:  # torch would find none either, after the second that importing it takes
        raise TransportError(f"back end 'nccl' moves memory of CUDA devices, and there is no driver here ({e})") from e
    try:
        import torch
    except ImportError as e:
        raise TransportError(f"back end 'nccl' needs torch built for CUDA, which cannot be imported ({e})") from e
    if not torch.cuda.is_available():
        raise TransportError("back end 'nccl' moves memory of CUDA devices, and torch finds none here")
    try:
        import nccl.core as nccl
        from nccl.bindings import nccl as bindings
    except ImportError as e:
        raise TransportError(f"back end 'nccl' needs nccl4py, which cannot be imported ({e}); {PIP_LINE}") from e
    return NcclBinding(nccl, bindings, torch)
