"""Conversations of the paged engine: each turn loads its history from the engine that generated the last answer."""

import random
import sys
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "paged_engine"))
from engine import Engine
from worker import BLOCK, FACTS, VOCAB

from kvxfer import BlockTable, Source, sealed
from kvxfer.engine import HeldPrefix, Inquiry, Prefix, PrefixIndex


class ConversationalEngine(Engine):
    """An engine that loads the history of a prompt from others, and lets others load what it has computed."""

    def __init__(self, tp: int, blocks: int, budget: int) -> None:
        super().__init__(tp, blocks, budget)
        self.index: PrefixIndex[list[int]] = PrefixIndex(blocks * BLOCK)
        self.side.holds = self.holds

    def holds(self, inquiry: Inquiry) -> HeldPrefix | None:
        """Return what is cached of a prompt that another engine is about to compute."""
        found = self.index.find(inquiry.chain)
        if found is None:
            return None
        blocks = self.pool.prefix(found.name[: found.tokens])
        self.pool.free(blocks[::-1])
        return HeldPrefix(len(blocks) * BLOCK, BlockTable.of([blocks]))

    def add(
        self,
        name: str,
        prompt: list[int],
        answer: int,
        offers: bool = False,
        ticket: str = "",
        sources: Sequence[Source] = (),
    ) -> str:
        """Take a request as ``Engine`` does; ask other engines what they hold of its prompt."""
        told = super().add(name, prompt, answer, offers, ticket)
        self.side.ask(name, Prefix(prompt, model=sealed(FACTS)), sources, len(prompt) - 1)
        return told

    def step(self) -> bool:
        """Make a step, and remember what has been computed for the requests that it ends."""
        before = set(self.done)
        busy = super().step()
        for name in self.done.keys() - before:
            tokens = self.done[name].tokens[:-1]  # the last token of an answer is not computed
            self.index.add(Prefix(tokens, model=sealed(FACTS)), tokens)
        return busy


def finish(*engines: Engine) -> None:
    """Make steps until the last engine has answered all."""
    while engines[-1].requests:
        if not sum(engine.step() for engine in engines):
            wait([pipe for engine in engines for pipe in engine.reports], 0.01)


if __name__ == "__main__":
    rng = random.Random(0)
    alone = Engine(tp=1, blocks=1200, budget=64)
    prefill = ConversationalEngine(tp=2, blocks=400, budget=64)
    decode = ConversationalEngine(tp=1, blocks=1200, budget=64)
    histories = [rng.choices(range(VOCAB), k=rng.randrange(40, 60)) for _ in range(4)]
    for turn in range(3):
        for i, history in enumerate(histories):
            name = f"conversation {i}, turn {turn}"
            there = [decode.side.source] if turn else []
            ticket = prefill.add(name, history, 1, offers=True, sources=there)
            decode.add(name, history, 80, ticket=ticket)
            alone.add(name, history, 80)
        finish(prefill, decode)
        finish(alone)
        for i in range(len(histories)):
            answered = decode.done[f"conversation {i}, turn {turn}"].tokens
            assert answered == alone.done[f"conversation {i}, turn {turn}"].tokens, "other tokens than one engine alone"
            histories[i] = answered + rng.choices(range(VOCAB), k=rng.randrange(5, 15))
    for engine in (prefill, decode, alone):
        for worker in engine.workers:
            worker.send(None)
        engine.side.close()
    counts = prefill.side.asked[""]
    print(
        f"12 answers are those of one engine alone; of {counts.requests} histories {counts.loaded} tokens were loaded"
    )
