"""Offers whose content is not complete yet, held until their fences pass. Used by the control thread, but for what says otherwise."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from kvxfer import clock
from kvxfer.control.stories import copied
from kvxfer.identity import Generation, TransferId
from kvxfer.transport import Fence
from kvxfer.values import Offer

LOOKS = 16
"""The most fences that are checked in vain in a turn: each check is a call into the engine or a device's driver."""
SLICE_S = 0.002
"""Seconds of a turn that are spent on offers whose fence has passed: all offers of an engine step share one fence."""


class Fences:
    """The offers that wait for their fences, in order for each transfer.

    No offer overtakes an earlier one of its transfer, whatever their fences say. The transfers take turns.

    An offer is held for ``lease`` seconds after it was made or its transfer was last renewed. A device that has
    not come so far by then has failed or hangs, and nobody would ever hear of the offer again.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._held: OrderedDict[TransferId, deque[tuple[Offer, Fence | None, float]]] = OrderedDict()
        self._renewed: dict[TransferId, float] = {}  # of those that are held
        self._cut_short, self._closed = False, False

    def due(self, awaited: Callable[[TransferId], bool]) -> float:
        """Return when to look if nothing else happens until then; 0: as soon as possible.

        That is because a consumer waits, which ``awaited`` returns of a transfer, or because the last look ended with its slice. Each look
        takes a turn of the control thread, in the interpreter of an engine that is busy with what the fences wait for. So what nobody waits
        for is looked at when the thread has something else to do.
        """
        return 0.0 if self._cut_short or any(map(awaited, self._held)) else math.inf

    def besides(self, known: Callable[[TransferId], bool]) -> int:
        """Return how many transfers have offers here and are not known otherwise. Any thread."""
        return sum(not known(transfer) for transfer in copied(self._held))

    def hold(self, offer: Offer, after: Fence | None, called: float) -> bool:
        """Hold back an offer, made at time ``called``, until its fence has passed; return false if that need not be."""
        line = self._held.get(offer.transfer)
        if line is None:
            if self._closed or after is None or _look(after) is True:
                return False
            line = self._held[offer.transfer] = deque()
        line.append((offer, after, called))
        return True

    def renew(self, transfer: TransferId, now: float) -> None:
        """Hold a transfer's offers for a lease from now."""
        if transfer in self._held:
            self._renewed[transfer] = now

    def forget(self, transfer: TransferId, generation: Generation) -> None:
        """Drop a transfer's offers up to this generation, which are void."""
        kept = deque(held for held in self._held.pop(transfer, ()) if held[0].generation > generation)
        if kept:
            self._held[transfer] = kept
        else:
            self._renewed.pop(transfer, None)

    def passed(self, now: float) -> Iterator[tuple[Offer, float, str | None]]:
        """Take out the offers whose fence has passed or failed; yield each with the time when it was made, and the error if any.

        A fence that has not passed within its lease has failed, too. Only some are checked, the others in their turn the next time.
        """
        until, looks = clock.now() + SLICE_S, min(LOOKS, len(self._held))
        while self._held and looks and clock.now() < until:
            transfer = next(iter(self._held))
            offer, fence, called = self._held[transfer][0]
            found = fence is None or _look(fence)
            if found is False and now >= max(called, self._renewed.get(transfer, called)) + self._lease:
                found = f"it has not passed within the lease of {self._lease:g} s"
            if found is False:
                self._held.move_to_end(transfer)
                looks -= 1
            else:
                self._drop_first(transfer)
                yield offer, called, None if found is True else found
        self._cut_short = bool(self._held and looks)

    def _drop_first(self, transfer: TransferId) -> None:
        line = self._held[transfer]
        line.popleft()
        if not line:
            del self._held[transfer]
            self._renewed.pop(transfer, None)

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
