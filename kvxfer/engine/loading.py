"""The consumer's blocks: which requests are being loaded, on which ranks that is over, and what must not be reused yet.

When a load fails, some of its blocks may still be written to. The engine is told of the failure at once and goes on with
other blocks, while these stay pinned until all ranks have reported them quiet. A load that was delivered is reported
twice, by the side channel and with a step; only after the second report may another load have its name.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvxfer.engine.pins import BlockPins
from kvxfer.schedule import FetchSchedule
from kvxfer.values import Rank

__all__ = ["LoadingBlocks"]


class LoadingBlocks:
    """The loads from their command to their end. One thread."""

    def __init__(self, schedule: FetchSchedule, pins: BlockPins, ranks: int) -> None:
        self._schedule, self._pins, self._ranks = schedule, pins, ranks
        self._blocks: dict[str, tuple[int, ...]] = {}  # of requests whose load is under way
        self._numbers: dict[str, int] = {}  # of the fetches of those
        self._over: dict[str, set[Rank]] = {}  # of those, the ranks on which it is over
        # Of loads that a step has yet to report as over, the ranks that it has reported.
        self._said: dict[str, set[Rank]] = {}
        self._writing: dict[str, set[Rank]] = {}  # loads that have failed, and the ranks on which they still write
        self._reported: set[str] = set()  # those of them that the engine knows to be over
        self._unpinned: set[str] = set()  # those of them that the engine must not hear of before they are quiet

    def begins(self, request: str, blocks: tuple[int, ...], number: int) -> None:
        """Record that a load into these blocks is on its way to the workers, as the fetch with that number."""
        self._blocks[request], self._numbers[request] = blocks, number
        self._said[request] = set()

    def __contains__(self, request: str) -> bool:
        """Return whether the load of this request is under way."""
        return request in self._blocks

    def is_of(self, request: str, number: int) -> bool:
        """Return whether the load of this request is under way, as the fetch with that number."""
        return self._numbers.get(request) == number

    def blocks(self, request: str) -> tuple[int, ...]:
        """Return the blocks of a request whose load is under way."""
        return self._blocks.get(request, ())

    def writing(self, request: str, ranks: Iterable[Rank]) -> None:
        """Record that a load has failed while these ranks still write.

        The engine hears of it next, or only once the blocks are quiet if there is no pool to pin them in.
        """
        if request not in self._writing:
            if not self._pins.keep(_holder(request), self.blocks(request)):
                self._unpinned.add(request)
            self._schedule.preempt(request)
        self._writing.setdefault(request, set()).update(ranks)

    def quiet(self, request: str, ranks: Iterable[Rank]) -> bool:
        """Record that these ranks no longer write; return whether the load is thereby over on all ranks."""
        self._writing.get(request, set()).difference_update(ranks)
        if request not in self._writing or self._writing[request]:
            return False
        del self._writing[request]
        self._pins.drop(_holder(request))
        if request in self._reported:
            self._reported.remove(request)
            self._schedule.quiet(request)
            if request not in self._said:
                self._schedule.loaded(request)
        if request not in self._unpinned:
            return False
        self._unpinned.remove(request)
        return self.over_on(request, ())

    def over_on(self, request: str, ranks: Iterable[Rank]) -> bool:
        """Record that the load is over on these ranks; return whether it now is on all of them."""
        if request not in self:
            return False
        over = self._over.setdefault(request, set())
        over.update(ranks)
        return len(over) >= self._ranks and request not in self._unpinned

    def said(self, request: str, ranks: Iterable[Rank]) -> None:
        """Record that a step has reported the load as over on these ranks."""
        if request in self._said:
            self._said[request].update(ranks)
            if len(self._said[request]) >= self._ranks:
                self.all_said(request)

    def all_said_of(self, request: str) -> bool:
        """Return whether no step has yet to report the load as over on some rank."""
        return request not in self._said

    def all_said(self, request: str) -> None:
        """Record that steps have reported the load as over on all ranks, or will not report it any more."""
        known = self._said.pop(request, None)
        if known is not None and request not in self and request not in self._writing:
            self._schedule.loaded(request)

    def unasked(self, request: str) -> None:
        """Record that the load, which is over next, has failed before any rank asked its producer."""
        if request in self:
            self._schedule.unasked(request)

    def over(self, request: str) -> None:
        """Record that the load is over, well or badly."""
        if self._blocks.pop(request, None) is None:
            return
        del self._numbers[request]
        self._over.pop(request, None)
        if request in self._writing:
            self._reported.add(request)
            return
        self._schedule.quiet(request)
        if request not in self._said:
            self._schedule.loaded(request)

    @property
    def waiting(self) -> bool:
        """Whether blocks are pinned for requests that the engine may have forgotten, or a step has yet to repeat what is known."""
        return bool(self._writing) or len(self._said) > len(self._blocks)

    def __len__(self) -> int:
        """Return how much is remembered."""
        return len(self._blocks) + len(self._over) + len(self._said) + len(self._writing) + len(self._reported)


def _holder(request: str) -> tuple[str, str]:
    """Who pins its blocks: not the request itself, which may also pin what it offers."""
    return "loading", request
