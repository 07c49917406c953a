"""Offers whose content is not complete yet, each behind its fence. Used by the control thread only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvxfer.identity import TransferId
from kvxfer.transport import Fence
from kvxfer.values import Offer

__all__ = ["Fences"]


class Fences:
    """The offers that wait for their fences, those of each transfer in order.

    No offer overtakes an earlier one of its transfer, whatever their fences say.
    """

    def __init__(self) -> None:
        self._held: dict[TransferId, deque[tuple[Offer, Fence | None, float]]] = {}
        self._closed = False

    def hold(self, offer: Offer, after: Fence | None, called: float) -> bool:
        """Keep an offer back until its fence has passed; return false when there is no need to.

        Args:
            offer: The offer.
            after: Its fence, if it has one.
            called: When it was made, by ``time.monotonic``.
        """
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
        """Take out the offers whose fence has passed, or failed with an error; with the time when they were made."""
        for transfer, line in list(self._held.items()):
            while line:
                offer, fence, called = line[0]
                found = fence is None or _look(fence)
                if found is False:
                    break
                line.popleft()
                yield offer, called, None if found is True else found
            if not line and self._held.get(transfer) is line:
                del self._held[transfer]

    def close(self) -> list[tuple[Offer, float]]:
        """Take out all offers, with the times when they were made, and hold no more."""
        self._closed = True
        held, self._held = self._held, {}
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
