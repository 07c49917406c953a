"""vLLM's host buffers (``kv_buffer_device: cpu``): a cache that is reached by the platform's own copy operation only.

vLLM hands each worker's connector an operation that copies blocks of the device's cache to tensors of the same shape in host memory
("d2h"), and back ("h2d"). Here it is a kvxfer space: regions of ``vllm_buffer:0`` have the addresses of the device's memory, and
keep the ``HostBuffers`` that copy it. Buffers are as large as the cache. The host gives a page to a buffer when it is first used.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvxfer.block_table import Ints
from kvxfer.errors import KvxferError
from kvxfer.fence import Fence
from kvxfer.geometry import Cache, Region
from kvxfer.memory.fence import Done
from kvxfer.memory.regions import Bytes
from kvxfer.memory.space import Space

if TYPE_CHECKING:
    import torch

DEVICE = "vllm_buffer:0"

CopyBlocks = Callable[[dict[str, Any], dict[str, Any], list[int], list[int], str], None]
"""vLLM's ``CopyBlocksOp``: source tensors, destination tensors, block numbers in each, and "d2h" or "h2d"."""


class HostBuffers:
    """The host's copies of a worker's cache tensors. Any thread may read and write; one at a time does.

    Args:
        tensors: The device's cache tensors by layer, ``[blocks, ...]`` with any strides.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._copy: CopyBlocks | None = None
        self._one_at_a_time = threading.Lock()
        storages: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors.items():
            storages.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
        self._storages = [_Storage(held) for held in storages.values()]

    def use(self, copy: CopyBlocks) -> None:
        """Copy with this operation from now on."""
        self._copy = copy

    def cover(self, cache: Cache) -> Cache:
        """Return the same cache, whose memory is reached through these buffers only."""
        return msgspec.structs.replace(cache, regions=tuple(map(self._covered, cache.regions)))

    def _covered(self, region: Region) -> Region:
        storage = next(s for s in self._storages if 0 <= region.address - s.address < len(s.content))
        part = _Part(self, storage, region.address - storage.address)
        return Region(region.address, region.nbytes, DEVICE, region.elastic).kept_by(part)

    def read(self, stored: _Storage, at: Ints, out: Bytes) -> None:
        """Copy rows at these offsets of a storage from the device, ``[rows, bytes of a row]``."""
        with self._one_at_a_time:
            for layer, blocks, _ in stored.touched(at, out.shape[1]):
                self._move(layer, blocks, "d2h")
            for offset, row in zip(at.tolist(), out, strict=True):
                row[:] = stored.content[offset : offset + len(row)]

    def write(self, stored: _Storage, at: Ints, rows: Bytes) -> None:
        """Copy rows to the device. Of a block that they fill in part, the rest is read first."""
        with self._one_at_a_time:
            touched = stored.touched(at, rows.shape[1])
            for layer, blocks, filled in touched:
                if not filled:
                    self._move(layer, blocks, "d2h")
            for offset, row in zip(at.tolist(), rows, strict=True):
                stored.content[offset : offset + len(row)] = row
            for layer, blocks, _ in touched:
                self._move(layer, blocks, "h2d")
            _wait()

    def _move(self, layer: _Layer, blocks: list[int], way: str) -> None:
        if self._copy is None:
            raise KvxferError(
                "vLLM has given this worker no operation that copies its cache to host memory (set_host_xfer_buffer_ops), which "
                'kv_buffer_device "cpu" needs: leave kv_buffer_device out'
            )
        device, host = {layer.name: layer.device}, {layer.name: layer.host}
        ends = (device, host) if way == "d2h" else (host, device)
        self._copy(*ends, blocks, blocks, way)


class _Layer:
    """One layer's tensor on the device, and its copy on the host, which lies in the storage's copy as it lies in the storage.

    A block lies at the same place in each of the planes, of which there are several if keys and values lie apart.
    """

    def __init__(self, name: str, device: torch.Tensor, copy: torch.Tensor) -> None:
        self.name, self.device = name, device
        unit = device.element_size()
        self.host = copy.view(device.dtype).as_strided(device.shape, device.stride(), device.storage_offset())
        self._blocks, self._step = device.shape[0], device.stride(0) * unit
        steps = [(stride * unit, n) for n, stride in zip(device.shape[1:], device.stride()[1:], strict=True)]
        inside = [each for each in steps if each[0] <= self._step]
        outside = [range(0, n * step, step) for step, n in steps if (step, n) not in inside]
        self._planes = [device.storage_offset() * unit + sum(offsets) for offsets in itertools.product(*outside)]
        # From a block's first byte to its last, in a plane.
        self._extent = unit + sum(step * (n - 1) for step, n in inside)

    def touched(self, at: Ints, nbytes: int) -> tuple[list[int], bool]:
        """Return the blocks that have bytes in these rows, and whether the rows fill all of them."""
        found, filled = [], 0
        for plane in self._planes:
            first = np.maximum(-((plane + self._extent - 1 - at) // self._step), 0)
            last = np.minimum((at + nbytes - 1 - plane) // self._step, self._blocks - 1)
            counts = np.maximum(last - first + 1, 0)
            row = np.repeat(np.arange(len(at)), counts)
            blocks = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
            begin = plane + blocks * self._step
            filled += int((np.minimum(at[row] + nbytes, begin + self._extent) - np.maximum(at[row], begin)).sum())
            found.append(blocks)
        touched = np.unique(np.concatenate(found))
        return touched.tolist(), filled == len(touched) * len(self._planes) * self._extent


class _Storage:
    """Memory that some layers share, and its copy on the host."""

    def __init__(self, held: list[tuple[str, torch.Tensor]]) -> None:
        import torch

        storage = held[0][1].untyped_storage()
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8)
        self.address = storage.data_ptr()
        self.content: Bytes = copy.numpy()
        self._layers = [_Layer(name, tensor, copy) for name, tensor in held]

    def touched(self, at: Ints, nbytes: int) -> list[tuple[_Layer, list[int], bool]]:
        """Return the layers that have bytes in these rows, with the blocks concerned and whether the rows fill them."""
        found = [(layer, *layer.touched(at, nbytes)) for layer in self._layers]
        return [each for each in found if each[1]]


class _Part:
    """What a region keeps: a storage, the buffers that copy it, and where the region begins in it."""

    def __init__(self, buffers: HostBuffers, storage: _Storage, begin: int) -> None:
        self._buffers, self._storage, self._begin = buffers, storage, begin

    def read(self, at: Ints, out: Bytes) -> None:
        self._buffers.read(self._storage, at + self._begin, out)

    def write(self, at: Ints, rows: Bytes) -> None:
        self._buffers.write(self._storage, at + self._begin, rows)


class BufferSpace(Space):
    """The memory of regions that ``HostBuffers.cover`` has made."""

    contract = 1

    @classmethod
    def devices(cls, kind: str) -> Sequence[str]:
        return [DEVICE]

    @classmethod
    def allocate(cls, nbytes: int, device: str) -> BufferSpace:
        import torch

        try:
            memory = torch.zeros(1, nbytes, dtype=torch.uint8)
        except RuntimeError as e:
            raise KvxferError(f"cannot allocate {nbytes} bytes for {device}: {e}") from e
        buffers = HostBuffers({"staging": memory})
        buffers.use(_copy_on_host)
        return cls(buffers.cover(Cache((Region.of(memory),), (), ())).regions, device)

    @classmethod
    def fence(cls, device: str) -> Fence:
        import torch

        from kvxfer.memory.torch_space import TorchSpace

        found = torch.accelerator.current_accelerator()
        return Done() if found is None else TorchSpace.fence(f"{found.type}:{torch.accelerator.current_device_index()}")

    def gather(self, region: int, at: Ints, out: Bytes) -> None:
        self.regions[region].owner.read(at, out)

    def scatter(self, region: int, at: Ints, rows: Bytes) -> None:
        self.regions[region].owner.write(at, rows)


def _copy_on_host(
    source: dict[str, Any], destination: dict[str, Any], here: list[int], there: list[int], way: str
) -> None:
    for name in source:
        destination[name][there] = source[name][here]


def _wait() -> None:
    """Wait until the device has what was copied to it."""
    import torch

    if torch.accelerator.current_accelerator() is not None:
        torch.accelerator.synchronize()
