"""Sync loads, or prefetches: they fetch into borrowed blocks of the pool, which are copied in the step that admits the request.

An async load costs at least one step: blocks are handed out in one, and the request runs in a later one.
A short load can avoid that. Its fetch begins when the request is first seen, into blocks borrowed from the pool.
When the engine asks how many tokens the request can load, it waits for that fetch, within a budget that all requests of the
step share. If everything was delivered by then, the request runs in this very step, whose workers first copy the blocks;
unlike a transfer, a copy within one memory cannot fail. If the fetch has not ended, the engine asks again in the next
step; if it has failed, the engine computes the tokens at once. An engine that has nothing else to do waits for a load of any
length, until somebody comes. So the engine never counts on bytes that are not there, and
never has to undo a load, however it handles those that fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from kvxfer import clock
from kvxfer.engine.exchange import BlockCopy
from kvxfer.engine.paces import LinkPaces, Pace
from kvxfer.engine.pins import BlockPins
from kvxfer.engine.step_wait import StepWait
from kvxfer.schedule import Load, LoadEvent, LoadState, Schedule, ScheduleError
from kvxfer.values import NULL, BlockTable, Group, Rank

_S, _E = LoadState, LoadEvent


class Prefetches:
    """The scheduler side's sync loads. One thread.

    ``budget`` is the seconds of a step that may be spent on waiting and copying. ``receive`` waits for
    results, for up to the seconds that it is given, and takes them in; it returns whether there were any.
    ``step_wait`` says how long a step may wait.
    """

    def __init__(
        self,
        schedule: Schedule,
        pins: BlockPins,
        groups: Sequence[Group],
        ranks: int,
        budget: float,
        receive: Callable[[float], bool],
        paces: LinkPaces,
        step_wait: StepWait,
    ) -> None:
        self._step_wait, self._paces, self._copying = step_wait, paces, Pace()
        self._schedule, self._ledger, self._pins = schedule.consumer, schedule.ledger, pins
        self._groups, self._ranks = tuple(groups), ranks
        self._budget = self._left = budget
        self._receive = receive
        self._possible = budget > 0 and all(group.kind in ("full", "window") for group in groups)

    def begin(self, load: Load, start: int) -> bool:
        """Borrow blocks and queue the fetch of a load's tokens from ``start`` on.

        Returns:
            False if the load has to be async. It is long, and copying it would cost other requests more than it saves. Or it begins
            within a block, which would be copied whole, over the local tokens in front. Or its link has failed, or the pool has no
            blocks to lend.

        Raises:
            ScheduleError: The pool has lent blocks that are in use.
        """
        tokens, source = load.transfer.tokens, load.transfer.source
        if not self._possible or load.state is not _S.OPEN or start >= tokens:
            return False
        if any(start % group.block_tokens for group in self._groups):
            return False
        expected = self._paces.estimate(source, tokens - start)
        spare = self._step_wait.worth(load)
        if expected is None or (expected > self._budget and not spare):
            return False  # async loads keep this estimate up to date too, but not that of copies
        if not self._copying.fits(tokens - start, max(self._budget - expected, spare)):
            return False
        spans = [self._span(group, start, tokens) for group in self._groups]
        taken = self._pins.borrow(load, sum(past - first for first, past in spans))
        if taken is None:
            return False
        rows = [[NULL] * first + [taken.pop() for _ in range(first, past)] for first, past in spans]
        try:
            self._schedule.fetch(load, BlockTable.of(rows), start, tokens - start, _E.FETCH_AHEAD)
        except ScheduleError:
            self._pins.drop(load)
            raise
        load.expected, load.pinned = expected, True
        return True

    @staticmethod
    def _span(group: Group, start: int, tokens: int) -> tuple[int, int]:
        """Return the positions ``[first, past)`` of the blocks, from ``start`` on, to which the first computed token attends."""
        return max(start, group.behind(tokens)) // group.block_tokens, group.blocks(tokens)

    def tokens(self, load: Load, computed: int) -> int | None:
        """Return how many tokens after the ``computed`` local ones are here, having waited for them within the budget.

        0: none will come, and the engine computes them. None: they are still on their way, or there is no time left in this
        step to copy them.
        """
        load.promised = 0
        if load.state is _S.AHEAD:
            self._wait(load)
        if load.state is _S.AHEAD:
            return None
        if load.state is not _S.HERE or not load.start <= computed < load.end:
            return 0
        if self._to_copy(load) > max(self._left, self._step_wait.worth(load)) and self._left < self._budget:
            return None  # others have had the step's budget; the next one's is whole
        load.promised = load.end - computed
        return load.promised

    def _wait(self, load: Load) -> None:
        """Wait for a load, in one step only: one that has overrun its time may never end, and would delay all others."""
        rest = math.inf if load.waited else max(0.0, load.expected - (clock.now() - load.fetched_at))
        granted = self._step_wait.wait(lambda: load.state is not _S.AHEAD, self._receive, expected=rest)
        self._left = max(0.0, self._left - granted)
        in_vain = load.waited or load.expected > self._budget
        patience = 0.0 if in_vain else max(0.0, self._left - self._to_copy(load))
        granted += patience
        while load.state is _S.AHEAD:
            begun = clock.now()
            news = self._receive(patience)
            took = min(clock.now() - begun, patience)
            patience, self._left = patience - took, self._left - took
            if not news:
                break
        if granted and load.state is _S.AHEAD:
            load.waited = True
            if granted >= load.expected:
                self._paces.failed(load.transfer.source)

    def _to_copy(self, load: Load) -> float:
        """Return the seconds that copying a load's tokens should take."""
        return self._copying.estimate(load.end - load.start) or 0.0

    def admit(self, load: Load, table: BlockTable, external: int) -> None:
        """Record that the request has been given blocks, and counts on ``external`` tokens after the local ones.

        Raises:
            ScheduleError: More are counted on than ``tokens`` has said are here, or so few that what a window holds behind them is
                not, or the table has no blocks for them, or such as are in use.
        """
        name, computed = load.request, load.computed
        if external > load.promised:
            raise ScheduleError(f"request {name} expects {external} tokens where {load.promised} are here")
        end = computed + external
        self._schedule.fills(table, computed, end)
        first = [self._span(group, load.start, load.end)[0] for group in self._groups]
        if any(self._span(group, computed, end)[0] < here for group, here in zip(self._groups, first, strict=True)):
            raise ScheduleError(f"request {name} expects {external} tokens, and a window needs more than is here")
        # Others may share those in front.
        lacking = table.only(self._span(group, computed, load.end) for group in self._groups)
        unused = self._schedule.unused(load.request, lacking)
        # Until the step: no load may fill these any more, while this request may offer them after that.
        self._ledger.claim(load.copier, unused, f"the copy for request {name}", fills=False)
        self._schedule.on(load, _E.ADMIT)
        load.promised, load.into = 0, lacking
        self._left = max(0.0, self._left - self._to_copy(load))

    def copies(self) -> tuple[BlockCopy, ...]:
        """Return what this step copies, and refill the budget; call it once a step."""
        self._left = self._budget
        self._step_wait.begin_step()
        admitted = {n: load for n, load in self._schedule.working.items() if load.state is _S.ADMITTED}
        for load in admitted.values():
            self._schedule.tell(load, _E.SHIPPED)
            self._schedule.force(load, _S.COPYING)  # for the request runs in this step
        return tuple(BlockCopy(n, load.blocks, load.into) for n, load in admitted.items())

    def copied(self, load: Load, ranks: Mapping[Rank, float]) -> None:
        """Record that these ranks have copied its blocks, and how many seconds each of them took for it."""
        load.copied |= ranks
        if len(load.copied) == self._ranks:
            self._copying.took(load.end - load.start, max(load.copied.values()))
            self._schedule.on(load, _E.COPIED)
