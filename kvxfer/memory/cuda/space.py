"""Memory of GPUs that torch calls ``cuda``, NVIDIA's and AMD's: Triton kernels where Triton is, torch's indexing elsewhere.

All work runs on a stream of the space's own, of the lowest priority: it waits for nothing but its fences and delays the
model little.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvxfer.block_table import Ints
from kvxfer.errors import KvxferError
from kvxfer.fence import Fence
from kvxfer.geometry import CopyPlan, Region
from kvxfer.memory.checksum import Checksum, logical_copies
from kvxfer.memory.cpu import CpuSpace
from kvxfer.memory.cuda.pages import FixedMemory, is_mapped
from kvxfer.memory.fence import DeviceEvent
from kvxfer.memory.indexed import copy_rows, move_indexed
from kvxfer.memory.regions import Bytes, Side
from kvxfer.memory.space import Space


class CudaSpace(Space):
    """Memory of one device, which packs into memory of that device or into pinned host memory."""

    contract = 1

    def __init__(self, regions: tuple[Region, ...], device: str) -> None:
        super().__init__(regions, device)
        self._device = torch.device(device)
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(priority=0)  # 0 is the lowest
            processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._launcher: Launcher | None = None
        if importlib.util.find_spec("triton") is not None:
            from kvxfer.memory.cuda.launch import Launcher

            self._launcher = Launcher(self, processors, self._stream)
        self.by_itself = self._launcher is not None

    @classmethod
    def devices(cls, kind: str) -> Sequence[str]:
        return [f"{kind}:{i}" for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]

    @classmethod
    def allocate(cls, nbytes: int, device: str) -> CudaSpace:
        """Allocate memory that keeps its pages, even where PyTorch's own is mapped by pages: it may be exported to others.

        Raises:
            KvxferError: The device has not that much left.
        """
        try:
            with torch.cuda.device(torch.device(device)):
                held = torch.zeros(nbytes, dtype=torch.uint8, device=device)
                torch.cuda.synchronize()
                address = held.data_ptr()
                if is_mapped(address):
                    del held
                    torch.cuda.empty_cache()
                    held = FixedMemory(nbytes)
                    address = held.address
                    wrap(address, nbytes, device).zero_()
                    torch.cuda.synchronize()
            return cls((Region(address, nbytes, device).kept_by(held),), device)
        except RuntimeError as e:
            raise KvxferError(f"cannot allocate {nbytes} bytes of staging for {device}: {e}") from e

    @classmethod
    def allocate_host(cls, nbytes: int) -> CpuSpace:
        """Allocate pinned host memory, which kernels address as it is.

        Raises:
            KvxferError: The system does not give that much memory.
        """
        try:
            held = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as e:
            raise KvxferError(f"cannot allocate {nbytes} bytes of pinned staging: {e}") from e
        return CpuSpace((Region(held.data_ptr(), nbytes).kept_by(held),), pinned=True)

    @classmethod
    def fence(cls, device: str) -> DeviceEvent:
        """Return an event on the calling thread's current stream."""
        return DeviceEvent(torch.cuda.current_stream(torch.device(device)).record_event())

    @classmethod
    def remaps(cls, region: Region) -> bool:
        return is_mapped(region.address)

    def gather(self, region: int, at: Ints, out: Bytes) -> None:
        with self._on_stream(None):
            copy_rows(self._memory(region), at, out, pack=True)

    def scatter(self, region: int, at: Ints, rows: Bytes) -> None:
        with self._on_stream(None):
            copy_rows(self._memory(region), at, rows, pack=False)
            self._stream.synchronize()

    def pack(self, plan: CopyPlan, out: Space, at: int = 0, after: Fence | None = None) -> Fence:
        return self._move(plan, "source", out, at, after)

    def unpack(self, plan: CopyPlan, staged: Space, at: int = 0, after: Fence | None = None) -> Fence:
        return self._move(plan, "destination", staged, at, after)

    def prepare_unpack(self, plan: CopyPlan, staged: Space) -> Callable[[int], Fence]:
        launcher = self._launcher
        if launcher is None:
            return super().prepare_unpack(plan, staged)
        with torch.cuda.device(self._device):
            launches = launcher.prepare(plan, "destination", pack=False)
            launcher.rehearse(launches, staged.region.address)

        def begin(at: int) -> Fence:
            address = self._address(staged, at, plan.nbytes)
            with torch.cuda.device(self._device):
                return launcher.begin(launches, address)

        return begin

    def prepare_checksum(self, plan: CopyPlan, side: Side) -> Callable[[Fence | None], Checksum]:
        parts = logical_copies(plan)
        launcher = self._launcher
        if launcher is None:
            by_host = super().prepare_checksum(plan, side)

            def behind(after: Fence | None) -> Checksum:
                with self._on_stream(after):
                    return by_host(None)

            return behind
        with self._on_stream(None):
            out = torch.zeros(1, dtype=torch.int64, device=self._device)
            host = torch.empty(1, dtype=torch.int64, pin_memory=True)
            launches = [launch for part in parts for launch in launcher.digests(part, side, out)]

        def begin(after: Fence | None) -> Checksum:
            with self._on_stream(after):
                for launch in launches:
                    launch()
                host.copy_(out, non_blocking=True)
                return _Pending(host, self._stream.record_event())

        return begin

    def _move(self, plan: CopyPlan, side: Side, packed: Space, at: int, after: Fence | None) -> Fence:
        stream = self._address(packed, at, plan.nbytes)
        if self._launcher is not None:
            with torch.cuda.device(self._device):  # without ``torch.cuda.stream``, which takes as long as a launch
                self._wait(after)
                return self._launcher.move(plan, side, stream, pack=side == "source")
        with self._on_stream(after):
            try:
                if plan.nbytes:
                    packed_here = wrap(stream, plan.nbytes, self.device)
                    move_indexed(self, plan, side, packed_here, self._memory, pack=side == "source")
            except Exception:
                self._stream.synchronize()  # copies that were begun
                raise
            return DeviceEvent(self._stream.record_event())

    def _address(self, packed: Space, at: int, nbytes: int) -> int:
        if packed.device != self.device and not getattr(packed, "pinned", False):
            raise ValueError(f"memory of {self.device} is packed into the same device or pinned host memory only")
        region, offset = packed.locate(at, nbytes)
        return packed.regions[region].address + offset

    @contextmanager
    def _on_stream(self, after: Fence | None) -> Iterator[None]:
        """Run what is started inside on the space's stream, once the fence has passed."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._wait(after)
            yield

    def _wait(self, after: Fence | None) -> None:
        if after is not None and after.event is not None:
            self._stream.wait_event(after.event)
        elif after is not None and not after.passed():
            raise ValueError("a fence without a device event cannot be waited for; call again once it has passed")

    def _memory(self, region: int) -> Any:
        held = self.regions[region]
        return wrap(held.address, held.nbytes, self.device)


class _Pending(Checksum):
    """A checksum on its way to the host."""

    def __init__(self, host: Any, event: Any) -> None:
        self._host, self.fence = host, DeviceEvent(event)

    @property
    def value(self) -> int:
        self.fence.event.synchronize()
        return int(self._host.item()) % (1 << 64)


class _Raw:
    """A piece of memory for ``torch.as_tensor``, by the CUDA array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def wrap(address: int, nbytes: int, device: str) -> Any:
    """Return a uint8 tensor over memory that other code owns."""
    return torch.as_tensor(_Raw(address, nbytes), device=device)
