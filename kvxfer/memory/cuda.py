"""CUDA memory, with torch: a Triton kernel where Triton is, strided torch copies elsewhere. All work runs on a
low-priority stream of the space's own, so that it waits for nothing but its fences and delays the model little."""

from __future__ import annotations

from functools import reduce
from math import gcd
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from kvxfer.errors import KvxferError
from kvxfer.geometry import CopyPlan, Region, Sheet, Template
from kvxfer.memory.cpu import CpuSpace, even
from kvxfer.memory.fence import CudaEvent, Fence
from kvxfer.memory.space import Checksum, Side, Space, grids

__all__ = ["CudaSpace", "allocate"]

try:
    from kvxfer.memory.triton_kernels import move_rows
except ImportError:  # no Triton: slower, not less
    move_rows = None

PROGRAMS_PER_SM = 8


class CudaSpace(Space):
    """Memory of one device. ``owner`` is kept alive with the space."""

    def __init__(self, regions: tuple[Region, ...], device: str, owner: object = None) -> None:
        super().__init__(regions, device)
        self.owner = owner
        self._device = torch.device(device)
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(priority=0)
            self._sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._cells: WeakKeyDictionary[Template, dict[Side, tuple[Any, int]]] = WeakKeyDictionary()

    def pack(self, plan: CopyPlan, out: Space, at: int = 0, after: Fence | None = None) -> Fence:
        return self._move(plan, "source", out, at, after)

    def unpack(self, plan: CopyPlan, staged: Space, at: int = 0, after: Fence | None = None) -> Fence:
        return self._move(plan, "destination", staged, at, after)

    def checksum(self, plan: CopyPlan, side: Side, after: Fence | None = None) -> Checksum:
        raise KvxferError(f"checksums of {self.device} memory are not computed by this release; set integrity to off")

    def _move(self, plan: CopyPlan, side: Side, packed: Space, at: int, after: Fence | None) -> Fence:
        region, offset = packed.locate(at, plan.nbytes)
        stream_at = packed.regions[region].address + offset
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if after is not None and after.event is not None:
                self._stream.wait_event(after.event)
            for sheet in plan.sheets:
                if move_rows is not None:
                    self._by_kernel(sheet, side, stream_at)
                else:
                    self._by_torch(sheet, side, stream_at)
                stream_at += sheet.nbytes
            return CudaEvent(self._stream.record_event())

    def _by_kernel(self, sheet: Sheet, side: Side, stream_at: int) -> None:
        template = sheet.template
        cells, grain = self._addresses(template, side)
        places = sheet.src_at if side == "source" else sheet.dst_at
        base, size = sheet.stream()
        grain = gcd(grain, stream_at, int(np.gcd.reduce(places)), int(np.gcd.reduce(base)), int(np.gcd.reduce(size)))
        word = gcd(grain, 8)
        table = torch.from_numpy(np.stack([places, base, size // word])).to(self._device, non_blocking=True)
        axes = [(n, s if side == "source" else d) for n, s, d in template.axes]
        axes = [(1, 0)] * (2 - len(axes)) + axes
        (n1, stride1), (n2, stride2) = axes
        rows, longest = len(template), int(size.max()) // word
        words = min(1024, 1 << max(0, longest - 1).bit_length())
        together = max(1, min(1024 // words, 1 << (rows - 1).bit_length()))
        jobs = len(places) * -(-rows // together)
        move_rows[(min(jobs, self._sms * PROGRAMS_PER_SM),)](
            cells, table, stream_at, len(places), rows, n1, stride1, n2, stride2,
            WORD=word, ROWS=together, WORDS=words, ALIGNED=grain % 16 == 0, PACK=side == "source", num_warps=4,
        )  # fmt: skip

    def _addresses(self, template: Template, side: Side) -> tuple[Any, int]:
        """Absolute address of each cell, on the device, and what all addresses and strides are multiples of."""
        sides = self._cells.setdefault(template, {})
        if side not in sides:
            at = template.src_cells if side == "source" else template.dst_cells
            region = self.of_cells(at)
            moved = np.array([r.address - s for r, s in zip(self.regions, self.starts, strict=True)], np.int64)
            absolute = at + moved[region]
            strides = [s if side == "source" else d for _, s, d in template.axes]
            grain = reduce(gcd, [int(np.gcd.reduce(absolute)), template.unit, *strides])
            sides[side] = torch.from_numpy(absolute).to(self._device), grain
        return sides[side]

    def _by_torch(self, sheet: Sheet, side: Side, stream_at: int) -> None:
        template = sheet.template
        places = (sheet.src_at if side == "source" else sheet.dst_at).tolist()
        base, size = (x.tolist() for x in sheet.stream())
        for g in grids(self, template, side):
            memory = wrap(self.regions[g.region].address, self.regions[g.region].nbytes, self.device)
            for lo, hi, step in even(places, size):
                n, row = hi - lo, size[lo]
                here = memory.as_strided((n, *g.shape, row), (step or 1, *g.strides, 1), g.offset + places[lo])
                inner = [row * int(np.prod(g.shape[i + 1 :])) for i in range(len(g.shape))]
                total = row * len(template) * n
                whole = wrap(stream_at + base[lo], total, self.device)
                there = whole.as_strided((n, *g.shape, row), (row * len(template), *inner, 1), row * g.first)
                if side == "source":
                    there.copy_(here)
                else:
                    here.copy_(there)


class _Raw:
    """A piece of memory for ``torch.as_tensor``, by the CUDA array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def wrap(address: int, nbytes: int, device: str) -> Any:
    """uint8 tensor over memory that somebody else owns."""
    return torch.as_tensor(_Raw(address, nbytes), device=device)


def allocate(nbytes: int, device: str) -> Space:
    """Device memory, or pinned host memory (``device`` "cpu"), which kernels address as it is."""
    try:
        if device == "cpu":
            pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
            return CpuSpace((Region(pinned.data_ptr(), nbytes),), pinned)
        with torch.cuda.device(torch.device(device)):
            held = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            torch.cuda.synchronize()
        return CudaSpace((Region(held.data_ptr(), nbytes, device),), device, held)
    except RuntimeError as e:
        raise KvxferError(f"cannot allocate {nbytes} bytes of staging for {device}: {e}") from e

