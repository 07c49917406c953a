"""A small paged engine: a scheduler with chunked prefill, prefix cache and preemption, and a process for each rank."""

import multiprocessing as mp
import random
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from worker import BLOCK, DIM, FACTS, HEADS, VOCAB, run_worker

from kvxfer import BlockTable, Config, Group, Ticket, TransferId, digest, sealed
from kvxfer.engine import BlockPins, PrefixPool, SchedulerSide


@dataclass(eq=False)
class Request:
    """A prompt and its answer, up to ``goal`` tokens in all."""

    name: str
    tokens: list[int]
    goal: int
    table: list[int] = field(default_factory=list)
    computed: int = 0
    loading: int = 0


class Engine:
    """The scheduler of ``tp`` ranks, which compute up to ``budget`` tokens a step."""

    def __init__(self, tp: int, blocks: int, budget: int) -> None:
        self.budget, self.pool, self.counts = budget, PrefixPool(blocks, BLOCK), Counter[str]()
        self.requests, self.done = list[Request](), dict[str, Request]()
        pins = BlockPins(blocks // 4, self.pool)
        self.side = SchedulerSide(Config(), "paged", [Group(BLOCK)], tp, FACTS, pins=pins)
        spawn = mp.get_context("spawn")
        self.shared = spawn.RawArray("d", tp * budget * HEADS * DIM), spawn.Barrier(tp)
        self.workers, steps = zip(*(spawn.Pipe() for _ in range(tp)), strict=True)
        self.reports, ends = zip(*(spawn.Pipe() for _ in range(tp)), strict=True)
        for rank in range(tp):
            spawn.Process(target=run_worker, args=(steps[rank], ends[rank], rank, tp, blocks, *self.shared)).start()

    def add(self, name: str, prompt: list[int], answer: int, offers: bool = False, ticket: str = "") -> str:
        """Take a request, perhaps with a ticket for its prompt's KV; return one if it offers that to others."""
        self.requests.append(Request(name, list(prompt), len(prompt) + answer))
        content = digest(tokens=prompt, model=sealed(FACTS))
        if ticket and (found := Ticket.read(ticket)).digest == content:
            self.side.load(name, found.transfer, content, found.source, len(prompt) - 1)
        if offers:
            self.side.offer(name, TransferId.mint(self.side.source.epoch, name), content, len(prompt))
        return self.side.ticket(name).text if offers else ""

    def admit(self, request: Request) -> None:
        """Give it the blocks of its prefix that are here, and have what can come from elsewhere loaded."""
        request.table = self.pool.prefix(request.tokens[:-1])  # the last token is computed in any case
        request.computed = len(request.table) * BLOCK
        external = self.side.loadable(request.name, request.computed)
        if external is None or not self.grow(request, max(request.computed + external, 1)):
            return self.drop(request)  # and again in the next step
        self.side.allocated(request.name, BlockTable.of([request.table]), external)
        request.loading = external
        self.counts["cached"] += request.computed

    def grow(self, request: Request, tokens: int) -> bool:
        """Have blocks for this number of tokens; preempt what came last if need be."""
        while not self.pool.grow(request.table, tokens):
            later = self.requests[self.requests.index(request) + 1 :]
            victim = next((r for r in reversed(later) if r.table and not r.loading), None)
            if victim is None:
                return False
            self.side.preempted(victim.name)
            self.drop(victim)
            self.counts["preempted"] += 1
        return True

    def drop(self, request: Request) -> None:
        self.pool.free(request.table[::-1])
        request.table, request.computed, request.loading = [], 0, 0

    def step(self) -> bool:
        """Plan a step and have it computed, if there is anything to do; then take in what has ended."""
        budget, batch = self.budget, {}
        for request in self.requests:
            if not request.table:
                self.admit(request)
            n = min(budget, len(request.tokens) - request.computed) if request.table and not request.loading else 0
            if n and self.grow(request, request.computed + n):
                start, request.computed, budget = request.computed, request.computed + n, budget - n
                self.side.runs(request.name, start, n, BlockTable.of([request.table]))
                batch[request] = request.tokens[start : request.computed], start, request.table
        step = self.side.step()
        if batch or step:
            for worker in self.workers:
                worker.send((step, list(batch.values())))
            sampled, *_ = [worker.recv() for worker in self.workers]
            for request, token in zip(batch, sampled, strict=True):
                self.pool.remember(request.tokens[: request.computed], request.table)
                if request.computed == len(request.tokens):
                    request.tokens.append(token)
                if len(request.tokens) == request.goal:
                    self.requests.remove(request)
                    self.done[request.name] = request
                    if not self.side.finished(request.name, BlockTable.of([request.table]), complete=True):
                        self.drop(request)  # else once its consumer has it
        for pipe in wait(self.reports, 0):
            update = self.side.report(pipe.recv())
            for request in self.requests:
                if request.name in update.loaded:
                    request.computed, request.loading = request.computed + request.loading, 0
                    self.counts["loaded"] += 1
                elif request.name in update.failed:  # our policy: compute it here, in other blocks
                    self.drop(request)
            for name in update.free:
                self.drop(self.done[name])
        return bool(batch or step)


def run(*engines: Engine) -> list[list[int]]:
    """Run engines until the last one has answered all; return its answers."""
    while engines[-1].requests:
        if not sum(engine.step() for engine in engines):
            wait([pipe for engine in engines for pipe in engine.reports], 1.0)
    for engine in engines:
        for worker in engine.workers:
            worker.send(None)
        engine.side.close()
    return [request.tokens for _, request in sorted(engines[-1].done.items())]


if __name__ == "__main__":
    rng = random.Random(0)
    alike = rng.choices(range(VOCAB), k=16)  # as half of the prompts begin
    prompts = [alike[: 16 * (i % 2)] + rng.choices(range(VOCAB), k=rng.randrange(5, 40)) for i in range(12)]
    alone = Engine(tp=1, blocks=400, budget=64)
    prefill, decode = Engine(tp=2, blocks=24, budget=16), Engine(tp=1, blocks=40, budget=16)  # both short of blocks
    for i, prompt in enumerate(prompts):
        alone.add(f"r{i}", prompt, 24)
        decode.add(f"r{i}", prompt, 24, ticket=prefill.add(f"r{i}", prompt, 1, offers=True))
    assert run(prefill, decode) == run(alone), "other tokens than one engine alone gives"
    print(len(prompts), "answers are those of one engine alone", dict(prefill.counts), dict(decode.counts))
