"""From a batch, in flat offsets, to launches of the kernel, in addresses."""

from __future__ import annotations

from collections.abc import Iterator

from kvxfer.backend.memories import Memories
from kvxfer.block_table import Ints
from kvxfer.errors import TransportError
from kvxfer.geometry import StridedCopy
from kvxfer.geometry.strided_copy import materialise
from kvxfer.transport import Batch, PlanBatch, Verb
from kvxfer_cuda_ipc.tables import Launch, Placement, of_runs, of_strided_copy

MAX_PLACEMENTS = 512


class Lowering:
    """For one link and one of our GPUs. ``remote``: the peer's memories where that GPU reaches them.

    A plan's patterns come again with every request, so their rows are placed once and then stay on the device.
    """

    def __init__(self, local: Memories, remote: Memories, peer: str) -> None:
        self._local, self._remote, self._peer = local, remote, peer
        self._placements: dict[tuple[object, ...], Placement] = {}

    def launches(self, batch: Batch | PlanBatch) -> Iterator[Launch]:
        """Yield what is to be launched for a batch.

        Raises:
            TransportError: What lies outside the memories.
        """
        if isinstance(batch, PlanBatch):
            for strided in batch.plan.copies:
                if len(strided.counts):
                    yield from self._of_strided_copy(batch, strided)
            return
        if batch.remote_offsets is None:
            raise TransportError("a read or write needs offsets in the peer's memory, or a plan")
        yield from self._of_runs(batch, batch.local_offsets, batch.remote_offsets, batch.lengths)

    def _of_runs(self, batch: Batch | PlanBatch, local: Ints, remote: Ints, lengths: Ints) -> Iterator[Launch]:
        here = self._local.addresses(batch.local, local, lengths)
        try:
            there = self._remote.addresses(batch.remote, remote, lengths)
        except TransportError as e:
            raise TransportError(f"at {self._peer}: {e}") from None
        yield from of_runs(there, here, lengths) if batch.verb is Verb.READ else of_runs(here, there, lengths)

    def _of_strided_copy(self, batch: PlanBatch, strided: StridedCopy) -> Iterator[Launch]:
        pattern, incoming = strided.pattern, batch.verb is Verb.READ
        cells = pattern.src_cells.tobytes(), pattern.dst_cells.tobytes()
        key = batch.local, batch.remote, incoming, pattern.unit, pattern.axes, *cells
        placement = self._placements.get(key)
        if placement is None or not placement.holds(strided):
            placement = self._place(batch, strided)
            if placement is None or not placement.holds(strided):
                # Segments in several regions (or outside, which is found out here).
                runs = materialise([strided])
                local, remote = (runs.dst, runs.src) if incoming else (runs.src, runs.dst)
                yield from self._of_runs(batch, local, remote, runs.length)
                return
            if len(self._placements) >= MAX_PLACEMENTS:
                self._placements.clear()
            self._placements[key] = placement
        yield from of_strided_copy(strided, placement)

    def _place(self, batch: PlanBatch, strided: StridedCopy) -> Placement | None:
        here = self._local.regions(batch.local)
        there = self._remote.regions(batch.remote) if batch.remote in self._remote else ()
        src, dst = (there, here) if batch.verb is Verb.READ else (here, there)
        return Placement.of(strided.pattern, src, dst, int(strided.src_at.min()), int(strided.dst_at.min()))
