"""Torch's CPU memory in the role of a device whose memory nobody else can address, and the distribution that installs it.

A region of ``island:0`` has an address that is reserved and not mapped: whoever reads or writes there dies of SIGSEGV.
The tensor that holds its bytes is somewhere else, and only ``TorchSpace`` gets at it, by torch's operations.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvxfer.errors import KvxferError
from kvxfer.geometry import Region
from kvxfer.memory.torch_space import TorchSpace

DEVICE = "island:0"

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap = ctypes.CDLL(None, use_errno=True).munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Reserved:
    """Addresses at which there is no memory, for as long as the object lives."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address: int = _mmap(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if self.address in (None, ctypes.c_void_p(-1).value):
            raise KvxferError(f"cannot allocate {nbytes} bytes of addresses")

    def __del__(self) -> None:
        _munmap(self.address, self.nbytes)


class IslandSpace(TorchSpace):
    """``TorchSpace`` on the island; it only says which devices there are, and how memory is allocated there."""

    @classmethod
    def devices(cls, kind: str) -> Sequence[str]:
        return [DEVICE]

    @classmethod
    def allocate(cls, nbytes: int, device: str) -> IslandSpace:
        try:
            return cls((region_of(torch.zeros(nbytes, dtype=torch.uint8)),), device)
        except RuntimeError as e:
            raise KvxferError(f"cannot allocate {nbytes} bytes for {device}: {e}") from e


def region_of(tensor: Any) -> Region:
    """Return a tensor of the CPU as memory of the island."""
    hidden = Reserved(tensor.untyped_storage().nbytes())
    region = Region(hidden.address, tensor.nbytes, DEVICE).kept_by(tensor)
    region.__dict__["hidden"] = hidden
    return region


def install(folder: Path, kind: str, target: str) -> Path:
    """Write the metadata of a distribution that has a space for a kind of device; return the folder to put on the path."""
    name = f"space_for_{kind}_{folder.name}"
    info = folder / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[kvxfer.spaces]\n{kind} = {target}\n")
    return folder
