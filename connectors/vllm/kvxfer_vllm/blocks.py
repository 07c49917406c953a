"""vLLM's blocks, beside the requests that use them: which may not be reused, which a load fills, which the cache can find.

Two words for what may not be reused. A request that is over is *held*: vLLM does not free its blocks until we say that others have read
them. A block is *pinned*: we have a reference to it in vLLM's pool, whatever becomes of requests.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvxfer.engine import BlockPins, HeldPrefix, Inquiry, PrefixIndex, SchedulerSide
from kvxfer.values import NULL, BlockTable, Group
from kvxfer_vllm.internals import PrefixCache
from kvxfer_vllm.requests import Naming, RequestFacts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

NULL_BLOCK = 0
"""vLLM's block 0 stands for "no block"; it never holds data."""


def table_of(block_ids: Sequence[Sequence[int]]) -> BlockTable:
    """Return vLLM's block table with its null block spelt as ours."""
    return BlockTable.of(block_ids, NULL_BLOCK)


def step_tables(output: SchedulerOutput, follows: Callable[[str], bool]) -> Iterator[tuple[str, int, BlockTable]]:
    """Yield the requests of a step whose tables matter, with the tokens computed before it and the whole table as it uses it."""
    state, cached = output.kv_connector_block_state, output.scheduled_cached_reqs
    seen = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    seen += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for name, computed in seen:
        if follows(name):
            yield name, computed, table_of(state.get_block_ids(name))


FIRST_S = 0.1
"""A first guess of how long blocks are held."""
MIN_S, MAX_S = 0.02, 0.5
"""The shortest and the longest time for which anything is waited for."""
WEIGHT = 0.2
"""That of the newest hold in what is usual."""


class PendingFrees:
    """The requests that are over and whose blocks are held; one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._usual = clock, FIRST_S
        self._held: list[tuple[str, float]] = []  # since when, the oldest first: mostly these are the first to be free
        self._since: float | None = None  # when vLLM began to wait without getting anything

    def held(self, name: str) -> None:
        """Record that a request is over, and its blocks are held."""
        self._held.append((name, self._clock()))

    def released(self, name: str) -> None:
        hold = next((hold for hold in self._held if hold[0] == name), None)
        if hold is not None:
            self._held.remove(hold)
            took = min(self._clock() - hold[1], MAX_S)
            self._usual += WEIGHT * (took - self._usual)
            self._since = None

    @property
    def patience(self) -> float:
        """How many seconds a hold may take before it counts as one that nobody ends."""
        return min(max(2 * self._usual, MIN_S), MAX_S)

    def soon(self) -> bool:
        """Return whether some are likely to be free soon. Call it only where there are no blocks for a running request."""
        now = self._clock()
        if not self._held or now - self._held[-1][1] > self.patience:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since <= self.patience


MAX_PASSED = 4
"""Loads that are skipped at a time: vLLM looks for each of them in its prefix cache in every step."""


class Room:
    """Which loads are passed, and by which; one thread."""

    def __init__(self, groups: Sequence[Group], cache: PrefixCache) -> None:
        self._blocks = [group.block_tokens for group in groups if group.kind == "full"]
        self._cache = cache
        self._passed: list[RequestFacts] = []  # loads that are skipped

    def lacks(self, facts: RequestFacts, start: int, end: int) -> bool:
        """Return whether a load of these tokens is to be skipped, because there are no blocks for it.

        What windows and states take is not counted: it does not lack room that it may have.
        """
        need, free = sum(-(-end // block) - start // block for block in self._blocks), self._cache.free
        if need <= free or (facts.passers is None and len(self._passed) >= MAX_PASSED):
            return False
        if facts.passers is None:
            facts.passers = set()
            self._passed.append(facts)
        return need > free + sum(len(row) for other in facts.passers for row in self._cache.table(other))

    def admitted(self, facts: RequestFacts) -> None:
        """Record that a request has blocks: it has passed those that came before it and wait."""
        self._waits_no_more(facts)
        for waiting in self._passed:
            if waiting.number < facts.number and waiting.passers is not None:
                waiting.passers.add(facts.name)

    def finished(self, facts: RequestFacts) -> None:
        """Record that a request is over."""
        self._waits_no_more(facts)
        for waiting in self._passed:
            if waiting.passers is not None:
                waiting.passers.discard(facts.name)

    def _waits_no_more(self, facts: RequestFacts) -> None:
        if facts.passers is not None:
            facts.passers = None
            self._passed.remove(facts)


UNIT = 16
"""The tokens of the smallest block that a producer may have. Larger ones are multiples of it."""


class UnfilledBlocks:
    """The blocks that loads may leave unfilled, because they begin behind a window. One thread."""

    def __init__(self, groups: Sequence[Group], cache: PrefixCache) -> None:
        self._windows = [(g, group) for g, group in enumerate(groups) if group.kind == "window"]
        self._cache = cache

    def loads(self, facts: RequestFacts, table: BlockTable, start: int, end: int) -> None:
        """Record that a request loads the tokens ``[start, end)`` into a table."""
        for g, group in self._windows:
            there = group.behind(end) // UNIT * UNIT  # from this token on, any producer has them
            facts.behind.update(table[g][start // group.block_tokens : group.blocks(there)].tolist())
        facts.behind.discard(NULL)

    def cached(self, facts: RequestFacts) -> None:
        """Take what a request's load has left unfilled out of the prefix cache, where it may be by now."""
        if facts.behind:
            self._cache.evict(facts.behind)
            facts.unfilled |= facts.behind
            facts.behind = set()


class LocalHits:
    """The part of a prompt that is cached here, and what can be loaded behind it. One thread.

    ``replayed``: the groups of which the window behind a prefix is computed again.
    """

    def __init__(self, side: SchedulerSide, pins: BlockPins, cache: PrefixCache, replayed: Sequence[Group]) -> None:
        self._side, self._pins, self._cache, self._replayed = side, pins, cache, tuple(replayed)

    def prefetch(self, request: Request) -> None:
        """Begin a short load behind what is cached of a request's prompt."""
        self._side.prefetch(request.request_id, self._cache.tokens(request))

    def loadable(self, facts: RequestFacts, computed: int) -> int | None:
        """Answer ``SchedulerSide.loadable``; 0 if a request computes all that is not cached here, or all of its prompt.

        A load that begins behind a window of which nothing is kept for prefix hits would not bring it; vLLM computes it again.
        What another engine has been found to hold behind the cached tokens is fetched at once, if that may be.
        """
        name, request = facts.name, facts.request
        if facts.refused is not None or (computed and any(computed > g.behind(facts.end) for g in self._replayed)):
            return 0
        asking = computed > 0 and self._side.asking(name)
        tokens = self._side.loadable(name, computed)
        if not tokens or not asking:
            return tokens
        # The blocks that vLLM has found and not taken yet must not be lent.
        rows, _ = self._cache.hit(request.block_hashes, request.num_tokens - 1)
        self._pins.keep(self, (block for row in rows for block in row if block != NULL_BLOCK))
        try:
            self._side.prefetch(name, computed)
        finally:
            self._pins.drop(self)
        return self._side.loadable(name, computed)


PINNED_PART = 4
"""Which part of the pool answers may pin, and which must be free while any are pinned."""


class PinnedAnswers:
    """The answers whose blocks are pinned, each for a number of seconds; 0 for none. One thread."""

    def __init__(self, pins: BlockPins, blocks: int, seconds: float) -> None:
        self._pins, self._most, self._seconds = pins, blocks // PINNED_PART, seconds
        self._pinned: deque[tuple[Hashable, int, float]] = deque()  # under what, how many blocks, and until when
        self._blocks = 0

    def pin(self, number: int, blocks: Collection[int]) -> None:
        """Pin the blocks of the request of this number, which has just ended; they are still in use."""
        holder = "answer", number
        if self._seconds and len(blocks) <= self._most and self._pins.keep(holder, blocks):
            self._pinned.append((holder, len(blocks), time.monotonic() + self._seconds))
            self._blocks += len(blocks)

    def unpin_old(self, free: int) -> None:
        """Unpin what has been pinned long enough, and the oldest while too few blocks of the pool are free."""
        now = time.monotonic()
        while self._pinned:
            _, count, until = self._pinned[0]
            if until > now and self._blocks <= self._most and free >= self._most:
                return
            self._unpin_oldest()
            free += count

    def clear(self) -> None:
        """Unpin everything."""
        while self._pinned:
            self._unpin_oldest()

    def _unpin_oldest(self) -> None:
        holder, count, _ = self._pinned.popleft()
        self._blocks -= count
        self._pins.drop(holder)

    def __len__(self) -> int:
        return len(self._pinned)


TIMES = 2
"""How many tokens are remembered for each that the cache has room for: vLLM may keep blocks of requests that ended long ago."""


_Known = tuple[Sequence[Any], tuple[tuple[int, str], ...]]
"""The hashes of a request's blocks; and where each of its media begins, and vLLM's name for it."""


class CachedPrefixes:
    """The requests that an engine has computed, and what its cache still has of them. One thread.

    Args:
        groups: The engine's.
        blocks: How many blocks its cache has.
        cache: It.
        is_ambiguous: Says of a name whether vLLM may take one of two items of media for the other, because they have had it.
    """

    def __init__(
        self, groups: Sequence[Group], blocks: int, cache: PrefixCache, is_ambiguous: Callable[[str], bool]
    ) -> None:
        self._groups, self._cache, self._is_ambiguous = tuple(groups), cache, is_ambiguous
        self._index: PrefixIndex[_Known] = PrefixIndex(TIMES * blocks * min(g.block_tokens for g in groups))
        self._new: list[RequestFacts] = []  # those that are computed and that no inquiry could find yet

    def arrived(self, facts: RequestFacts, naming: Naming) -> None:
        """Take in a request that is to be computed; its blocks count as soon as vLLM can find them."""
        facts.naming = naming
        self._new.append(facts)

    def keep_findable(self, request: Request, unfilled: Collection[int]) -> None:
        """Have vLLM's prefix cache find the windows at the end of an answer, until their blocks are used again.

        By default it finds those at the end of a prompt only (``prefix_cache_retention_interval``). Call it while the request has its
        blocks. Those of a window that is a multiple of the block are enough for all full blocks. States are left alone: vLLM may
        write to the block of one that it does not cache. So are blocks that its load has left ``unfilled``.
        """
        computed = min(request.num_computed_tokens, request.num_tokens - 1)  # more may be under way, which is given up
        for g, group in enumerate(self._groups if self._cache.hashed else ()):
            if group.kind == "window" and self._cache.caches(g):
                self._cache.cache_all(request, g, computed, unfilled)

    def finished(self, facts: RequestFacts) -> None:
        """Record that a request is over; what it has computed can still be found."""
        if facts in self._new:
            self._new.remove(facts)
        self._add(facts)
        facts.naming = None

    def _add(self, facts: RequestFacts) -> None:
        if facts.naming is not None:
            tokens = array("i", facts.request.all_token_ids[:])
            media = tuple((item.mm_position.offset, item.identifier) for item in facts.request.mm_features or ())
            self._index.add(facts.naming(tokens), (facts.request.block_hashes, media))

    def holds(self, inquiry: Inquiry) -> HeldPrefix | None:
        """Return what is in the cache now of the tokens that an inquiry names; None if nothing is."""
        if not self._cache.hashed:
            return None
        for facts in self._new:
            self._add(facts)
        self._new.clear()
        found, chain = self._index.find(inquiry.chain), inquiry.chain
        if found is None:
            return None
        hashes, media = found.name
        tokens = chain.floor(min([found.tokens, *(at for at, name in media if self._is_ambiguous(name))]))
        # For the sake of drafts a lookup of one group drops its last block; with several it looks further by itself.
        dropped = self._cache.hashed if len(self._groups) == 1 and self._cache.drops_last else 0
        while tokens:
            rows, cached = self._cache.hit(hashes, tokens + dropped)
            states = (g for g, group in enumerate(self._groups) if group.kind == "state")
            if cached == tokens and not any(self._cache.changes(g, rows[g]) for g in states):
                self._fill_windows(rows, hashes, tokens)
                return HeldPrefix(tokens, table_of(rows))
            # What windows and states need for fewer tokens are other blocks.
            tokens = chain.floor(min(cached, tokens - 1))
        return None

    def _fill_windows(self, rows: list[list[int]], hashes: Sequence[Any], tokens: int) -> None:
        """Add blocks of windows that vLLM's lookup leaves out, because another block begins with the next token, if they are cached."""
        for g, group in enumerate(self._groups):
            if group.kind != "window" or group.block_tokens != self._cache.hashed:
                continue
            for at in range(group.kept(tokens)[0], len(rows[g])):
                if rows[g][at] == NULL_BLOCK and (cached := self._cache.block(hashes[at], g)) is not None:
                    rows[g][at] = cached

    def clear(self, live: Iterable[RequestFacts]) -> None:
        """Forget all but those of these requests that have a name, as when the cache is dropped."""
        self._index.clear()
        self._new = [facts for facts in live if facts.naming is not None]
