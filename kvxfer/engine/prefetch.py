"""Prefetches: loads that fetch into borrowed blocks of the pool, which are copied in the step that admits the request.

A load beside the steps costs at least one step: blocks are handed out in one, and the request runs in a later one.
A short load can avoid that. Its fetch begins when the request is first seen, into blocks borrowed from the pool.
When the engine asks how many tokens the request can load, it waits for that fetch, within a budget that all requests of the
step share. If everything was delivered by then, the request runs in this very step, whose workers first copy the blocks;
unlike a transfer, a copy within one memory cannot fail. If the fetch has not ended, the engine asks again in the next
step; if it has failed, the engine computes the tokens at once. So the engine never counts on bytes that are not there, and
never has to undo a load, however it handles those that fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from kvxfer.engine.exchange import BlockCopy
from kvxfer.engine.paces import LinkPaces, Pace
from kvxfer.engine.pins import BlockPins
from kvxfer.engine.side_channel import RankResult
from kvxfer.engine.trace import Trace
from kvxfer.failures import Failure
from kvxfer.identity import Source
from kvxfer.ledger import BlockLedger
from kvxfer.protocol.values import Stages
from kvxfer.schedule import FetchSchedule, ScheduleError
from kvxfer.values import NULL, BlockTable, Group, Rank

__all__ = ["Prefetches"]


@dataclass(slots=True)
class _Prefetch:
    """The prefetch of one request: ``number`` is that of its fetch, ``expected`` the seconds that it should take."""

    number: int
    source: Source
    expected: float
    start: int
    tokens: int
    blocks: BlockTable
    results: dict[Rank, RankResult] = field(default_factory=dict)
    waited: bool = False  # a step has already waited for it, in vain
    over: bool = False  # quiet on all ranks, and the schedule has been told
    promised: int = 0  # so many tokens are here, the engine was last told
    unwanted: bool = False
    copying: dict[Rank, float] | None = (
        None  # once admitted: the ranks that have copied, and the seconds that each took
    )


class Prefetches:
    """The scheduler side's prefetches. One thread.

    ``budget`` is the seconds of a step that may be spent on waiting and copying. ``receive`` waits up to so many seconds for
    results and passes them to ``take_in``; it returns whether there were any.
    """

    def __init__(
        self,
        schedule: FetchSchedule,
        ledger: BlockLedger,
        pins: BlockPins,
        groups: Sequence[Group],
        ranks: int,
        budget: float,
        receive: Callable[[float], bool],
        trace: Trace,
    ) -> None:
        self._schedule, self._ledger, self._pins = schedule, ledger, pins
        self._groups, self._ranks = tuple(groups), ranks
        self._budget = self._left = budget
        self._receive, self._trace = receive, trace
        self._all: dict[str, _Prefetch] = {}
        self._copies: list[BlockCopy] = []
        self.paces, self._copying = LinkPaces(), Pace()
        self._possible = budget > 0 and all(group.kind in ("full", "window") for group in groups)

    def begin(self, request: str, source: Source, start: int, tokens: int, number: int) -> bool:
        """Borrow blocks and queue the fetch of the tokens ``[start, tokens)``, which will have that number.

        Returns:
            False if the load has to go beside the steps: it is long, it begins within a block (which would be copied whole, over
            the local tokens in front), its link has failed, or the pool has no blocks to lend.

        Raises:
            ScheduleError: The pool has lent blocks that are in use.
        """
        if not self._possible or self._schedule.matched(request, start) != tokens - start or start >= tokens:
            return False
        if any(start % group.block_tokens for group in self._groups):
            return False
        expected = self.paces.estimate(source, tokens - start)
        if expected is None or expected > self._budget:
            return False  # loads beside the steps keep this estimate up to date too, but not that of copies
        if not self._copying.fits(tokens - start, self._budget - expected):
            return False
        spans = [self._span(group, start, tokens) for group in self._groups]
        taken = self._pins.borrow(_holder(request), sum(past - first for first, past in spans))
        if taken is None:
            return False
        rows = [[NULL] * first + [taken.pop() for _ in range(first, past)] for first, past in spans]
        blocks = BlockTable.of(rows)
        try:
            self._schedule.allocated(request, blocks, start, tokens - start)
        except ScheduleError:
            self._pins.drop(_holder(request))
            raise
        self._all[request] = _Prefetch(number, source, expected, start, tokens, blocks)
        return True

    @staticmethod
    def _span(group: Group, start: int, tokens: int) -> tuple[int, int]:
        """Return the positions ``[first, past)`` of the blocks from ``start`` on that the token after the loaded ones attends to."""
        return max(start, group.behind(tokens)) // group.block_tokens, group.blocks(tokens)

    def __contains__(self, request: str) -> bool:
        """Return whether this request's load is a prefetch."""
        return request in self._all

    def tokens(self, request: str, computed: int) -> int | None:
        """Return how many tokens after the ``computed`` local ones are here, having waited for them within the budget.

        0: none will come, and the engine computes them. None: they are still on their way, or there is no time left in this
        step to copy them.
        """
        found = self._all[request]
        found.promised = 0
        if found.unwanted:
            return 0
        self._wait(found)
        if not self._ended(found):
            return None
        came = reduce(Stages.slowest, (result.stages for result in found.results.values()))
        self._trace.seen(request, self._failure(found), came)
        useful = found.start <= computed < found.tokens and found.copying is None
        if self._failure(found) is not None or not useful:
            return 0
        if self._to_copy(found.tokens - found.start) > self._left < self._budget:
            return None  # others have had the step's budget; the next one's is whole
        found.promised = found.tokens - computed
        return found.promised

    def _wait(self, found: _Prefetch) -> None:
        """Wait for a prefetch, in one step only: one that has overrun its time may never end, and would delay all others."""
        patience = granted = 0.0 if found.waited else max(0.0, self._left - self._to_copy(found.tokens - found.start))
        while not self._ended(found):
            begun = time.monotonic()
            news = self._receive(patience)
            took = min(time.monotonic() - begun, patience)
            patience, self._left = patience - took, self._left - took
            if not news:
                break
        if granted and not self._ended(found):
            found.waited = True
            if granted >= found.expected:
                self.paces.failed(found.source)

    def _to_copy(self, tokens: int) -> float:
        """Return the seconds that copying so many tokens should take."""
        return self._copying.estimate(tokens) or 0.0

    def admitted(self, request: str, table: BlockTable, computed: int, external: int) -> None:
        """Record that the request has been given blocks, and counts on ``external`` tokens after the ``computed`` local ones.

        Raises:
            ScheduleError: More are counted on than ``tokens`` has said are here, or so few that what a window holds behind them is
                not, or the table has no blocks for them, or such as are in use.
        """
        found = self._all[request]
        if external > found.promised:
            raise ScheduleError(f"request {request} counts on {external} tokens where {found.promised} are here")
        if external:
            end = computed + external
            self._schedule.fills(table, computed, end)
            first = [self._span(group, found.start, found.tokens)[0] for group in self._groups]
            if any(self._span(group, computed, end)[0] < here for group, here in zip(self._groups, first, strict=True)):
                raise ScheduleError(
                    f"request {request} counts on {external} tokens, and a window needs more than is here"
                )
            # Others may share those in front.
            lacking = table.only(self._span(group, computed, found.tokens) for group in self._groups)
            unused = self._schedule.unused(request, lacking)
            # Until the step: no load may fill these any more, while this request may offer them after that.
            self._ledger.claim(_copy(request), unused, f"the copy for request {request}", fills=False)
            found.promised = 0
            found.copying = {}
            self._left = max(0.0, self._left - self._to_copy(found.tokens - found.start))
            self._copies.append(BlockCopy(request, found.blocks, lacking))
        else:
            self.give_up(request)

    def copies(self) -> tuple[BlockCopy, ...]:
        """Return what this step copies, and refill the budget; call it once a step."""
        drained, self._copies, self._left = tuple(self._copies), [], self._budget
        for copy in drained:
            self._ledger.drop(_copy(copy.request))
        return drained

    def take_in(self, result: RankResult) -> None:
        """Process the result of a prefetch on one rank; it may come twice, and an earlier one after a later one."""
        found = self._all.get(result.handle)
        known = None if found is None else found.results.get(result.rank)
        if found is None or found.number != result.number or (known is not None and known.quiet):
            return
        found.results[result.rank] = result
        if result.failure is not None:
            self.paces.failed(found.source)
        self._settle(result.handle, found)

    def copied(self, request: str, ranks: Mapping[Rank, float]) -> None:
        """Record that these ranks have copied its blocks, and how many seconds each of them took for it."""
        found = self._all.get(request)
        if found is not None and found.copying is not None:
            found.copying |= ranks
            self._settle(request, found)

    def give_up(self, request: str) -> None:
        """Give up a prefetch that nobody needs any more; a copy that a step has begun is still finished."""
        found = self._all.get(request)
        if found is not None:
            found.unwanted, found.promised = True, 0
            others = [copy for copy in self._copies if copy.request != request]
            if len(others) < len(self._copies):  # its blocks may be somebody else's by the time of the step
                self._copies, found.copying = others, None
                self._ledger.drop(_copy(request))
            self._schedule.preempt(request)
            self._settle(request, found)

    def short_of_blocks(self) -> None:
        """Give back the blocks of prefetches that are complete and whose requests have not been admitted."""
        for request, found in list(self._all.items()):
            if found.over and found.copying is None:
                self.give_up(request)

    @property
    def moving(self) -> bool:
        """Whether one is on its way or being copied; what is here and waits for its request's turn needs no step."""
        return any(not found.over or found.copying is not None for found in self._all.values())

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._all)

    def _ended(self, found: _Prefetch) -> bool:
        return len(found.results) == self._ranks or self._failure(found) is not None

    @staticmethod
    def _failure(found: _Prefetch) -> Failure | str | None:
        failure = next((r.failure for r in found.results.values() if r.failure is not None), None)
        generations = {r.generation for r in found.results.values() if r.generation is not None}
        return failure or ("our ranks hold different generations" if len(generations) > 1 else None)

    def _settle(self, request: str, found: _Prefetch) -> None:
        """Give the blocks back once nobody writes to them or reads them."""
        quiet = len(found.results) == self._ranks and all(r.quiet for r in found.results.values())
        failed = self._failure(found) is not None
        if quiet and not found.over:
            found.over = True
            if failed and all(r.stages.unasked for r in found.results.values()):
                self._schedule.unasked(request)
            self._schedule.loaded(request)
            by = f"the prefetch of request {request}"
            self._ledger.claim(_holder(request), self._ledger.all(found.blocks), by, fills=False)
            if not failed:
                moved = max(r.stages.moving for r in found.results.values())
                self.paces.delivered(found.source, found.tokens - found.start, moved)
        used = found.copying is not None and len(found.copying) == self._ranks
        if used and found.copying:
            self._copying.took(found.tokens - found.start, max(found.copying.values()))
        if found.over and (used or (found.copying is None and (found.unwanted or failed))):
            del self._all[request]
            self._ledger.drop(_holder(request))
            self._pins.drop(_holder(request))


def _holder(request: str) -> tuple[str, str]:
    """Who holds the borrowed blocks."""
    return "prefetch", request


def _copy(request: str) -> tuple[str, str]:
    """Who holds the blocks to which those are copied."""
    return "copy", request
