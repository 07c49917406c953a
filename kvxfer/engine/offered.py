"""The producer's blocks that others may be reading when the engine lets go of them: kept until all ranks are done with them.

- A request that ended well: the engine itself keeps its blocks until it is told to free them.
- The end of a prompt in a window: the engine gives it up while the request goes on, so it is pinned here.
- A request that is aborted: the engine frees its blocks at once, so those that were offered are pinned here.
- A request that is preempted: the engine needs its blocks, so they are not pinned; the offer is revoked instead. In an elastic
  cache they are pinned all the same, since a block that is freed there may lose its memory under a reader.
- Any of these, in an engine that writes to new blocks before its workers hear of revocations: what is offered whole is pinned
  until the step that revokes it has been given its blocks. No reader is delivered what is offered in part.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from kvxfer.engine.pins import BlockPins
from kvxfer.identity import Generation, TransferId
from kvxfer.schedule import OfferSchedule
from kvxfer.values import BlockTable, Group, Rank

__all__ = ["OfferedBlocks"]


@dataclass(slots=True)
class _Reads:
    """The blocks of a running request that others may be reading, and the offer that lists them."""

    offering: tuple[TransferId, Generation]
    blocks: set[int] = field(default_factory=set)

    @property
    def holder(self) -> Hashable:
        """Under which these blocks are pinned: not the request's name, which another may have while they still are."""
        return ("offered", *self.offering)


class OfferedBlocks:
    """Blocks that others may be reading. One thread.

    Args:
        writes_early: Whether workers may write to a step's new blocks before they know of its revocations.

    Attributes:
        elastic: Whether a block may lose its memory when it is not in use.
    """

    def __init__(
        self, schedule: OfferSchedule, pins: BlockPins, groups: Sequence[Group], ranks: int, writes_early: bool
    ) -> None:
        self._schedule, self._pins, self._ranks, self._writes_early = schedule, pins, ranks, writes_early
        self._groups = tuple(groups)
        self._windows = any(group.window for group in groups)
        self.elastic = False
        self._ends: dict[str, BlockTable] = {}  # what windows held at the end of a prompt
        self._held: dict[str, TransferId] = {}  # finished requests whose blocks the engine keeps
        self._orphans: dict[TransferId, Generation] = {}  # aborted, with blocks that may be read: the last generation
        self._done: dict[TransferId, dict[Rank, Generation]] = {}  # ranks that are done, up to which generation
        self._reads: dict[str, _Reads] = {}  # of running requests, if their offers are pinned
        self._leaving: list[Hashable] = []  # holders of blocks that the next step revokes
        # Preempted: the ranks on which it is not read any more.
        self._revoked: dict[TransferId, tuple[Generation, set[Rank]]] = {}

    def runs(self, request: str, computed: int, scheduled: int, table: BlockTable) -> None:
        """Record that the request runs in this step; see ``OfferSchedule.step``."""
        total = self._schedule.total(request)
        if computed + scheduled >= total and request not in self._ends and self._windows:
            end = table.only(_end(group, total) for group in self._groups)
            if self._pins.keep(request, end.ids()):
                self._ends[request] = end
        self._schedule.step(request, computed, scheduled, table, self._ends.get(request))
        if self.elastic or self._writes_early:
            self._pin(request)

    def _pin(self, request: str) -> None:
        """Pin the blocks that are new in a running request's offer."""
        offering = self._schedule.offering(request)
        if request in self._reads and self._reads[request].offering != offering:
            self._hold_revoked(request)  # preempted without a call of ``preempted``
            self._drop_reads(request)
        if offering is None or not (self.elastic or self._schedule.whole(request)):
            return
        reads = self._reads.get(request, _Reads(offering))
        new = set(self._schedule.offered(request).ids()) - reads.blocks
        if new and self._pins.keep(reads.holder, new):
            reads.blocks |= new
            self._reads[request] = reads

    def preempted(self, request: str) -> None:
        """Record that the engine has taken the request's blocks away. Those that were offered are revoked."""
        self._hold_revoked(request)
        self._drop_reads(request)
        if self._ends.pop(request, None) is not None:
            self._pins.drop(request)

    def _hold_revoked(self, request: str) -> None:
        """Keep the pinned blocks of a request's offer, if they are elastic, until all ranks have said that nobody reads them."""
        reads = self._reads.get(request)
        if reads is None or not self.elastic:
            return
        transfer, generation = reads.offering
        if self._pins.quarantine(("revoked", transfer), reads.blocks):
            done = self._done.get(transfer, {})
            self._revoked[transfer] = generation, {rank for rank, until in done.items() if until >= generation}

    def _drop_reads(self, request: str) -> None:
        """Unpin the blocks of a request's offer, which are not read any more or are kept in another way."""
        reads = self._reads.pop(request, None)
        if reads is not None:
            self._pins.drop(reads.holder)

    def __contains__(self, request: str) -> bool:
        """Return whether blocks of this running request are pinned, though its offer may be over."""
        return request in self._ends or request in self._reads

    def revoked(self, transfer: TransferId, ranks: Mapping[Rank, Generation]) -> None:
        """Record that nobody reads from some ranks any more what was offered of a transfer, up to a generation."""
        if transfer in self._revoked:
            generation, quiet = self._revoked[transfer]
            quiet.update(rank for rank, until in ranks.items() if until >= generation)
            if len(quiet) >= self._ranks:
                del self._revoked[transfer]
                self._pins.drop(("revoked", transfer))

    def finished(
        self, request: str, transfer: TransferId | None, table: BlockTable, complete: bool, *, found: bool, good: bool
    ) -> bool:
        """Record that the request is over, with this block table at its end; return whether the engine must keep its blocks.

        ``complete``: it ended normally and its KV is good. ``good``: what it has offered is good although it is not complete.
        ``found``: other engines can find these ranks, so that somebody may be reading.
        """
        end = self._ends.pop(request, None)
        offered = self._schedule.offered(request).ids()
        elastic = self.elastic and request in self._reads
        last = self._schedule.offering(request)  # which the revocation is about, if it is not held
        kept = not complete and found and not elastic and self._quarantine(transfer, offered)
        held = self._schedule.finish(request, table if end is None else table.filled(end), complete, kept and good)
        if transfer is None:
            return held
        if held:
            self._held[request] = transfer
            self._drop_reads(request)
            return True
        if elastic:
            self._hold_revoked(request)
        elif last is not None and (kept or (complete and found and self._quarantine(transfer, offered))):
            self._orphans[transfer] = last[1]  # at once, since ranks that are done with it already do not say so again
        if request in self._reads:
            self._leaving.append(self._reads.pop(request).holder)
        self._pins.drop(request)  # last, since only blocks that are still in use can be pinned
        return False

    def _quarantine(self, transfer: TransferId | None, blocks: tuple[int, ...]) -> bool:
        """Keep blocks that others may be reading; return whether they are kept."""
        return transfer is not None and bool(blocks) and self._pins.quarantine(transfer, blocks)

    def shipped(self) -> None:
        """Record that what is revoked so far goes to the workers with a step, which has its blocks."""
        while self._leaving:
            self._pins.drop(self._leaving.pop())

    def released(self, transfer: TransferId, ranks: dict[Rank, Generation]) -> str | None:
        """Record that some ranks are done with an offer, up to a generation; return a held request that may be freed."""
        self.revoked(transfer, ranks)
        done = self._done.setdefault(transfer, {})
        for rank, generation in ranks.items():
            done[rank] = max(generation, done.get(rank, generation))
        if len(done) < self._ranks:
            return None
        reached = min(done.values())
        if transfer in self._orphans and reached >= self._orphans[transfer]:
            del self._orphans[transfer]
            self._pins.drop(transfer)
        for running, reads in list(self._reads.items()):
            if reads.offering[0] == transfer and reads.offering[1] <= reached:
                self._drop_reads(running)
        request = self._schedule.released(transfer, reached)
        if request is not None:
            del self._held[request]
            self._pins.drop(request)
        if request is not None or len(set(done.values())) == 1:
            del self._done[transfer]  # else a rank spoke of an earlier request with this id, and will speak again
        return request

    def freed(self, request: str) -> None:
        """Record that the engine frees a held request, on its own authority: nobody may be reading its blocks any more."""
        transfer = self._held.pop(request, None)
        if transfer is not None:
            self._schedule.released(transfer, sys.maxsize)
            self._pins.drop(request)

    @property
    def held(self) -> Mapping[str, TransferId]:
        """The finished requests whose blocks the engine keeps for others, with their transfers; the oldest first."""
        return self._held

    @property
    def waiting(self) -> bool:
        """Whether blocks are pinned for requests that the engine may have forgotten."""
        return bool(self._orphans or self._revoked or self._leaving)

    def __len__(self) -> int:
        """Return how much is remembered."""
        read = len(self._reads) + len(self._revoked) + len(self._leaving)
        return len(self._ends) + len(self._held) + len(self._orphans) + len(self._done) + read


def _end(group: Group, total: int) -> tuple[int, int]:
    """Return the positions of the blocks that the last prompt token attends to in a window.

    A consumer computes that token itself and so needs all of them, but the engine gives up the first with that token.
    """
    return (max(0, total - group.window) // group.block_tokens, group.blocks(total)) if group.window else (0, 0)
