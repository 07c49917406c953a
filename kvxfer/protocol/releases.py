"""In which order an engine hears that blocks are released, where a transfer is offered anew after its end."""

from __future__ import annotations

from kvxfer.identity import TransferId
from kvxfer.protocol.offer_record import OfferRecord
from kvxfer.protocol.values import Action

__all__ = ["Releases"]


class Releases:
    """A transfer may be offered again while something of what has ended still moves, and in the same blocks.

    So a record is released after the one that its transfer had before: "nothing touches these blocks any more" is true of all
    that the transfer has had, not of the last offer alone.
    """

    def __init__(self) -> None:
        self._held: dict[TransferId, OfferRecord] = {}  # the newest that has ended and is not released

    def follow(self, h: OfferRecord) -> None:
        """Take in a new record, which waits for what its transfer had before."""
        if self._held and (before := self._held.get(h.transfer)) is not None:
            h.before, before.follower = before, h

    def __contains__(self, transfer: TransferId) -> bool:
        """Return whether a release of this transfer is still to come, of what has ended."""
        return transfer in self._held

    def of(self, h: OfferRecord) -> list[Action]:
        """Return what can be released of a record, and of those that have waited for it. Call it whenever less of it moves."""
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
