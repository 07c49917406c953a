"""The producer's blocks, where vLLM lets go of them before others have: kept until all ranks have reported them quiet.

- A request that ended well: vLLM keeps its blocks itself, until its workers say that they are sent.
- The end of a prompt in a window: given up while the request goes on, so we reference it.
- A request that is aborted: freed at once, so we reference what it has offered.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvxfer.geometry import Rank
from kvxfer.identity import TransferId
from kvxfer.schedule import OfferSchedule, StepCommands
from kvxfer.values import BlockTable, Group
from kvxfer_vllm.holds import Holds

__all__ = ["Giving"]


class Giving:
    """``world``: ranks that report."""

    def __init__(self, tracker: OfferSchedule, holds: Holds, groups: Sequence[Group], world: int) -> None:
        self._tracker, self._holds, self._world = tracker, holds, world
        self._groups = tuple(groups)
        self._windows = any(group.window for group in groups)
        self._ends: dict[str, BlockTable] = {}  # what windows held at the end of a prompt
        self._held: dict[str, TransferId] = {}  # finished requests whose blocks vLLM keeps
        self._freed: list[str] = []  # those of them that it may free
        self._orphans: dict[TransferId, int] = {}  # aborted, with blocks that may still be read: the last generation
        self._quiet: dict[TransferId, dict[Rank, int]] = {}  # ranks that are done, up to which generation

    def runs(self, request: str, computed: int, scheduled: int, table: BlockTable) -> None:
        """The request runs in this step; see ``OfferSchedule.step``."""
        self._tracker.step(request, computed, scheduled, table)
        total = self._tracker.total(request)
        if computed + scheduled >= total and request not in self._ends and self._windows:
            end = table.only(_end(group, total) for group in self._groups)
            if self._holds.keep(request, end.ids()):
                self._ends[request] = end

    def preempted(self, request: str) -> None:
        """vLLM has taken the request's blocks. What of them was offered is revoked, and no longer proved to be good to
        whoever reads it; kept it is not, since vLLM needs the room."""
        if self._ends.pop(request, None) is not None:
            self._holds.drop(request)

    def finished(
        self, request: str, transfer: TransferId | None, table: BlockTable, whole: bool, *, found: bool
    ) -> bool:
        """The request is over; ``transfer``: what it offered. True: vLLM keeps its blocks. ``found``: others can find our
        ranks, so somebody may be reading."""
        end = self._ends.pop(request, None)
        offered = self._tracker.offered(request).ids()
        held = self._tracker.finish(request, table if end is None else table.filled(end), whole)
        if transfer is None:
            return held
        if held:
            self._held[request] = transfer
            return True
        self._holds.drop(request)
        if offered and found and self._holds.quarantine(transfer, offered):
            self._orphans[transfer] = sys.maxsize  # until the revocation is on its way
        return False

    def step(self, commands: StepCommands) -> tuple[str, ...]:
        """These commands go to the workers, and with them the result: held requests that vLLM may free."""
        for revoke in commands.revokes:
            if revoke.gone and revoke.transfer in self._orphans:
                self._orphans[revoke.transfer] = revoke.generation
        freed, self._freed = tuple(self._freed), []
        return freed

    def released(self, transfer: TransferId, ranks: dict[Rank, int]) -> None:
        """Some ranks are done with an offer, up to a generation."""
        done = self._quiet.setdefault(transfer, {})
        for rank, generation in ranks.items():
            done[rank] = max(generation, done.get(rank, -1))
        if len(done) < self._world:
            return
        reached = min(done.values())
        if transfer in self._orphans and reached >= self._orphans[transfer]:
            del self._orphans[transfer]
            self._holds.drop(transfer)
        request = self._tracker.released(transfer, reached)
        if request is not None:
            del self._held[request]
            self._holds.drop(request)
            self._freed.append(request)
        if request is not None or len(set(done.values())) == 1:
            del self._quiet[transfer]  # else a rank spoke of an earlier request with this id, and will speak again

    def sent(self, request: str) -> None:
        """vLLM frees a held request. If that is not our word, whoever gave it knows that nobody reads any more."""
        transfer = self._held.pop(request, None)
        if transfer is not None:
            self._tracker.released(transfer, sys.maxsize)
            self._holds.drop(request)

    @property
    def waiting(self) -> bool:
        """Whether blocks are kept of which vLLM knows no request."""
        return bool(self._orphans)

    def __len__(self) -> int:
        return sum(map(len, (self._ends, self._held, self._freed, self._orphans, self._quiet)))


def _end(group: Group, total: int) -> tuple[int, int]:
    """The positions of the blocks that the last prompt token attends to in a window. vLLM gives the first of them up with that
    token at the latest, and a consumer computes it itself."""
    return (max(0, total - group.window) // group.block_tokens, group.blocks(total)) if group.window else (0, 0)
