"""Zero the bytes of loaded blocks that the load does not write, as vLLM does for all other new blocks.

Where caches of several precisions or recurrent states share a pool (``needs_kv_cache_zeroing``), vLLM zeroes each block that
it hands out. It skips blocks that are loaded outside of its steps, because it would race with the arriving bytes, and leaves
them to the connector.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.geometry import Cache, UncoveredBytes, uncovered
from kvxfer.values import BlockTable

if TYPE_CHECKING:
    import torch

__all__ = ["Clearing", "memory_of"]


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
