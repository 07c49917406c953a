"""Offers whose content is not complete yet, each behind its fence. Used by the control thread only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvxfer.identity import TransferId
from kvxfer.session.values import Offered
from kvxfer.transport import Fence

__all__ = ["Fences"]


class Fences:
    """Keeps a transfer's offers in order: none overtakes an earlier one, whatever their fences say."""

    def __init__(self) -> None:
        self._held: dict[TransferId, deque[tuple[Offered, Fence | None]]] = {}

    def hold(self, offer: Offered, after: Fence | None) -> bool:
        """Keep an offer back; false when there is no need to."""
        line = self._held.get(offer.transfer)
        if line is None:
            if after is None or after.passed():
                return False
            line = self._held[offer.transfer] = deque()
        line.append((offer, after))
        return True

    def forget(self, transfer: TransferId, generation: int) -> None:
        """Offers up to this generation are void."""
        kept = deque((o, f) for o, f in self._held.pop(transfer, ()) if o.generation > generation)
        if kept:
            self._held[transfer] = kept

    def passed(self) -> Iterator[tuple[Offered, str | None]]:
        """Take out the offers whose fence has passed, or failed with an error."""
        for transfer, line in list(self._held.items()):
            while line:
                offer, fence = line[0]
                error = None
                try:
                    if fence is not None and not fence.passed():
                        break
                except Exception as e:
                    error = str(e) or type(e).__name__
                line.popleft()
                yield offer, error
            if not line and self._held.get(transfer) is line:
                del self._held[transfer]

    def __len__(self) -> int:
        return len(self._held)
