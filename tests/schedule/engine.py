"""A small model of an engine's scheduler and cache, for the tests to drive `kvxfer.schedule` with.

Written from what vLLM's does, as plainly as possible, and without a look at how the code under test works: a block
pool with a prefix cache, chunked prefill under a budget, preemption of the last running request, windows that give
blocks up, asynchronous loads. Every slot of every block knows what was last written to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvxfer.identity import Source
from kvxfer.schedule import Schedule
from kvxfer.values import BlockTable, Fetch, Group
from tests.schedule.ends import Loading, Offers, loaded, preempt

WINDOW = 5
STATE = 1000  # block size of a group whose one block holds the state, whatever its tokens


def ceil(tokens: int, block: int) -> int:
    return (tokens + block - 1) // block


@dataclass(eq=False, repr=False)
class Request:
    id: str
    tokens: list[int]  # prompt, then what was sampled
    prompt: int
    max_tokens: int
    computed: int = 0
    table: list[list[int]] = field(default_factory=list)
    loading: bool = False
    over: bool = False
    stop: bool = False  # a stop token will come next
    unsettled: int = 0  # sampled in steps whose results the scheduler has not seen


@dataclass
class Scheduled:
    request: Request
    computed: int
    tokens: int
    table: list[list[int]]
    sampled: bool


class ScheduledEngine:
    def __init__(self, groups: Sequence[Group], own: Source, blocks: int, budget: int) -> None:
        self.groups = list(groups)
        self.schedule = Schedule(groups, own)
        self.producer, self.consumer = Offers(self.schedule.producer), Loading(self.schedule.consumer)
        self.budget = budget
        self.caching = all(group.kind != "state" for group in groups)
        self.free = list(range(1, blocks + 1))
        self.refs = dict.fromkeys(self.free, 0)
        self.memory: dict[int, dict[int, Any]] = {block: {} for block in self.free}
        self.cache: dict[Any, int] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.held: dict[str, Request] = {}

    # Blocks

    def take(self) -> int:
        block = self.free.pop(0)
        self.cache = {key: cached for key, cached in self.cache.items() if cached != block}
        self.refs[block] = 1
        return block

    def touch(self, block: int) -> int:
        if self.refs[block] == 0:
            self.free.remove(block)
        self.refs[block] += 1
        return block

    def give(self, block: int) -> None:
        if block != -1:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free.append(block)

    def give_all(self, request: Request) -> None:
        for row in request.table:
            for block in reversed(row):
                self.give(block)
        request.table = [[] for _ in self.groups]

    def first_needed(self, group: Group, computed: int) -> int:
        """The first position whose block token `computed` attends to."""
        return max(0, computed - WINDOW + 1) // group.block_tokens if group.kind == "window" else 0

    def grow(self, request: Request, start: int, tokens: int) -> bool:
        """Make room for `tokens` tokens, of which `start` are computed; give up what no token to come needs."""
        need = 0
        for group, row in zip(self.groups, request.table, strict=True):
            first = self.first_needed(group, start)
            for i in range(min(first, len(row))):
                self.give(row[i])
                row[i] = -1
            need += ceil(tokens, group.block_tokens) - max(first, len(row))
        if need > len(self.free):
            return False
        for group, row in zip(self.groups, request.table, strict=True):
            first = self.first_needed(group, start)
            while len(row) < ceil(tokens, group.block_tokens):
                row.append(-1 if len(row) < first else self.take())
        return True

    def remember(self, request: Request, tokens: int) -> None:
        """Enter the full blocks of the first `tokens` tokens into the prefix cache."""
        if self.caching:
            for g, (group, row) in enumerate(zip(self.groups, request.table, strict=True)):
                for i in range(tokens // group.block_tokens):
                    key = g, tuple(request.tokens[: (i + 1) * group.block_tokens])
                    if row[i] != -1:
                        self.cache.setdefault(key, row[i])

    def hit(self, request: Request) -> tuple[int, list[list[int]]]:
        """The longest cached prefix that leaves a token to compute, and its blocks."""
        if self.caching:
            for tokens in range(len(request.tokens) - 1, 0, -1):
                table = self.cached(request.tokens, tokens)
                if table is not None:
                    return tokens, table
        return 0, [[] for _ in self.groups]

    def cached(self, prompt: list[int], tokens: int) -> list[list[int]] | None:
        table = []
        for g, group in enumerate(self.groups):
            if tokens % group.block_tokens:
                return None
            row = []
            for i in range(tokens // group.block_tokens):
                block = self.cache.get((g, tuple(prompt[: (i + 1) * group.block_tokens])), -1)
                if i < self.first_needed(group, tokens):
                    block = -1
                elif block == -1:
                    return None
                row.append(block)
            table.append(row)
        return table

    # Requests

    def add(self, request: Request) -> None:
        request.table = [[] for _ in self.groups]
        self.waiting.append(request)

    def preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        self.give_all(victim)
        del victim.tokens[len(victim.tokens) - victim.unsettled :]
        victim.unsettled = victim.computed = 0
        self.waiting.insert(0, victim)
        self.producer.preempt(victim.id)
        preempt(self.consumer, victim.id)

    def finish(self, request: Request, complete: bool) -> bool:
        request.over = True
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.consumer.finish(request.id)
        held = self.producer.finish(
            request.id,
            BlockTable.of(
                row[: ceil(request.computed, group.block_tokens)]
                for group, row in zip(self.groups, request.table, strict=True)
            ),
            complete,
        )
        assert not (held and request.loading)
        if held:
            self.held[request.id] = request
        elif not request.loading:
            self.give_all(request)
        return held

    def release(self, request: str) -> None:
        self.give_all(self.held.pop(request))

    # Steps

    def plan(self) -> list[Scheduled]:
        """One call of the scheduler, with all that it tells its connector."""
        batch: list[Scheduled] = []
        budget = self.budget
        preempted = False
        for request in list(self.running):
            tokens = min(len(request.tokens) - request.computed, budget)
            if request not in self.running or tokens == 0 or self.exhausted(request):
                continue
            while not self.grow(request, request.computed, request.computed + tokens):
                preempted = True
                victim = self.running[-1]
                self.preempt(victim)
                if victim is request:
                    break
            else:
                budget -= tokens
                self.put(batch, request, tokens)
        if not preempted:
            for request in list(self.waiting):
                if budget == 0 or not self.admit(batch, request, budget):
                    break
                budget = self.budget - sum(scheduled.tokens for scheduled in batch)
        return batch

    def exhausted(self, request: Request) -> bool:
        return len(request.tokens) - request.prompt >= request.max_tokens

    def put(self, batch: list[Scheduled], request: Request, tokens: int) -> None:
        start = request.computed
        request.computed += tokens
        self.remember(request, request.computed)
        table = [list(row) for row in request.table]
        sampled = request.computed == len(request.tokens)
        if sampled:
            request.tokens.append(1 + (sum(request.tokens) + len(request.tokens)) % 2)
            request.unsettled += 1
        batch.append(Scheduled(request, start, tokens, table, sampled))
        self.producer.step(request.id, start, tokens, BlockTable.of(table))

    def admit(self, batch: list[Scheduled], request: Request, budget: int) -> bool:
        """False if there is no room, and so none for those behind."""
        if request.loading:
            return True
        external = 0
        fresh = request.computed == 0  # else its tokens were loaded, and it keeps their blocks
        if fresh:
            cached, table = self.hit(request)
            matched = self.consumer.matched(request.id, cached)
            assert matched == self.consumer.matched(request.id, cached)
            if matched is None:
                return True
            external = matched
            request.table = [[block if block == -1 else self.touch(block) for block in row] for row in table]
            request.computed = cached
        tokens = external or min(len(request.tokens) - request.computed, budget)
        start = request.computed + external
        if not self.grow(request, start, request.computed + tokens):
            if fresh:
                self.give_all(request)
                request.computed = 0
            return False
        self.consumer.allocated(request.id, BlockTable.of(request.table), request.computed, external)
        if external:
            request.loading = True
            return True
        self.waiting.remove(request)
        self.running.append(request)
        self.put(batch, request, tokens)
        return True

    def execute(self, batch: list[Scheduled]) -> None:
        """The forward pass."""
        for scheduled in batch:
            tokens = scheduled.request.tokens
            for position in range(scheduled.computed, scheduled.computed + scheduled.tokens):
                self.write(scheduled.table, tokens, position)

    def write(self, table: Sequence[Sequence[int]], tokens: list[int], position: int) -> None:
        for g, (group, row) in enumerate(zip(self.groups, table, strict=True)):
            block = row[position // group.block_tokens]
            slot = 0 if group.kind == "state" else position % group.block_tokens
            if block != -1:
                self.memory[block][slot] = (g, *tokens[: position + 1])

    def settle(self, batch: list[Scheduled]) -> list[tuple[Request, bool]]:
        """The scheduler sees a step's results. Returns the requests that it finished, and whether it holds them."""
        finished = []
        for scheduled in batch:
            request = scheduled.request
            if not scheduled.sampled or request not in self.running or not request.unsettled:
                continue
            request.unsettled -= 1
            if request.stop or (self.exhausted(request) and not request.unsettled):
                finished.append((request, self.finish(request, True)))
        return finished

    def load(self, want: Fetch, request: Request, ok: bool) -> None:
        """The workers' part of a load, and the scheduler's when they report it."""
        for g, (group, row) in enumerate(zip(self.groups, want.blocks.tolist(), strict=True)):
            for position in range(want.start, want.tokens):
                block = row[position // group.block_tokens] if position // group.block_tokens < len(row) else -1
                if block != -1:
                    slot = 0 if group.kind == "state" else position % group.block_tokens
                    self.memory[block][slot] = (g, *request.tokens[: position + 1]) if ok else "junk"
        loaded(self.consumer, request.id)
        request.loading = False
        if request.over or not ok:
            self.give_all(request)
            request.computed = 0
        else:
            self.remember(request, want.tokens)
            request.computed = min(want.tokens, len(request.tokens) - 1)

    # Truth

    def holds(self, table: Sequence[Sequence[int]], tokens: Sequence[int], computed: int) -> bool:
        """Whether every block that is there holds what these tokens would have written."""
        for g, (group, row) in enumerate(zip(self.groups, table, strict=True)):
            if group.kind == "local":
                continue  # what came from outside came without it
            positions = [computed - 1] if group.kind == "state" else range(computed)
            for position in positions:
                block = row[position // group.block_tokens] if position // group.block_tokens < len(row) else -1
                slot = 0 if group.kind == "state" else position % group.block_tokens
                if block != -1 and self.memory[block].get(slot) != (g, *tokens[: position + 1]):
                    return False
        return True
