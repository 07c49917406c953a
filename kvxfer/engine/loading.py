"""The consumer's blocks: which requests are being loaded, on which ranks that is over, and what must not be reused yet.

Of a load that has failed, some blocks may still be written to. The engine is told of the failure at once and goes on
elsewhere, while we pin those blocks until all ranks have reported them quiet. A load that has come is reported
twice, by the side channel and with a step; only after the second report may another load have its name.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvxfer.engine.pins import BlockPins
from kvxfer.schedule import FetchSchedule
from kvxfer.values import Rank

__all__ = ["LoadingBlocks"]


class LoadingBlocks:
    """Loads from their command to their end; one thread."""

    def __init__(self, schedule: FetchSchedule, pins: BlockPins, ranks: int) -> None:
        self._schedule, self._pins, self._ranks = schedule, pins, ranks
        self._blocks: dict[str, tuple[int, ...]] = {}  # of requests whose load is under way
        self._numbers: dict[str, int] = {}  # of the fetches of those
        self._over: dict[str, set[Rank]] = {}  # where it is over, of those
        self._said: dict[str, set[Rank]] = {}  # the ranks of which a step has said so, of loads that wait for one
        self._writing: dict[str, set[Rank]] = {}  # failed, and where it still writes
        self._reported: set[str] = set()  # those of them that the engine knows to be over
        self._unpinned: set[str] = set()  # those of them that the engine must not hear of before they are quiet

    def begins(self, request: str, blocks: tuple[int, ...], number: int) -> None:
        """Take in that a load into these blocks is on its way to the workers, as the fetch of that number."""
        self._blocks[request], self._numbers[request] = blocks, number
        self._said[request] = set()

    def __contains__(self, request: str) -> bool:
        """Return whether its load is under way."""
        return request in self._blocks

    def is_of(self, request: str, number: int) -> bool:
        """Return whether its load is under way, and the fetch of that number."""
        return self._numbers.get(request) == number

    def blocks(self, request: str) -> tuple[int, ...]:
        """Return those of a request whose load is under way."""
        return self._blocks.get(request, ())

    def writing(self, request: str, ranks: Iterable[Rank]) -> None:
        """Take in that it has failed, and these ranks still write.

        The engine, which has the blocks yet, hears of it next, or once they are quiet if there is no pool to pin them in.
        """
        if request not in self._writing:
            if not self._pins.keep(_holder(request), self.blocks(request)):
                self._unpinned.add(request)
            self._schedule.preempt(request)
        self._writing.setdefault(request, set()).update(ranks)

    def quiet(self, request: str, ranks: Iterable[Rank]) -> bool:
        """Take in that those ranks no longer do; True if the load is thereby over on all ranks."""
        self._writing.get(request, set()).difference_update(ranks)
        if request not in self._writing or self._writing[request]:
            return False
        del self._writing[request]
        self._pins.drop(_holder(request))
        if request in self._reported:
            self._reported.remove(request)
            self._schedule.loaded(request)
        if request not in self._unpinned:
            return False
        self._unpinned.remove(request)
        return self.over_on(request, ())

    def over_on(self, request: str, ranks: Iterable[Rank]) -> bool:
        """Take in that the load is over on these ranks; True if that was all of them."""
        if request not in self:
            return False
        over = self._over.setdefault(request, set())
        over.update(ranks)
        return len(over) >= self._ranks and request not in self._unpinned

    def said(self, request: str, ranks: Iterable[Rank]) -> None:
        """Take in that a step has said so of these ranks."""
        if request in self._said:
            self._said[request].update(ranks)
            if len(self._said[request]) >= self._ranks:
                self.all_said(request)

    def all_said(self, request: str) -> None:
        """Take in that no step will say so any more."""
        known = self._said.pop(request, None)
        if known is not None and request not in self and request not in self._writing:
            self._schedule.loaded(request)

    def unasked(self, request: str) -> None:
        """Take in that the load, which is over next, has failed before any rank asked its producer."""
        if request in self:
            self._schedule.unasked(request)

    def over(self, request: str) -> None:
        """Take in that the load is over, well or badly."""
        if self._blocks.pop(request, None) is None:
            return
        del self._numbers[request]
        self._over.pop(request, None)
        if request in self._writing:
            self._reported.add(request)
        elif request not in self._said:
            self._schedule.loaded(request)

    @property
    def waiting(self) -> bool:
        """Whether blocks are pinned of which the engine may know no request, or a step has still to say what we know."""
        return bool(self._writing) or len(self._said) > len(self._blocks)

    def __len__(self) -> int:
        """Return how much is remembered."""
        return len(self._blocks) + len(self._over) + len(self._said) + len(self._writing) + len(self._reported)


def _holder(request: str) -> tuple[str, str]:
    """Who pins its blocks: not the request itself, which may also pin what it offers."""
    return "loading", request
