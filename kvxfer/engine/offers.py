"""Requests that offer their KV to other engines, from their arrival to the end of the offer."""

from __future__ import annotations

from kvxfer.engine.notices import Notices
from kvxfer.engine.offered import OfferedBlocks
from kvxfer.geometry.tables import TableCheck
from kvxfer.identity import Source, TransferId
from kvxfer.schedule import OfferSchedule
from kvxfer.ticket import Ticket
from kvxfer.values import BlockTable

__all__ = ["Offers"]


class Offers:
    """The requests that offer; one thread. Calls about any other request do nothing."""

    def __init__(self, schedule: OfferSchedule, blocks: OfferedBlocks, tables: TableCheck, notices: Notices) -> None:
        self._schedule, self._blocks, self._tables, self._notices = schedule, blocks, tables, notices
        # What each running request offers, which may be over before it; None if an earlier one of its name holds blocks.
        self._transfers: dict[str, tuple[TransferId | None, bytes]] = {}
        self._over: list[TransferId] = []  # those that were, which the workers have to hear of

    def arrive(
        self, request: str, transfer: TransferId, digest: bytes, tokens: int, consumers: int, stops: bool, answer: str
    ) -> bool:
        """Accept an offer; see ``SchedulerSide.offer``."""
        if request in self._blocks.held:
            self._transfers.setdefault(request, (None, b""))
            return False
        taken = self._schedule.arrive(request, transfer, digest, tokens, consumers, stops, answer)
        if taken:
            self._transfers[request] = transfer, digest
            self._notices.offered(transfer, digest)
        return taken

    def ticket(self, request: str, source: Source) -> Ticket | None:
        """Return what a consumer of this request's offer must be told; see ``SchedulerSide.ticket``."""
        held = self._blocks.held.get(request)
        transfer, digest = self._transfers.get(request) or (held, self._schedule.digest(held) if held else b"")
        return Ticket(transfer, digest, source) if transfer and self._schedule.offers(transfer, digest) else None

    def runs(self, request: str, computed: int, scheduled: int, table: BlockTable) -> None:
        """Record that the request runs in this step; see ``SchedulerSide.runs``."""
        if request not in self._schedule:
            return
        self._tables.check("table", table)
        for g, group in enumerate(self._tables.groups):
            if group.kind == "full":
                self._tables.lists("table", table, g, 0, min(computed + scheduled, self._schedule.total(request)))
        self._schedule.check(request, computed + scheduled, table)
        transfer, digest = self._transfers[request]
        assert transfer is not None
        begun = self._schedule.begun(transfer, digest)
        self._blocks.runs(request, computed, scheduled, table)
        if not begun:
            self._notices.begins(transfer, digest)

    def finished(self, request: str, table: BlockTable, complete: bool, *, found: bool, good: bool) -> bool:
        """Take in that the request is over; see ``OfferedBlocks.finished``."""
        transfer, digest = self._transfers.pop(request, (None, b""))
        if transfer is not None:
            self._notices.over(transfer, digest)
            if request not in self._schedule and transfer not in self._schedule.transfers:
                self._over.append(transfer)
        return self._blocks.finished(request, transfer, table, complete, found=found, good=good)

    def over(self) -> tuple[TransferId, ...]:
        """Return the transfers since the last call that had ended before their requests, which are over, too."""
        over, self._over = tuple(self._over), []
        return over

    def __len__(self) -> int:
        """Return how much is remembered of running requests."""
        return len(self._transfers)
