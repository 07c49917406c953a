"""All public calls of both sides in any order: none raises but as documented, no load ends twice, nothing stays held, no byte is wrong."""

from __future__ import annotations

import operator
import random
from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from typing import Any
from unittest import mock

import pytest

from kvxfer import BlockTable, Config, Group, KvxferError, Source, TransferId
from kvxfer.engine import BlockPins, HeldPrefix, Inquiry, Prefix, PrefixIndex, ScheduleError, SchedulerSide, WorkerSide
from kvxfer.identity import RequestId
from kvxfer.schedule import ASK, LOAD, OFFERING
from kvxfer.testing.engine import until
from kvxfer.transitions import IllegalTransition, Transitions
from kvxfer.values import Rank
from tests.engine.direct import Switchboard
from tests.engine.small import FACTS, Agent, Lending, Wire

TOKENS, BLOCK = 64, 16
PROMPTS = [Prefix([n] * TOKENS, model="m") for n in range(3)]
PREFIXES = {prompt.digest(tokens): n for n, prompt in enumerate(PROMPTS) for tokens in range(BLOCK, TOKENS + 1, BLOCK)}
NAMES = ["a", "b", "c", "d"]
CONFIG = Config(ask="always", ask_tokens=1, ask_timeout=0.02, start_timeout=60.0)


class Walker:
    """One engine whose calls come in any order.

    Its blocks are computed for one prompt only, and it names none as cached that it has given to a load since, so that only kvxfer
    decides what is written to them.
    """

    def __init__(self, wire: Wire, rng: random.Random, board: Switchboard | None) -> None:
        self.rng, self.wire = rng, wire
        self.pool = Lending(4000)
        self.ours: list[int] = []
        self.index: PrefixIndex[list[int]] = PrefixIndex(1 << 20)
        self.cached: set[int] = set()  # the blocks that are still as the index has them
        with mock.patch("kvxfer.engine.dispatch.SideChannel", (board or Switchboard()).scheduler):
            pins = BlockPins(2000, self.pool)
            self.side = SchedulerSide(CONFIG, "walker", [Group(BLOCK)], 1, FACTS, pins=pins, holds=self.holds)
        self.agent = Agent(wire, [Group(BLOCK)], Rank(0, 0))
        channel = board.worker if board else None
        self.worker = WorkerSide(self.agent, quarantine=rng.choice([0, 1000]), copy=self.copy, channel=channel)  # type: ignore[arg-type]
        wire.sources[self.side.source] = [self.agent]
        self.tables: dict[str, BlockTable] = {}
        self.moving: dict[str, tuple[BlockTable, int, int]] = {}  # where tokens of a load are to be, and which
        self.begun, self.told = Counter[str](), Counter[str]()
        self.wants: dict[str, int] = {}  # the prompt that a request was told to load first
        self.step()

    def copy(self, src: BlockTable, dst: BlockTable) -> None:
        for a, b in zip(src[0].tolist(), dst[0].tolist(), strict=False):
            for slot in range(BLOCK if a >= 0 and b >= 0 else 0):
                self.agent.memory[b, slot] = self.agent.memory.get((a, slot))

    def holds(self, inquiry: Inquiry) -> HeldPrefix | None:
        found = self.index.find(inquiry.chain)
        blocks = [] if found is None else found.name[: found.tokens // BLOCK]
        cached = list(takewhile(self.cached.__contains__, blocks))
        return HeldPrefix(len(cached) * BLOCK, BlockTable.of([cached])) if cached else None

    def take(self) -> BlockTable:
        blocks = self.pool.take(TOKENS // BLOCK)
        self.ours += blocks
        return BlockTable.of([blocks])

    def table(self, request: str) -> BlockTable:
        if request not in self.tables:
            self.tables[request] = self.take()
        return self.tables[request]

    def compute(self, prompt: int, table: BlockTable, tokens: int) -> None:
        for at in range(tokens):
            self.agent.memory[int(table[0][at // BLOCK]), at % BLOCK] = prompt, at

    def expect(self, prompt: int, table: BlockTable, first: int, past: int) -> None:
        for at in range(first, past):
            assert self.agent.memory.get((int(table[0][at // BLOCK]), at % BLOCK)) == (prompt, at)

    # --- the calls -----------------------------------------------------------------------------------------------------

    def offer(self, request: str) -> None:
        n = self.rng.randrange(3)
        if self.side.offer(request, TransferId.routed(str(n)), PROMPTS[n].digest(TOKENS), TOKENS):
            if self.wants.get(f"offer {request}", n) != n:  # another request by the same name
                self.tables.pop(request, None)
            self.wants[f"offer {request}"] = n

    def load(self, request: str, source: Source) -> None:
        n, offered = self.rng.randrange(3), self.rng.random() < 0.7
        what = TransferId.routed(str(n)), PROMPTS[n].digest(TOKENS), source, TOKENS
        self.side.load(request, *what, offered=offered, begun=offered or self.rng.random() < 0.5)

    def ask(self, request: str, source: Source) -> None:
        self.side.ask(request, PROMPTS[self.rng.randrange(3)], [source], self.rng.choice([TOKENS, 48]))

    def allocated(self, request: str) -> None:
        computed = self.rng.choice([0, 0, BLOCK])
        external = self.side.loadable(request, computed) or 0
        if self.rng.random() < 0.3:
            external = self.rng.choice([0, BLOCK, external // BLOCK // 2 * BLOCK, TOKENS])
        prefetched, table = self.side.is_prefetched(request), self.table(request)
        load = self.side._schedule.consumer.of(RequestId(request))
        prompt = None if load is None else PREFIXES[load.wanted.digest]
        self.side.allocated(request, table, external)
        if external:
            self.cached.difference_update(table[0].tolist())
        if external and prompt is not None:
            if prefetched:
                step = self.give()
                assert any(copy.request == request for copy in step.copies)
                self.expect(prompt, table, computed, computed + external)
                self.go_on(step)
            else:
                self.begun[request] += 1
                self.moving[request] = table, computed, computed + external
                self.wants[request] = prompt

    def runs(self, request: str) -> None:
        if request in self.moving or (n := self.wants.get(f"offer {request}")) is None:
            return  # no engine runs what is being loaded
        tokens, table = self.rng.choice([BLOCK, 32, TOKENS]), self.table(request)
        self.compute(n, table, tokens)
        self.side.runs(request, 0, tokens, table)
        self.index.add(Prefix([n] * tokens, model="m"), table[0].tolist())
        self.cached.update(table[0].tolist()[: tokens // BLOCK])

    def preempted(self, request: str) -> None:
        self.side.preempted(request)
        self.tables.pop(request, None)

    def finished(self, request: str) -> None:
        complete = self.rng.random() < 0.5
        self.side.finished(request, self.table(request), complete, good=not complete and self.rng.random() < 0.5)
        for kept in (self.tables, self.wants):
            kept.pop(request, None)
        self.wants.pop(f"offer {request}", None)

    def give(self) -> Any:
        """Have the worker begin what a step says."""
        step = self.side.step()
        self.worker.begin(step)
        self.worker.load(step)
        return step

    def go_on(self, step: Any) -> None:
        self.worker.after_forward(step)
        self.hear(self.side.report(self.worker.collect()))

    def step(self) -> None:
        self.go_on(self.give())

    def hear(self, update: Any) -> None:
        assert not update.loaded & update.failed.keys()
        for request in update.loaded | update.failed.keys():
            self.told[request] += 1
            assert self.told[request] <= self.begun[request], f"{request} ends twice"
            table, first, past = self.moving.pop(request)
            if request in update.failed:  # some rank may still write to its blocks
                self.preempted(request)
            elif request in self.wants:
                self.expect(self.wants[request], table, first, update.short.get(request, past))

    def call(self, request: str, other: Source) -> None:
        """One call, whatever it is good for."""
        side, rng = self.side, self.rng
        calls: list[tuple[int, Callable[[], object]]] = [
            (3, lambda: self.offer(request)),
            (6, lambda: self.load(request, rng.choice([other, other, side.source]))),
            (4, lambda: self.ask(request, rng.choice([other, other, side.source]))),
            (6, lambda: side.loadable(request, rng.choice([0, 0, BLOCK, TOKENS]))),
            (2, lambda: side.prefetch(request, 0)),
            (6, lambda: self.allocated(request)),
            (8, lambda: self.runs(request)),
            (2, lambda: self.preempted(request)),
            (4, lambda: self.finished(request)),
            (1, lambda: side.freed(request)),
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
            self.side.finished(request, self.table(request), False)
        self.side.withdraw_all("it is over")


def happens(wire: Wire, rng: random.Random) -> None:
    """What moves between the engines moves on, or fails."""
    for load in wire.loads:
        what = rng.random()
        offers = [agent.offers.get(load.fetch.transfer) for agent in wire.sources[load.fetch.source]]
        if any(one is not None and one.digest != load.fetch.digest for one in offers):
            wire.fail(load, "it is something else")
        elif what < 0.4:
            if wire.begin(load):
                wire.settle(load)
        elif what < 0.5:
            wire.fail(load, "the link broke", quiet=False)
        elif what < 0.6 and load.ended:
            wire.scribble(load)
        elif what < 0.8 and load.ended:
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
            pair[at].call(rng.choice(NAMES), pair[1 - at].side.source)
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
            assert walker.told == walker.begun and not walker.moving
            walker.pool.free(walker.ours)
            assert not walker.pool.used(), "something is still held"
            assert not walker.side._asks._asks and not len(walker.worker)
    finally:
        for walker in pair:
            walker.side.close()


BROKEN: dict[str, tuple[str, Callable[[SchedulerSide], object], object]] = {
    "load": ("loads.arrived", lambda side: side.load("r", TransferId.routed("x"), b"x", side.source, 64), False),
    "ask": ("_asks.ask", lambda side: side.ask("r", PROMPTS[0], [Source("127.0.0.1", 1, 1)], 64), False),
    "offer": ("offers.arrived", lambda side: side.offer("r", TransferId.routed("x"), b"x", 64), False),
    "loadable": ("loads.loadable", lambda side: side.loadable("r", 0), 0),
    "admitted": ("_asks.admitted", lambda side: side.allocated("r", BlockTable.of([[]]), 0), None),
    "preempted": ("loads.preempted", lambda side: side.preempted("r"), None),
    "finished": ("loads.finished", lambda side: side.finished("r", BlockTable.of([[]]), False), False),
}


@pytest.mark.parametrize("call", BROKEN)
def test_a_bug_in_what_follows_a_call_ends_that_request_only(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, illegal_transitions: list[str]
) -> None:
    where, make, returned = BROKEN[call]
    with mock.patch("kvxfer.engine.dispatch.SideChannel", Switchboard().scheduler):
        side = SchedulerSide(CONFIG, "e", [Group(BLOCK)], 1, FACTS)
    try:
        for request in ("r", "other"):
            if call not in ("ask", "offer", "load") or request == "other":
                assert side.load(request, TransferId.routed(request), b"x", side.source, 64)
        with monkeypatch.context() as broken:
            broken.setattr(operator.attrgetter(where.rpartition(".")[0])(side), where.rpartition(".")[2], _refuses)
            assert make(side) == returned
            assert caplog.text.count("request r is computed here, because of a bug of kvxfer's") == 1
            assert illegal_transitions == ["it never happens"]
            if returned is None and call == "admitted":
                with pytest.raises(ScheduleError, match="cannot be loaded"):
                    side.allocated("r", BlockTable.of([[]]), 16)
        illegal_transitions.clear()
        assert side.loadable("r", 0) == 0 and side.loadable("other", 0) == 64
        for request in ("r", "other"):
            side.finished(request, BlockTable.of([[]]), False)
        until(lambda: side.step() is not None and not len(side))
    finally:
        side.close()


def _refuses(*given: object) -> None:
    raise IllegalTransition("it never happens")
