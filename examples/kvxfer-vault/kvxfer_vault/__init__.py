"""Memory of devices ``vault:N`` for kvxfer: numpy arrays behind a lock, which stand for a device with a library of its own."""

# --8<-- [start:space]
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvxfer.errors import KvxferError
from kvxfer.geometry import Region
from kvxfer.memory import Space
from kvxfer_vault.device import DEVICE, Memory, memory_at

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


class VaultSpace(Space):
    """All that kvxfer needs to know of a vault."""

    contract = 1

    @classmethod
    def devices(cls, kind: str) -> Sequence[str]:
        return [DEVICE]

    @classmethod
    def allocate(cls, nbytes: int, device: str) -> "VaultSpace":
        try:
            memory = Memory(nbytes)
        except (MemoryError, ValueError) as e:
            raise KvxferError(f"cannot allocate {nbytes} bytes of {device}: {e}") from e
        return cls((Region(memory.handle, nbytes, device).kept_by(memory),), device)

    def gather(self, region: int, at: Ints, out: Bytes) -> None:
        memory, begin = memory_at(self.regions[region].address)
        with memory.opened() as content:
            for offset, row in zip((begin + at).tolist(), out, strict=True):
                row[:] = content[offset : offset + len(row)]

    def scatter(self, region: int, at: Ints, rows: Bytes) -> None:
        memory, begin = memory_at(self.regions[region].address)
        with memory.opened() as content:
            for offset, row in zip((begin + at).tolist(), rows, strict=True):
                content[offset : offset + len(row)] = row


# --8<-- [end:space]
