"""The order in which blocks are released if a transfer is offered again after its end."""

from __future__ import annotations

from kvxfer.identity import TransferId
from kvxfer.protocol.offer_record import OfferRecord
from kvxfer.protocol.values import Action

__all__ = ["Releases"]


class Releases:
    """Keeps the releases of each transfer in order.

    A transfer may be offered again, in the same blocks, while something of its earlier offer still moves. So a record is
    released only after the transfer's earlier one: "nothing touches these blocks any more" must be true of all its offers.
    """

    def __init__(self) -> None:
        self._held: dict[TransferId, OfferRecord] = {}  # the newest that has ended and is not released

    def follow(self, h: OfferRecord) -> None:
        """Record a new record, which waits for the transfer's earlier one."""
        if self._held and (before := self._held.get(h.transfer)) is not None:
            h.before, before.follower = before, h

    def __contains__(self, transfer: TransferId) -> bool:
        """Return whether something of this transfer has ended and is not released."""
        return transfer in self._held

    def of(self, h: OfferRecord) -> list[Action]:
        """Return what can be released of a record, and of those that waited for it. Call it whenever less of it moves."""
        if h.outcome is None:
            return [] if h.before is not None or h.revoked is None else h.released_generation()
        if h.serves or h.before is not None:
            self._held[h.transfer] = h
            return []
        out = h.released()
        if self._held and self._held.get(h.transfer) is h:
            del self._held[h.transfer]
        if h.follower is not None:
            h.follower.before = None
            out += self.of(h.follower)
        return out
