"""A small paged engine: a scheduler with chunked prefill, prefix cache and preemption, and a process for each rank."""

from __future__ import annotations

import multiprocessing as mp
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from model import BLOCK, DIM, HEADS
from pool import Pool
from worker import FACTS, GROUP, run_worker

from kvxfer import BlockTable, Config, Ticket, TransferId
from kvxfer.engine import BlockPins, Report, SchedulerSide
from kvxfer.facts import sealed
from kvxfer.identity import digest

spawn = mp.get_context("spawn")


@dataclass(eq=False)
class Request:
    """One prompt and its answer."""

    name: str
    tokens: list[int]  # prompt and answer
    prompt: int
    goal: int
    transfer: TransferId | None = None  # what it offers
    table: list[int] = field(default_factory=list)
    computed: int = 0
    loading: bool = False


class Engine:
    """The scheduler. ``front`` sends arguments of ``add``, and ``None`` for the end; it gets tickets and answers."""

    def __init__(self, front: Connection, tp: int, blocks: int, budget: int) -> None:
        self.front, self.budget, self.pool = front, budget, Pool(blocks)
        # --8<-- [start:scheduler]
        self.side = SchedulerSide(Config(), "paged", (GROUP,), tp, FACTS, pins=BlockPins(blocks // 4, self.pool))
        # --8<-- [end:scheduler]
        self.requests: list[Request] = []
        self.held: dict[str, Request] = {}
        self.counts = Counter[str]()
        self.shared = spawn.RawArray("d", tp * budget * HEADS * DIM), spawn.Barrier(tp)
        self.workers, theirs = zip(*(spawn.Pipe() for _ in range(tp)), strict=True)
        for rank, pipe in enumerate(theirs):
            spawn.Process(target=run_worker, args=(pipe, rank, tp, blocks, *self.shared), daemon=True).start()

    # --8<-- [start:requests]
    def add(self, name: str, prompt: list[int], goal: int, offers: bool, text: str | None) -> None:
        """Take a request that ``offers`` its prompt's KV to others, or has a ticket for it, or neither."""
        request = Request(name, list(prompt), len(prompt), len(prompt) + goal)
        self.requests.append(request)
        content = digest(tokens=prompt, model=sealed(FACTS))
        if offers:
            request.transfer = TransferId.mint(self.side.source.epoch, name)
            self.side.offer(name, request.transfer, content, len(prompt))
            self.front.send((name, self.side.ticket(name).text))
        if text is not None and (ticket := Ticket.read(text)).digest == content:
            self.side.load(name, ticket.transfer, ticket.digest, ticket.source, len(prompt))

    # --8<-- [end:requests]
    # --8<-- [start:admit]
    def admit(self, request: Request) -> None:
        """Give it the blocks of its prefix that are here, and have what can come from elsewhere loaded."""
        for end in range(BLOCK, len(request.tokens), BLOCK):  # the last token is computed in any case
            block = self.pool.prefixes.get(tuple(request.tokens[:end]))
            if block is None:
                break
            self.pool.touch([block])
            request.table.append(block)
        request.computed = len(request.table) * BLOCK
        external = self.side.loadable(request.name, request.computed)
        if external is None or not self.grow(request, max(request.computed + external, 1)):
            return self.drop(request)  # and again in the next step
        self.side.allocated(request.name, BlockTable.of([request.table]), external)
        request.loading = external > 0
        self.counts["cached"] += request.computed

    # --8<-- [end:admit]
    # --8<-- [start:preempt]
    def grow(self, request: Request, tokens: int) -> bool:
        """Have blocks for so many tokens; preempt what came last if need be."""
        need = GROUP.blocks(tokens) - len(request.table)
        while need > len(self.pool.unused):
            later = self.requests[self.requests.index(request) + 1 :]
            last = next((r for r in reversed(later) if r.table and not r.loading), None)
            if last is None:
                return False
            self.side.preempted(last.name)
            self.drop(last)
            self.counts["preempted"] += 1
        request.table += [self.pool.take() for _ in range(need)]
        return True

    # --8<-- [end:preempt]
    def drop(self, request: Request) -> None:
        self.pool.free(request.table[::-1])
        request.table, request.computed = [], 0

    # --8<-- [start:step]
    def step(self) -> None:
        """Plan a step, have it computed, take in what has come of it."""
        budget, batch = self.budget, {}
        for request in self.requests:
            if not request.table:
                self.admit(request)
            n = 0 if request.loading or not request.table else min(budget, len(request.tokens) - request.computed)
            if n and self.grow(request, request.computed + n):
                start, request.computed, budget = request.computed, request.computed + n, budget - n
                self.side.runs(request.name, start, n, BlockTable.of([request.table]))
                offered = request.transfer if request.computed == request.prompt else None
                tokens = request.tokens[start : request.computed]
                batch[request] = request.name, tokens, start, list(request.table), offered
        step = self.side.step()
        if not batch and not step:
            wait([self.front, *self.workers], 1.0)  # for a request or a report; and some steps a lease are needed
            return self.hear(until_sampled=False)
        for worker in self.workers:
            worker.send((step, list(batch.values())))
        sampled = self.hear(until_sampled=True)
        for request in batch:
            for end in range(BLOCK, request.computed + 1, BLOCK):
                self.pool.prefixes.setdefault(tuple(request.tokens[:end]), request.table[end // BLOCK - 1])
            if request.computed == len(request.tokens):
                request.tokens.append(sampled[request.name])
        for request in [r for r in self.requests if len(r.tokens) >= r.goal]:
            self.requests.remove(request)
            self.front.send((request.name, request.tokens[request.prompt :]))
            if self.side.finished(request.name, BlockTable.of([request.table]), complete=True):
                self.held[request.name] = request  # until its consumer has it
            else:
                self.drop(request)

    # --8<-- [end:step]
    # --8<-- [start:reports]
    def hear(self, until_sampled: bool) -> Any:
        """Take in what workers report, up to their answers to a step if they owe any."""
        sampled = None
        for worker in self.workers:
            while until_sampled or worker.poll():
                sampled, report = worker.recv()
                self.take_in(report)
                if sampled is not None:
                    break
        return sampled

    def take_in(self, report: Report) -> None:
        update = self.side.report(report)
        for name in update.free:
            self.drop(self.held.pop(name))
        for request in self.requests:
            if request.name in update.loaded:
                first = update.payloads.get(request.name)
                request.loading, request.computed = False, request.prompt - (first is None)
                if first is not None:  # else the prompt's last token is computed again, for the one that follows it
                    request.tokens.append(int.from_bytes(first, "little"))
                self.counts["loaded"] += 1
            elif request.name in update.failed:  # its policy: compute it here, in blocks that nobody writes to any more
                request.loading = False
                self.drop(request)
                self.counts["failed"] += 1

    # --8<-- [end:reports]
    def run(self) -> None:
        while True:
            while self.front.poll():
                asked = self.front.recv()
                if asked is None:
                    self.front.send(("counts", dict(self.counts)))
                    for worker in self.workers:
                        worker.send(None)
                    return self.side.close()
                self.add(*asked)
            self.step()


def run_engine(*args: Any) -> None:
    """Run an engine in this process."""
    Engine(*args).run()
