"""Memories of one side, and NIXL descriptors of runs in them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kvxfer.backend.memories import Memories
from kvxfer.block_table import Ints
from kvxfer.errors import TransportError
from kvxfer.geometry.region import Region
from kvxfer_nixl.agent import Side
from kvxfer_nixl.endpoint import ExportedPiece


@dataclass(frozen=True)
class _Place:
    """Where a memory lies. ``one``: its region, if it has exactly one."""

    cuda: bool
    device: int
    one: Region | None


class RegisteredSpace:
    """The memories of one side as NIXL knows them: each lies on one device."""

    def __init__(self, memories: Memories) -> None:
        self._memories = memories
        self._places: dict[int, _Place] = {}

    def add(self, memory: int, regions: Sequence[Region]) -> None:
        """Note where a memory lies.

        Raises:
            TransportError: As ``one_device`` does.
        """
        cuda, device = one_device(regions)
        self._places[memory] = _Place(cuda, device, regions[0] if len(regions) == 1 else None)

    def remove(self, memory: int) -> None:
        del self._places[memory]

    def describe(self, memories: Collection[int]) -> tuple[ExportedPiece | None, ...]:
        """For a peer that may have these: by number, ``None`` for others and for those that are gone."""
        return tuple(
            self._piece(memory) if memory in self._places and memory in memories else None
            for memory in range(max(self._places, default=-1) + 1)
        )

    @classmethod
    def of_peer(cls, pieces: Sequence[ExportedPiece | None]) -> RegisteredSpace:
        """Return the inverse of ``describe``."""
        memories = Memories()
        space = cls(memories)
        for piece in pieces:
            regions = [] if piece is None else [Region(a, n, piece.device) for a, n in piece.regions]
            memory = memories.add(regions, frozenset({"cpu", "cuda"}))
            if piece is None:
                memories.remove(memory)
            else:
                space.add(memory, regions)
        return space

    def rows(self, memory: int, offsets: Ints, lengths: Ints) -> Side:
        """Return the descriptors of runs.

        Raises:
            TransportError: The memory is unknown, or a run is not inside one region.
        """
        place = self._places.get(memory)
        table = np.empty((len(lengths), 3), np.uint64)
        if place is not None and place.one is not None and _inside(offsets, lengths, place.one.nbytes):
            np.add(offsets.view(np.uint64), np.uint64(place.one.address), out=table[:, 0])
        else:
            # The general case, and what is wrong if something is.
            table[:, 0] = self._memories.addresses(memory, offsets, lengths)
            place = self._places[memory]
        table[:, 1] = lengths
        table[:, 2] = place.device
        return place.cuda, table

    def _piece(self, memory: int) -> ExportedPiece:
        regions = self._memories.regions(memory)
        return ExportedPiece(regions[0].device if regions else "cpu", tuple((r.address, r.nbytes) for r in regions))


def _inside(offsets: Ints, lengths: Ints, nbytes: int) -> bool:
    """Whether all runs lie inside ``[0, nbytes)``. Few operations: after a long copy even numpy's code is cold."""
    if not len(lengths) or offsets.shape != lengths.shape or offsets.ndim != 1:
        return False
    # As unsigned numbers, what is negative is too large; then the sum cannot overflow.
    starts, sizes = offsets.view(np.uint64), lengths.view(np.uint64)
    most = np.maximum.reduce
    return bool(most(starts) <= nbytes and most(sizes) <= nbytes and most(starts + sizes) <= nbytes)


def one_device(regions: Sequence[Region]) -> tuple[bool, int]:
    """Return whether the regions of a memory lie on a GPU, and on which.

    Raises:
        TransportError: They lie on several devices, or on one of another kind.
    """
    found = {r.device for r in regions}
    if len(found) > 1:
        raise TransportError(f"the regions of one memory must lie on one device, not on {', '.join(sorted(found))}")
    return nixl_device(found.pop() if found else "cpu")


def nixl_device(device: str) -> tuple[bool, int]:
    """Return whether it is a GPU, and NIXL's number for it.

    Raises:
        TransportError: The name is neither a GPU's nor the host's.
    """
    kind, _, number = device.partition(":")
    if device == "cpu":
        return False, 0
    if kind == "cuda" and number.isascii() and number.isdecimal():
        return True, int(number)
    raise TransportError(f"back end 'nixl' moves memory on 'cpu' or 'cuda:N', not on {device!r}")
