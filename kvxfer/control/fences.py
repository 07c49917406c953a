"""Offers whose content is not complete yet, each behind its fence. Used by the control thread only."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator

from kvxfer.identity import TransferId
from kvxfer.transport import Fence
from kvxfer.values import Offer

__all__ = ["Fences"]

LOOKS = 16
"""Fences that are asked in vain in a turn: each is a call of the engine's, or of a device's."""
SLICE_S = 0.002
"""What a turn spends on offers whose fence has passed: those of a step have one together."""


class Fences:
    """The offers that wait for their fences, those of each transfer in order.

    No offer overtakes an earlier one of its transfer, whatever their fences say. Of many transfers, each has its turn.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[TransferId, deque[tuple[Offer, Fence | None, float]]] = OrderedDict()
        self._closed = False

    def hold(self, offer: Offer, after: Fence | None, called: float) -> bool:
        """Keep an offer, ``called`` at that time, back until its fence has passed; return false when there is no need to."""
        line = self._held.get(offer.transfer)
        if line is None:
            if self._closed or after is None or _look(after) is True:
                return False
            line = self._held[offer.transfer] = deque()
        line.append((offer, after, called))
        return True

    def forget(self, transfer: TransferId, generation: int) -> None:
        """Drop a transfer's offers up to this generation: they are void."""
        kept = deque(held for held in self._held.pop(transfer, ()) if held[0].generation > generation)
        if kept:
            self._held[transfer] = kept

    def passed(self) -> Iterator[tuple[Offer, float, str | None]]:
        """Take out the offers whose fence has passed, or failed with an error; with the time when they were made.

        Only some are looked at, the others in their turn the next time.
        """
        until, looks = time.monotonic() + SLICE_S, min(LOOKS, len(self._held))
        while self._held and looks and time.monotonic() < until:
            transfer = next(iter(self._held))
            offer, fence, called = self._held[transfer][0]
            found = fence is None or _look(fence)
            if found is False:
                self._held.move_to_end(transfer)
                looks -= 1
            else:
                self._drop_first(transfer)
                yield offer, called, None if found is True else found

    def _drop_first(self, transfer: TransferId) -> None:
        line = self._held[transfer]
        line.popleft()
        if not line:
            del self._held[transfer]

    def close(self) -> list[tuple[Offer, float]]:
        """Take out all offers, with the times when they were made, and hold no more."""
        self._closed = True
        held, self._held = self._held, OrderedDict()
        return [(offer, called) for line in held.values() for offer, _, called in line]

    def __len__(self) -> int:
        return len(self._held)


def _look(fence: Fence) -> bool | str:
    """Return whether a fence has passed, or the error that its check failed with.

    The check is the engine's code, so anything may be raised.
    """
    try:
        return bool(fence.passed())
    except BaseException as e:
        return str(e) or type(e).__name__
