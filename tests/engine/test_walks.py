"""All public calls of both sides in any order: none raises but as documented, no load ends twice, nothing stays held, no byte is wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any
from unittest import mock

import pytest

from kvxfer import BlockTable, Config, Group, KvxferError, Source, TransferId
from kvxfer.engine import BlockPins, HeldPrefix, Inquiry, Prefix, PrefixIndex, ScheduleError, SchedulerSide, WorkerSide
from kvxfer.schedule import ASK, LOAD, OFFERING
from kvxfer.testing.engine import until
from kvxfer.transitions import Transitions
from kvxfer.values import Rank
from tests.engine.direct import Switchboard
from tests.engine.small import FACTS, Agent, Lending, Wire
from tests.schedule.ends import Loading, Offers

TOKENS, BLOCK = 64, 16
PROMPTS = [Prefix([n] * TOKENS, model="m") for n in range(3)]
PREFIXES = {prompt.digest(tokens): n for n, prompt in enumerate(PROMPTS) for tokens in range(BLOCK, TOKENS + 1, BLOCK)}
NAMES = ["a", "b", "c", "d"]
CONFIG = Config(ask="always", ask_tokens=1, ask_timeout=0.02, start_timeout=60.0)


def named(prompt: int) -> tuple[TransferId, bytes]:
    return TransferId.routed(str(prompt)), PROMPTS[prompt].digest(TOKENS)


class CachingPool(Lending):
    """A pool whose unused blocks are still found in a prefix cache, until they are taken again.

    cached: the prompts of which blocks are still as they were computed.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.cached: dict[int, int] = {}

    def take(self, n: int) -> list[int]:
        taken = super().take(n)
        self.forget(taken)
        return taken

    def forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.cached.pop(block, None)

    def touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not self.refs[block]:
                self.unused.remove(block)
            self.refs[block] += 1


@contextmanager
def never_wrong() -> Iterator[None]:
    """A call that cannot be wrong raises nothing."""
    try:
        yield
    except KvxferError as e:
        raise AssertionError(str(e)) from e


class Walker:
    """One engine whose calls come in any order.

    It gives its blocks to others as soon as kvxfer lets it, and computes for one prompt only in those that a request has, so that only
    kvxfer decides whether what is read and written is right.
    """

    def __init__(self, wire: Wire, rng: random.Random, board: Switchboard | None) -> None:
        self.rng, self.wire = rng, wire
        self.pool = CachingPool(1000)
        self.index: PrefixIndex[tuple[int, list[int]]] = PrefixIndex(1 << 20)
        with mock.patch("kvxfer.engine.dispatch.SideChannel", (board or Switchboard()).scheduler):
            pins = BlockPins(500, self.pool)
            self.side = SchedulerSide(CONFIG, "walker", [Group(BLOCK)], 1, FACTS, pins=pins, holds=self.holds)
        self.agent = Agent(wire, [Group(BLOCK)], Rank(0, 0))
        channel = board.worker if board else None
        self.worker = WorkerSide(self.agent, quarantine=rng.choice([0, 1000]), copy=self.copy, channel=channel)  # type: ignore[arg-type]
        wire.sources[self.side.source] = [self.agent]
        self.tables: dict[str, BlockTable] = {}
        self.computed: dict[str, int] = {}  # how many tokens of what a request offers its blocks have
        self.held: dict[str, BlockTable] = {}
        self.moving: dict[str, tuple[BlockTable, int, int]] = {}  # where tokens of a load are to be, and which
        self.begun, self.told = Counter[str](), Counter[str]()
        self.wants: dict[str, int] = {}  # the prompt that a request was told to load first
        self.offers: dict[str, int] = {}  # the prompt that a request offers
        self.step()

    def copy(self, src: BlockTable, dst: BlockTable) -> None:
        for a, b in zip(src[0].tolist(), dst[0].tolist(), strict=False):
            for slot in range(BLOCK if a >= 0 and b >= 0 else 0):
                self.agent.memory[b, slot] = self.agent.memory.get((a, slot))

    def holds(self, inquiry: Inquiry) -> HeldPrefix | None:
        if (found := self.index.find(inquiry.chain)) is None:
            return None
        prompt, blocks = found.name
        cached = list(takewhile(lambda one: self.pool.cached.get(one) == prompt, blocks[: found.tokens // BLOCK]))
        return HeldPrefix(len(cached) * BLOCK, BlockTable.of([cached])) if cached else None

    def table(self, request: str) -> BlockTable:
        if request not in self.tables:
            self.tables[request] = BlockTable.of([self.pool.take(TOKENS // BLOCK)])
        return self.tables[request]

    def drop(self, request: str) -> None:
        """Let a request have no blocks."""
        self.computed.pop(request, None)
        if (table := self.tables.pop(request, None)) is not None:
            self.pool.free(table.ids())

    def expect(self, prompt: int, table: BlockTable, first: int, past: int) -> None:
        for at in range(first, past):
            assert self.agent.memory.get((int(table[0][at // BLOCK]), at % BLOCK)) == (prompt, at)

    def with_one_of(self, table: BlockTable, tokens: int, others: Iterable[int]) -> BlockTable:
        """Return a table in which the last block of these tokens is that of somebody else."""
        row = table[0].tolist()
        row[(tokens - 1) // BLOCK] = self.rng.choice(sorted(others))
        return BlockTable.of([row])

    @property
    def whole(self) -> list[int]:
        """The prompts of which all is offered."""
        return [PREFIXES[one.digest] for one in self.agent.offers.values() if one.final and not one.transfer.is_asked]

    @property
    def filled(self) -> set[int]:
        """The blocks to which loads write of which the engine waits."""
        return {
            block
            for table, first, past in self.moving.values()
            for block in table[0][first // BLOCK : past // BLOCK].tolist()
        }

    @property
    def read(self) -> set[int]:
        """The blocks that others may read."""
        return {block for found in self.side._schedule.producer if found.offered for block in found.blocks.ids()}

    # --- the calls -----------------------------------------------------------------------------------------------------

    def offer(self, request: str) -> None:
        n = self.rng.randrange(3)
        if self.side.offer(request, *named(n), TOKENS):
            if self.offers.get(request, n) != n:  # its first offer is over
                self.drop(request)
            self.offers[request] = n

    def load(self, request: str, source: Source, whole: Sequence[int]) -> None:
        offered = self.rng.random() < 0.7
        n = self.rng.choice(whole) if whole and offered else self.rng.randrange(3)
        self.side.load(request, *named(n), source, TOKENS, offered=offered, begun=offered or self.rng.random() < 0.5)

    def ask(self, request: str, source: Source) -> None:
        self.side.ask(request, PROMPTS[self.rng.randrange(3)], [source], self.rng.choice([TOKENS, 48]))

    def allocated(self, request: str) -> None:
        if request in self.moving:
            return
        computed = self.rng.choice([0, 0, 0, BLOCK])
        external = self.side.loadable(request, computed) or 0
        prefetched, table = self.side.is_prefetched(request), self.table(request)
        used = self.read | self.filled
        if external and used and self.rng.random() < 0.1:
            with pytest.raises(ScheduleError, match="still uses: give each block to one of them"):
                self.side.allocated(request, self.with_one_of(table, computed + external, used), external)
            return
        if self.rng.random() < 0.2:
            external = self.rng.choice([0, BLOCK, external // BLOCK // 2 * BLOCK, TOKENS])
        load = Loading(self.side._schedule.consumer).of(request)
        prompt = None if load is None else PREFIXES[load.transfer.digest]
        self.side.allocated(request, table, external)
        if external:
            self.computed.pop(request, None)
            self.pool.forget(table[0].tolist())
        if external and prompt is not None:
            if prefetched:
                step = self.give()
                assert load is not None and any(copy.number == load.fetched for copy in step.copies)
                self.expect(prompt, table, computed, computed + external)
                self.go_on(step)
            else:
                self.begun[request] += 1
                self.pool.touch(table.ids())
                self.moving[request] = table, computed, computed + external
                self.wants[request] = prompt

    def runs(self, *requests: str) -> None:
        """Have a step compute for these requests."""
        work = []
        for request in requests:
            if request in self.moving or (n := self.offers.get(request)) is None:
                continue  # no engine runs what is being loaded
            tokens, table, before = (
                self.rng.choice([BLOCK, 32, TOKENS]),
                self.table(request),
                self.computed.get(request, 0),
            )
            self.expect(n, table, 0, before)
            if Offers(self.side._schedule.producer).run_by(request) and self.filled and self.rng.random() < 0.1:
                with pytest.raises(ScheduleError, match="run it once that load is over"):
                    self.side.runs(request, 0, tokens, self.with_one_of(table, tokens, self.filled))
                continue
            self.side.runs(request, 0, tokens, table)
            self.computed[request] = max(tokens, before)
            work.append((n, tokens, table))
        step = self.give()
        for n, tokens, table in work:
            for at in range(tokens):
                self.agent.memory[int(table[0][at // BLOCK]), at % BLOCK] = n, at
            self.index.add(Prefix([n] * tokens, model="m"), (n, table[0].tolist()))
            self.pool.cached.update(dict.fromkeys(table[0].tolist()[: tokens // BLOCK], n))
        self.go_on(step)

    def preempted(self, request: str) -> None:
        self.side.preempted(request)
        self.drop(request)

    def finished(self, request: str) -> None:
        complete, table = self.rng.random() < 0.5, self.tables.get(request, BlockTable.of([[]]))
        if self.side.finished(request, table, complete, good=not complete and self.rng.random() < 0.5):
            self.held[request] = self.tables.pop(request)
        self.drop(request)
        self.wants.pop(request, None)
        self.offers.pop(request, None)

    def ahead(self, request: str, peer: Walker) -> None:
        """A new request that is loaded before it has blocks, if the peer offers something whole."""
        self.finished(request)
        if peer.whole:
            self.side.load(request, *named(self.rng.choice(peer.whole)), peer.side.source, TOKENS, offered=True)
            self.side.prefetch(request, 0)
            for load in list(self.agent.loads.values()):
                self.wire.begin(load)
                self.wire.settle(load)
            self.allocated(request)

    def freed(self, request: str) -> None:
        if request in self.held:
            self.side.freed(request)
            self.pool.free(self.held.pop(request).ids())

    def give(self) -> Any:
        """Have the worker begin what a step says."""
        with never_wrong():
            step = self.side.step()
        self.worker.begin(step)
        self.worker.load(step)
        return step

    def go_on(self, step: Any) -> None:
        self.worker.after_forward(step)
        with never_wrong():
            update = self.side.report(self.worker.collect())
        self.hear(update)

    def step(self) -> None:
        self.go_on(self.give())

    def hear(self, update: Any) -> None:
        assert not update.loaded & update.failed.keys()
        for request in update.free:
            self.pool.free(self.held.pop(request).ids())
        for request in update.loaded | update.failed.keys():
            self.told[request] += 1
            assert self.told[request] <= self.begun[request], f"{request} ends twice"
            table, first, past = self.moving.pop(request)
            if request in update.failed:  # some rank may still write to its blocks
                self.preempted(request)
            elif request in self.wants and self.tables.get(request) is table:
                self.expect(self.wants[request], table, first, update.short.get(request, past))
            self.pool.free(table.ids())

    def call(self, request: str, peer: Walker) -> None:
        """One call, whatever it is good for."""
        side, rng, other = self.side, self.rng, peer.side.source
        calls: list[tuple[int, Callable[[], object]]] = [
            (3, lambda: self.offer(request)),
            (6, lambda: self.load(request, rng.choice([other, other, side.source]), peer.whole)),
            (4, lambda: self.ask(request, rng.choice([other, other, side.source]))),
            (6, lambda: side.loadable(request, rng.choice([0, 0, BLOCK, TOKENS]))),
            (6, lambda: side.prefetch(request, 0)),
            (6, lambda: self.allocated(request)),
            (4, lambda: self.ahead(request, peer)),
            (8, lambda: self.runs(*rng.sample(NAMES, 2))),
            (2, lambda: self.preempted(request)),
            (4, lambda: self.finished(request)),
            (1, lambda: self.freed(request)),
            (1, lambda: request in self.moving or side.confirm_load_ended(request)),
            (1, lambda: side.takes_no_part(request, "why not")),
            (1, lambda: (side.asking(request), side.is_prefetched(request), side.follows(request))),
            (1, lambda: (side.ticket(request), side.waiting, len(side), side.loads.wait_alone())),
            (1, side.short_of_blocks),
            (1, lambda: side.stands_still(rng.random() < 0.5)),
            (1, lambda: rng.random() < 0.2 and side.withdraw_all("other weights")),
            (1, lambda: side.offers.withdraw(request, "it is not good")),
            (1, lambda: side.offers.unanswered(request)),
            (10, self.step),
        ]
        (chosen,) = rng.choices([call for _, call in calls], [weight for weight, _ in calls])
        try:
            chosen()
        except KvxferError:
            pass  # a wrong call, which says so

    def end(self) -> None:
        for request in NAMES:
            self.finished(request)
        self.side.withdraw_all("it is over")


def happens(wire: Wire, rng: random.Random) -> None:
    """What moves between the engines moves on, or fails."""
    for load in wire.loads:
        what = rng.random()
        offers = [agent.offers.get(load.fetch.transfer) for agent in wire.sources[load.fetch.source]]
        if any(one is not None and one.digest != load.fetch.digest for one in offers):
            wire.fail(load, "it is something else")
        elif what < 0.6:
            if wire.begin(load) and rng.random() < 0.7:
                wire.settle(load)
        elif what < 0.65:
            wire.fail(load, "the link broke", quiet=False)
        elif what < 0.75 and load.ended:
            wire.scribble(load)
        elif what < 0.9 and load.ended:
            wire.quiet(load)


@pytest.mark.parametrize("direct", [True, False], ids=["ahead of steps", "with steps"])
@pytest.mark.parametrize("seed", range(12))
def test_any_calls_in_any_order(seed: int, direct: bool) -> None:
    walk(seed, direct, 400)


@pytest.mark.parametrize("table", [LOAD, OFFERING, ASK], ids=["load", "offering", "question"])
def test_any_calls_whatever_a_table_refuses(
    table: Transitions[Any, Any], monkeypatch: pytest.MonkeyPatch, illegal_transitions: list[str]
) -> None:
    """A move that happens, taken for one that never does: the same holds."""
    for n, pair in enumerate(table.moves):
        with monkeypatch.context() as broken:
            broken.delitem(table.leads, pair)
            walk(n % 12, n % 5 < 3, 250)
    refused = {said.rpartition(":")[0] for said in illegal_transitions}
    illegal_transitions.clear()
    assert len(refused) >= 2, "the walks come to hardly any of them"


def walk(seed: int, direct: bool, calls: int) -> None:
    rng, wire = random.Random(seed), Wire()
    pair = [Walker(wire, rng, Switchboard() if direct else None) for _ in range(2)]
    try:
        for _ in range(calls):
            at = rng.randrange(2)
            pair[at].call(rng.choice(NAMES), pair[1 - at])
            happens(wire, rng)
        for walker in pair:
            walker.end()

        def over() -> bool:
            for load in wire.loads:
                wire.fail(load, "it is over")
            for walker in pair:
                walker.step()
            return not any(len(walker.side) or walker.side.waiting for walker in pair)

        until(over, 20.0)
        for walker in pair:
            assert walker.told == walker.begun and not walker.moving and not walker.held
            assert not walker.pool.used(), "something is still held"
            assert not len(walker.side._requests) and not len(walker.worker)
    finally:
        for walker in pair:
            walker.side.close()
