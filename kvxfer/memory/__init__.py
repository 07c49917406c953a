"""numpy, torch and CUDA behind one small face (first version, CPU only)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from kvxfer.geometry import CopyPlan, Region
from kvxfer.geometry.cache import flat_starts


class Done:
    event = None

    def passed(self) -> bool:
        return True


@dataclass
class Buffer:
    region: Region
    storage: object


def allocate(nbytes: int, device: str = "cpu", *, pinned: bool = False) -> Buffer:
    a = np.zeros(nbytes, np.uint8)
    return Buffer(Region(a.ctypes.data, nbytes), a)


class Space:
    def __init__(self, regions: tuple[Region, ...]) -> None:
        self._starts = flat_starts(regions)
        self._regions = regions

    def _addr(self, off: int) -> int:
        i = int(np.searchsorted(self._starts, off, side="right")) - 1
        return self._regions[i].address + off - self._starts[i]

    def _each(self, plan: CopyPlan):
        at = 0
        for s in plan.sheets:
            base, pitch = s.stream()
            for k in range(len(s.counts)):
                for r in range(len(s.template)):
                    yield (int(s.src_rows[r] + s.src_at[k]), int(s.dst_rows[r] + s.dst_at[k]),
                           int(at + base[k] + r * pitch[k]), int(pitch[k]))
            at += s.nbytes

    def pack(self, plan: CopyPlan, buffer: Buffer, offset: int) -> Done:
        for s, _, o, n in self._each(plan):
            ctypes.memmove(buffer.region.address + offset + o, self._addr(s), n)
        return Done()

    def unpack(self, plan: CopyPlan, buffer: Buffer, offset: int) -> Done:
        for _, d, o, n in self._each(plan):
            ctypes.memmove(self._addr(d), buffer.region.address + offset + o, n)
        return Done()


def space(regions: tuple[Region, ...]) -> Space:
    return Space(regions)


def fence(device: str) -> Done:
    return Done()
