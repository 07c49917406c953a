"""Memory of any device that torch knows, by torch's own operations: for kinds that have no space of their own.

It reaches memory through the tensors that regions were made of (``Region.of``, ``Cache.of_tensors``), never by address.
Rows are gathered on the device, then copied to the host in one piece. Where the device has streams and events, this happens on
a stream of the space's own, and the calling thread goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvxfer.block_table import Ints
from kvxfer.errors import ArgumentError, KvxferError
from kvxfer.fence import Fence
from kvxfer.geometry import CopyPlan, Region
from kvxfer.memory.checksum import Checksum
from kvxfer.memory.cpu import CpuSpace
from kvxfer.memory.fence import DeviceEvent, Done
from kvxfer.memory.indexed import copy_rows, move_indexed
from kvxfer.memory.regions import Bytes, Side
from kvxfer.memory.space import HostSpace, Space, require_passed


class TorchSpace(Space):
    """Tensors of one device, which pack into memory of that device or into host memory."""

    contract = 1

    def __init__(self, regions: tuple[Region, ...], device: str) -> None:
        super().__init__(regions, device)
        self._held = [_bytes_of(r) for r in regions]
        self._stream = _stream(self._held[0].device) if self._held else None

    @classmethod
    def devices(cls, kind: str) -> Sequence[str]:
        found = torch.accelerator.current_accelerator(check_available=True)
        count = torch.accelerator.device_count() if found is not None and found.type == kind else 0
        return [f"{kind}:{i}" for i in range(count)]

    @classmethod
    def allocate(cls, nbytes: int, device: str) -> TorchSpace:
        try:
            held = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            _synchronize(held.device)
        except RuntimeError as e:
            raise KvxferError(f"cannot allocate {nbytes} bytes of staging for {device}: {e}") from e
        return cls((Region.of(held),), device)

    @classmethod
    def allocate_host(cls, nbytes: int) -> Space:
        """Allocate pinned host memory where torch can, else any."""
        try:
            held = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=torch.accelerator.is_available())
        except (RuntimeError, NotImplementedError):
            return CpuSpace.allocate(nbytes)
        return CpuSpace((Region.of(held),), pinned=held.is_pinned())

    @classmethod
    def fence(cls, device: str) -> Fence:
        """Return an event on the calling thread's current stream; without events, wait for the device."""
        if not _accelerated(device.partition(":")[0]):
            return Done()
        here = torch.device(device)
        try:
            return DeviceEvent(torch.accelerator.current_stream(here).record_event())
        except (RuntimeError, NotImplementedError):
            torch.accelerator.synchronize(here)
            return Done()

    def gather(self, region: int, at: Ints, out: Bytes) -> None:
        with self._on_stream():
            copy_rows(self._held[region], at, out, pack=True)

    def scatter(self, region: int, at: Ints, rows: Bytes) -> None:
        with self._on_stream():
            copy_rows(self._held[region], at, rows, pack=False)
        self._wait()

    def pack(self, plan: CopyPlan, out: Space, at: int = 0, after: Fence | None = None) -> Fence:
        return self._move(plan, "source", out, at, after)

    def unpack(self, plan: CopyPlan, staged: Space, at: int = 0, after: Fence | None = None) -> Fence:
        return self._move(plan, "destination", staged, at, after)

    def prepare_checksum(self, plan: CopyPlan, side: Side) -> Callable[[Fence | None], Checksum]:
        begin = super().prepare_checksum(plan, side)

        def behind(after: Fence | None) -> Checksum:
            with self._on_stream(after):
                return begin(None)

        return behind

    def _move(self, plan: CopyPlan, side: Side, packed: Space, at: int, after: Fence | None) -> Fence:
        there = self._stream_of(packed, at, plan.nbytes)
        if not plan.nbytes:
            return Done()
        with self._on_stream(after):
            try:
                here = there if packed.device == self.device else torch.empty_like(there, device=self._held[0].device)
                if side == "destination" and here is not there:
                    here.copy_(there, non_blocking=self._apart(packed))
                move_indexed(self, plan, side, here, self._held.__getitem__, pack=side == "source")
                if side == "source" and here is not there:
                    there.copy_(here, non_blocking=self._apart(packed))
            except Exception:
                self._wait()  # copies that were begun
                raise
        return self._mark(here)

    def _stream_of(self, packed: Space, at: int, nbytes: int) -> Any:
        """Return these bytes of the packed stream as a tensor.

        Raises:
            ValueError: They are neither of the same device nor of the host.
        """
        if isinstance(packed, HostSpace):
            return torch.from_numpy(packed.bytes(at, nbytes))
        if not isinstance(packed, TorchSpace) or packed.device != self.device:
            raise ValueError(f"memory of {self.device} is packed into the same device or into host memory only")
        region, offset = packed.locate(at, nbytes)
        return packed._held[region][offset : offset + nbytes]

    def _apart(self, packed: Space) -> bool:
        """Return whether the host may go on while the device copies from or to this host memory."""
        return self._stream is not None and getattr(packed, "pinned", False)

    @contextmanager
    def _on_stream(self, after: Fence | None = None) -> Iterator[None]:
        """Run what is started inside on the space's stream, once the fence has passed."""
        stream = self._stream
        if stream is None or after is None or not isinstance(after.event, torch.Event):
            require_passed(after)
        else:
            stream.wait_event(after.event)
        if stream is None:
            yield
        else:
            with stream:
                yield

    def _mark(self, used: Any) -> Fence:
        """Return a fence for what was started; it keeps the tensor ``used`` until then."""
        if self._stream is None:
            _synchronize(self._held[0].device)
            return Done()
        return _Using(self._stream.record_event(), used)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        elif self._held:
            _synchronize(self._held[0].device)


class _Using(DeviceEvent):
    """A fence of work that uses a tensor."""

    def __init__(self, event: Any, used: Any) -> None:
        super().__init__(event)
        self._used = used


def _bytes_of(region: Region) -> Any:
    """Return the memory of a region as a tensor of uint8.

    Raises:
        ArgumentError: The region was not made of a tensor of torch.
    """
    owner = region.owner
    first = owner[0] if isinstance(owner, tuple) and owner else owner
    if not isinstance(first, torch.Tensor):
        raise ArgumentError(
            f"memory of {region.device} is reached through tensors of torch, and a region of {region.nbytes} bytes there was made "
            "of none: make it with kvxfer.geometry.Region.of or kvxfer.Cache.of_tensors, or install a distribution that has a space for it"
        )
    storage = first.untyped_storage()
    begin = first.storage_offset() * first.element_size()
    if storage.nbytes() < begin + region.nbytes:
        raise ArgumentError(f"a region of {region.nbytes} bytes of {region.device} is not of one tensor's storage")
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)[begin : begin + region.nbytes]


def _stream(device: Any) -> Any:
    """Return a new stream of a device; ``None`` if it has none, or no events."""
    if not _accelerated(device.type):
        return None
    try:
        stream = torch.Stream(device)
        stream.record_event()
    except (RuntimeError, NotImplementedError):
        return None
    return stream


def _accelerated(kind: str) -> bool:
    """Return whether this is the kind of device that torch calls the accelerator here."""
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == kind


def _synchronize(device: Any) -> None:
    if _accelerated(device.type):
        torch.accelerator.synchronize(device)
