"""Anything at any time: random loads, aborts, failures and late bytes on two small engines that serve each other."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.vllm.cases import OFFER, both
from tests.vllm.conftest import Make
from tests.vllm.engine import (
    ALIGNED,
    CHUNKED,
    DRAFTING,
    FULL,
    HYBRID,
    LOCAL,
    MIXED,
    Group,
    PlayedEngine,
    answer,
    prompt,
)
from tests.vllm.wire import Wire


class Mixture:
    def __init__(self, rng: random.Random, wire: Wire, engines: tuple[PlayedEngine, PlayedEngine]) -> None:
        self.rng, self.wire, self.engines = rng, wire, engines
        self.asked: list[tuple[PlayedEngine, str, list[int], int]] = []
        self.relay: list[
            tuple[PlayedEngine, str, list[int], int]
        ] = []  # at P, its answer to be given to the other engine
        self.jobs = 0

    def ask(self, engine: PlayedEngine, text: list[int], params: dict[str, Any] | None, n: int) -> str:
        name = engine.add(text, params, n=n)
        if params and params.get("do_remote_decode") and len(text) > 1 and any(group.state for group in engine.groups):
            text, n = text[:-1], 1  # it leaves the last token to the other engine
        self.asked.append((engine, name, text, n))
        return name

    def act(self) -> None:
        p, d = self.rng.sample(self.engines, 2)
        kind = self.rng.choice(["sequential", "at once", "plain", "abort", "step", "step", "step", "bytes", "bytes"])
        common = prompt(self.rng.choice([0, 16, 40, 64]), seed=1)
        text = common + prompt(self.rng.randint(1, 60), seed=self.rng.randint(2, 5))
        n = self.rng.choice([1, 1, 5, 30])
        if kind == "sequential":
            self.relay.append((d, self.ask(p, text, OFFER, self.rng.choice([1, 1, 20])), text, n))
        elif kind == "at once":
            self.jobs += 1
            to_p, to_d = both(p, f"job{self.jobs}")
            pair = [(p, to_p, self.rng.choice([1, 1, 30])), (d, to_d, n)]
            self.rng.shuffle(pair)
            for engine, params, m in pair:
                self.ask(engine, text, params, m)
        elif kind == "plain":
            self.ask(p, text, None, n)
        elif kind == "abort" and self.asked:
            engine, name, _, _ = self.rng.choice(self.asked)
            engine.abort(name)
        elif kind == "bytes":
            self.bytes_move()
        else:
            for _ in range(self.rng.randint(1, 6)):
                self.step(self.rng.choice(self.engines))

    def step(self, engine: PlayedEngine) -> None:
        if engine.busy:
            engine.step()
        for entry in list(self.relay):
            d, name, text, n = entry
            done = next((e.done[name] for e in self.engines if name in e.done), None)
            if done is not None:
                self.relay.remove(entry)
                if done.params is not None and self.rng.random() < 0.9:
                    self.ask(d, text, done.params, n)

    def bytes_move(self) -> None:
        loads = self.wire.loads()
        if not loads:
            return
        load = self.rng.choice(loads)
        if load.ended:
            self.wire.scribble(load)  # late, and into blocks that must be nobody's
            if self.rng.random() < 0.5:
                self.wire.quiet(load)
        elif self.rng.random() < 0.25:
            self.wire.fail(load, "the link broke", quiet=self.rng.random() < 0.5)
        elif load.producer is None:
            self.wire.begin(load)
        elif self.wire.read(load) and self.rng.random() < 0.8:
            self.wire.settle(load)

    def amid(self, output: Any) -> None:
        """Between the zeroing of new blocks and the first call of the connector, or behind that."""
        if self.rng.random() < 0.3:
            self.bytes_move()

    def end(self) -> None:
        """Let everything come to its end."""
        for _ in range(300):
            for engine in self.engines:
                for _ in range(8):
                    self.step(engine)
            for load in list(self.wire.loads()):
                if load.ended:
                    self.wire.quiet(load)
                elif self.wire.read(load):
                    self.wire.settle(load)
            if not self.relay and not any(engine.busy for engine in self.engines):
                return
            if self.rng.random() < 0.1:
                for load in self.wire.loads():
                    self.wire.fail(load, "it took too long")
                for engine in self.engines:
                    engine.lease_ends()


@pytest.mark.parametrize(
    "groups",
    [FULL, HYBRID, MIXED, ALIGNED, DRAFTING, CHUNKED, LOCAL],
    ids=["full", "hybrid", "mixed", "aligned", "drafting", "chunked", "local"],
)
@pytest.mark.parametrize("overlap", [False, True], ids=["stepwise", "overlapped"])
@pytest.mark.parametrize("seed", range(8))
def test_mixture(make: Make, wire: Wire, groups: tuple[Group, ...], seed: int) -> None:
    rng = random.Random(seed)
    policy = rng.choice(["recompute", "fail"])
    engines = tuple(
        make(
            groups,
            blocks=rng.choice([20, 30, 60]) * len(groups),
            budget=rng.choice([16, 64]),
            policy=policy,
            caching=rng.random() < 0.7,
            resumes_as_new=rng.random() < 0.5,
            hashed=rng.choice([8, 16]) if any(group.aligned for group in groups) else 16,
        )
        for _ in range(2)
    )
    wire.paused = True
    mixture = Mixture(rng, wire, engines)  # type: ignore[arg-type]
    for engine in engines:
        engine.cleared = mixture.amid
    for _ in range(120):
        mixture.act()
    mixture.end()
    for engine, name, text, n in mixture.asked:
        done = engine.done.get(name)
        if done is None:
            continue  # aborted
        assert done.reason in ("length", "error" if policy == "fail" else "length"), (name, done)
        assert done.tokens == answer(text, n)[: len(done.tokens)], f"{name}: wrong tokens"
        assert done.reason == "error" or len(done.tokens) == n
