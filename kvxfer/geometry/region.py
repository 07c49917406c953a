"""Regions of memory, and the flat offset space in which a cache's regions lie."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from kvxfer import arguments
from kvxfer.geometry.tensor import HOST, read_tensor

GAP = 4096
"""Bytes between two regions in the flat offset space, so that no run can span both."""


class Region(msgspec.Struct, frozen=True, dict=True):
    """One piece of registered memory.

    A region made from numbers keeps no memory alive. Make it from a tensor with ``of``, or the whole cache with
    ``Cache.of_tensors``, to keep the tensor alive with it.

    Attributes:
        address: First byte, a virtual address of the owner's process; or a handle, if the device's space says so
            (``kvxfer.memory.Space``).
        nbytes: Size in bytes.
        device: ``"cpu"``, or a kind of device and a number, as ``"cuda:0"``. The number is the owner's process's.
        elastic: Whether its pages may be unmapped, and others mapped in their place, while it is registered.

    Raises:
        ArgumentError: An argument has the wrong type.
    """

    address: int
    nbytes: int
    device: str = HOST
    elastic: bool = False

    def __post_init__(self) -> None:
        take_integers(self, "address", "nbytes")
        arguments.string("device", self.device)

    @classmethod
    def of(cls, tensor: Any) -> Region:
        """Return the memory of a tensor (see ``Cache.of_tensors``) as a region, which keeps the tensor alive.

        Raises:
            ArgumentError: ``tensor`` is not a tensor, is empty, or cannot be written.
        """
        found = read_tensor(tensor, "tensor")
        return cls(found.address, found.nbytes, found.device).kept_by(found.owner)

    def kept_by(self, owner: object) -> Region:
        """Keep ``owner``, whose memory this is, alive as long as this region; return the region."""
        self.__dict__["owner"] = owner  # no part of its value
        return self

    @property
    def owner(self) -> Any:
        """What this region keeps alive: a tensor, or a tuple of those that share its bytes; ``None`` if nothing."""
        return self.__dict__.get("owner")

    @property
    def kind(self) -> str:
        """The kind of its device, without the number."""
        return self.device.partition(":")[0]


def flat_starts(regions: tuple[Region, ...]) -> tuple[int, ...]:
    """Return the flat offset of each region.

    Each region takes its size, rounded up to ``GAP``, and one ``GAP`` after it.
    """
    steps = [-(-r.nbytes // GAP) * GAP + GAP for r in regions]
    return tuple(accumulate([0, *steps[:-1]])) if steps else ()


def take_integers(value: msgspec.Struct, *names: str) -> None:
    """Turn these fields of a frozen value into integers.

    Raises:
        ArgumentError: One is none.
    """
    for name in names:
        found = getattr(value, name)
        if type(found) is not int:
            force_setattr(value, name, arguments.integer(name, found))
