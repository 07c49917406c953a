"""Write to blocks of a worker's cache: copy them, or zero what a load leaves of them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.geometry import Cache, UncoveredBytes, View, uncovered
from kvxfer.values import NULL, BlockTable

if TYPE_CHECKING:
    import torch


def memory_of(tensors: Iterable[torch.Tensor], cache: Cache) -> list[torch.Tensor]:
    """Return the bytes of each region of a cache that describes these tensors, uint8 ``[nbytes]``."""
    import torch

    by_address = {t.untyped_storage().data_ptr(): t for t in tensors}
    out: list[torch.Tensor] = []
    for region in cache.regions:
        of = by_address[region.address]
        flat = torch.empty(0, dtype=torch.uint8, device=of.device)
        out.append(flat.set_(of.untyped_storage(), 0, (region.nbytes,), (1,)))
    return out


class Clearing:
    """Zeroes parts of one worker's cache. ``tensors``: what the engine allocated, which ``cache`` describes."""

    def __init__(self, tensors: Iterable[torch.Tensor], cache: Cache) -> None:
        import torch

        self._cache, self._starts = cache, cache.starts
        self._memory = memory_of(tensors, cache)
        devices = {t.device for t in self._memory if t.device.type != "cpu"}
        # Not the stream of the forward passes, so that neither the clearing nor the host waits for them.
        self._streams = [torch.cuda.Stream(device) for device in devices]

    def before(self, blocks: BlockTable, start: int, tokens: int) -> None:
        """Zero the bytes of these blocks that loading the tokens ``[start, tokens)`` does not write.

        The bytes are zero when this returns, so that the load may begin.
        """
        import torch

        holes = uncovered(self._cache, blocks, start, tokens)
        if not self._streams:
            for hole in holes:
                self._clear(hole)
            return
        for stream in self._streams:
            with torch.cuda.stream(stream):
                for hole in holes:
                    self._clear(hole)
            stream.synchronize()

    def _clear(self, hole: UncoveredBytes) -> None:
        region = self._region(hole.places[0])
        pitches = set(np.diff(hole.places).tolist())
        if len(pitches) == 1 and min(pitches) > 0 and region == self._region(hole.places[-1]):
            # All layers at once, as most caches are laid out.
            self._zero(hole.places[0], ((len(hole.places), pitches.pop()), *hole.axes), hole.unit)
            return
        for place in hole.places:
            self._zero(place, hole.axes, hole.unit)

    def _region(self, place: int) -> int:
        return bisect.bisect_right(self._starts, place) - 1

    def _zero(self, place: int, axes: Sequence[tuple[int, int]], unit: int) -> None:
        region = self._region(place)
        sizes, strides = [*(n for n, _ in axes), unit], [*(s for _, s in axes), 1]
        self._memory[region].as_strided(sizes, strides, place - self._starts[region]).zero_()


DEVICE_BYTES = 256 << 20
"""Bytes copied at a time on a GPU, which gathers them into a temporary buffer first; one block if that is larger."""

HOST_BYTES = 256 << 10
"""Bytes copied at a time on the CPU: numpy reads them into a temporary buffer first, and allocating megabytes for that takes
longer than copying them."""


class BlockCopier:
    """Copies blocks within one worker's cache. ``tensors``: what the engine allocated, which ``cache`` describes."""

    def __init__(self, tensors: Iterable[torch.Tensor], cache: Cache) -> None:
        memory = memory_of(tensors, cache)
        self._by_group: list[list[Any]] = [[] for _ in cache.groups]  # each [layers, blocks, ..., words]
        for view in cache.views:
            planes = _planes(view, cache, memory)
            self._by_group[view.group] += [plane.numpy() if plane.device.type == "cpu" else plane for plane in planes]

    def copy(self, src: BlockTable, dst: BlockTable) -> None:
        """Copy the blocks of ``src`` to those of ``dst``, position by position, where both have one.

        On a GPU the copies are queued on the current stream when this returns; work queued later on it sees the copies.
        """
        for planes, of, to in zip(self._by_group, src, dst, strict=True):
            n = min(len(of), len(to))
            both = (of[:n] != NULL) & (to[:n] != NULL)
            here, there = of[:n][both], to[:n][both]
            for plane in planes if len(here) else ():
                if isinstance(plane, np.ndarray):
                    _copy_on_host(plane, here, there)
                else:
                    _copy_on_device(plane, here, there)


def _copy_on_host(plane: np.ndarray, here: np.ndarray, there: np.ndarray) -> None:
    each = max(1, HOST_BYTES // max(1, plane[:, 0].nbytes))
    for i in range(0, len(here), each):
        plane[:, there[i : i + each]] = plane[:, here[i : i + each]]


def _copy_on_device(plane: torch.Tensor, here: np.ndarray, there: np.ndarray) -> None:
    import torch

    of, to = torch.from_numpy(here).to(plane.device), torch.from_numpy(there).to(plane.device)
    each = max(1, DEVICE_BYTES // max(1, plane[:, 0].nbytes))
    for i in range(0, len(of), each):
        plane.index_copy_(1, to[i : i + each], plane.index_select(1, of[i : i + each]))


def _planes(view: View, cache: Cache, memory: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a view as tensors over its layers: a single one if the layers are evenly spaced."""
    axes, unit = _merged(view.axes(cache.groups[view.group].block_tokens), view.unit)
    offsets = np.sort(np.asarray(view.offsets, np.int64))
    region = np.searchsorted(cache.starts, offsets, side="right") - 1
    pitches = np.unique(np.diff(offsets))
    even = len(pitches) <= 1 and region[0] == region[-1]
    runs = [offsets] if even else [offsets[i : i + 1] for i in range(len(offsets))]
    out = []
    for run in runs:
        r = int(np.searchsorted(cache.starts, run[0], side="right") - 1)
        pitch = int(run[1] - run[0]) if len(run) > 1 else 0
        sizes = [len(run), view.blocks, *(n for n, _ in axes), unit]
        strides = [pitch or unit, view.block_stride, *(s for _, s in axes), 1]
        out.append(_wide(memory[r], sizes, strides, int(run[0]) - cache.starts[r]))
    return out


def _merged(axes: list[tuple[int, int]], unit: int) -> tuple[list[tuple[int, int]], int]:
    """Merge contiguous axes (length, stride) into the unit; return the remaining axes and the unit."""
    left = sorted(axes, key=lambda axis: -axis[1])
    while left and left[-1][1] == unit:
        unit *= left.pop()[0]
    return left, unit


def _wide(memory: torch.Tensor, sizes: list[int], strides: list[int], start: int) -> torch.Tensor:
    """Return a strided view of bytes in the widest words that its alignment allows: a copy costs by the word."""
    import torch

    words: list[tuple[torch.dtype, int]] = [(torch.int64, 8), (torch.int32, 4), (torch.int16, 2)]
    for dtype, width in words:
        if not any(n % width for n in (start, memory.data_ptr(), sizes[-1], *strides[:-1])):
            whole = memory[: len(memory) - len(memory) % width].view(dtype)
            narrow = [*sizes[:-1], sizes[-1] // width]
            return whole.as_strided(narrow, [*(s // width for s in strides[:-1]), 1], start // width)
    return memory.as_strided(sizes, strides, start)
