"""Registered memory by number, and flat offsets turned into addresses, for every back end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvxfer.block_table import Ints
from kvxfer.errors import TransportError
from kvxfer.geometry.region import Region, flat_starts
from kvxfer.geometry.tensor import HOST

__all__ = ["Memories"]


class Memories:
    """The registered memories of one side, numbered 0, 1, 2 ... Numbers are never reused. One thread at a time.

    Attributes:
        next: The number that the next memory will get.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[Region, ...], Ints, Ints, Ints]] = {}
        self._spans: dict[int, list[tuple[int, int, int]]] = {}
        self.next = 0

    @staticmethod
    def check(regions: Sequence[Region], devices: frozenset[str] = frozenset({HOST})) -> None:
        """Check a list of regions, which may be empty.

        Raises:
            TransportError: A region's address or size is not positive, two overlap, or a kind of device is not in ``devices``.
        """
        for r in regions:
            if r.address <= 0 or r.nbytes <= 0:
                raise TransportError(f"{r} is not a piece of memory: address and size must be positive")
            if r.kind not in devices:
                raise TransportError(f"{r} lies on {r.device!r}; this back end moves {', '.join(sorted(devices))}")
        by_address = sorted(regions, key=lambda r: (r.device, r.address))
        for a, b in zip(by_address, by_address[1:], strict=False):
            if a.device == b.device and a.address + a.nbytes > b.address:
                raise TransportError(f"{a} and {b} overlap")

    def add(self, regions: Sequence[Region], devices: frozenset[str] = frozenset({HOST})) -> int:
        """Check a list of regions, add it, and return its number.

        Raises:
            TransportError: ``check`` refuses it.
        """
        self.check(regions, devices)
        kept = tuple(regions)
        starts = np.array(flat_starts(kept), np.int64)
        sizes = np.array([r.nbytes for r in kept], np.int64)
        # Addresses are below 2**63 on every platform that matters, and the difference may be negative.
        shift = np.array([r.address for r in kept], np.int64) - starts
        number, self.next = self.next, self.next + 1
        self._known[number] = (kept, starts, starts + sizes, shift)
        self._spans[number] = [(s, s + r.nbytes, r.address) for s, r in zip(starts.tolist(), kept, strict=True)]
        return number

    def remove(self, memory: int) -> tuple[Region, ...]:
        """Forget a memory and return its regions.

        Raises:
            TransportError: The number is unknown.
        """
        if memory not in self._known:
            raise TransportError(f"memory {memory} is not registered")
        del self._spans[memory]
        return self._known.pop(memory)[0]

    def __contains__(self, memory: int) -> bool:
        return memory in self._known

    def __iter__(self) -> Iterator[int]:
        return iter(self._known)

    def regions(self, memory: int) -> tuple[Region, ...]:
        if memory not in self._known:
            raise TransportError(f"memory {memory} is not registered")
        return self._known[memory][0]

    def only(self, memory: int, offsets: Ints, lengths: Ints) -> tuple[int, int] | None:
        """Return (address, bytes) if there is one run, not empty and inside a region, as for staging memory; else ``None``.

        It does without numpy, which takes 0.2 ms for it while the processor's caches are full of moved bytes.
        """
        if len(offsets) != 1 or len(lengths) != 1:
            return None
        offset, nbytes = int(offsets[0]), int(lengths[0])
        for start, end, address in self._spans.get(memory, ()):
            if start <= offset and 0 < nbytes <= end - offset:
                return address + offset - start, nbytes
        return None

    def runs(self, memory: int, offsets: Ints, lengths: Ints) -> list[tuple[int, int]]:
        """Return the address and length in bytes of each run that is not empty.

        Raises:
            TransportError: See ``addresses``.
        """
        only = self.only(memory, offsets, lengths)
        if only is not None:
            return [only]
        addresses = self.addresses(memory, offsets, lengths)
        return [(at, n) for at, n in zip(addresses.tolist(), np.asarray(lengths, np.int64).tolist(), strict=True) if n]

    def addresses(self, memory: int, offsets: Ints, lengths: Ints) -> Ints:
        """Return the address of each run, int64 ``[n]``.

        Raises:
            TransportError: The memory is unknown, the arrays differ in shape, or a run is not inside one
                region.
        """
        if memory not in self._known:
            raise TransportError(f"memory {memory} is not registered")
        _, starts, ends, shift = self._known[memory]
        offsets, lengths = np.asarray(offsets, np.int64), np.asarray(lengths, np.int64)
        if offsets.ndim != 1 or offsets.shape != lengths.shape:
            raise TransportError(f"{offsets.shape} offsets and {lengths.shape} lengths: each run needs one of each")
        if not len(offsets):
            return offsets
        if not len(starts):
            raise TransportError(f"memory {memory} has no regions")
        # The first region starts at 0, so that only what is negative lies before it.
        at = np.maximum(starts.searchsorted(offsets, side="right") - 1, 0) if len(starts) > 1 else 0
        # Compared as a difference: offset + length could overflow.
        room = ends[at] - offsets
        if int((offsets | lengths).min()) < 0 or (lengths > room).any():
            i = int(np.argmax((offsets < 0) | (lengths < 0) | (lengths > room)))
            raise TransportError(
                f"run {i} (offset {int(offsets[i])}, {int(lengths[i])} bytes) is outside the regions of memory {memory}"
            )
        return np.asarray(offsets + shift[at])
