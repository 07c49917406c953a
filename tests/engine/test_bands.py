"""Over a link that is slow, the first layers of a prompt move while the others are computed; over others, all move together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import reduce

import numpy as np
import pytest

from kvxfer import Agent, BlockTable, Cache, Config, Group, Rank, Ticket, TransferId
from kvxfer.engine import Report, SchedulerSide, Update, WorkerSide
from kvxfer.protocol import pace

FACTS = {"model": "small"}
CONFIG = Config(backend="kvxfer.testing.fake:FakeTransport", transfer_timeout=60.0)
LAYERS, BANDS, BLOCK, HEADS = 16, 8, 4, 4
MINE, THEIRS = [3, 1], [5, 6]
TOKENS = BLOCK * len(MINE)


class Engine:
    def __init__(self, ranks: int) -> None:
        self.scheduler = SchedulerSide(CONFIG, "e", (Group(BLOCK),), ranks, FACTS)
        self.memory, self.workers = [], []
        for rank in range(ranks):
            held = HEADS // ranks
            memory = np.zeros((LAYERS, 8, held, BLOCK, 16), np.uint8)
            where = {"heads": (rank * held, HEADS), "rank": Rank(0, rank)}
            cache = Cache.of_tensors(memory, "layer block head token unit", encoding="e", group=Group(BLOCK), **where)
            self.memory.append(memory)
            self.workers.append(WorkerSide(Agent(cache, CONFIG, "e", FACTS)))
        self.turn()

    def turn(self, computes: Callable[[int], object] = lambda layer: None) -> Update:
        """A step; ``computes`` a layer, after which it is said to be done."""
        step = self.scheduler.step()
        for worker in self.workers:
            worker.begin(step)
            worker.load(step)
        for layer in range(LAYERS):
            computes(layer)
            for worker in self.workers:
                worker.layer_done(step, str(layer))
        for worker in self.workers:
            worker.after_forward(step)
        reports = [worker.collect(0.002) for worker in self.workers]
        return self.scheduler.report(reduce(Report.merge, reports))

    def holds(self, blocks: list[int]) -> np.ndarray:
        """The content of these blocks, with the heads of all ranks: [layer, block, head, token, unit]."""
        return np.concatenate([memory[:, blocks] for memory in self.memory], axis=2)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()


class Both:
    def __init__(self, producers: int, consumers: int) -> None:
        self.p, self.d = Engine(producers), Engine(consumers)
        self.rng = np.random.default_rng(0)

    def ask(self, name: str) -> None:
        """Both engines have the request, and D waits for what P computes."""
        self.until(lambda: not any(worker.agent.stats().offers for worker in self.p.workers))  # the one before is over
        transfer = TransferId.mint(self.p.scheduler.source.epoch, name)
        assert self.p.scheduler.offer(name, transfer, b"d", TOKENS)
        ticket: Ticket | None = self.p.scheduler.ticket(name)
        assert ticket is not None and self.d.scheduler.load(name, transfer, b"d", ticket.source, TOKENS)
        assert self.d.scheduler.loadable(name, 0) == TOKENS
        self.d.scheduler.allocated(name, BlockTable.of([THEIRS]), TOKENS)
        self.d.turn()
        self.until(lambda: all(worker.agent.stats().offers for worker in self.p.workers))  # which have heard of it

    def compute(self, name: str, wait: Callable[[int], object] = lambda layer: None) -> None:
        """P computes the prompt in one step, layer by layer."""

        def layer(at: int) -> None:
            wait(at)
            for memory in self.p.memory:
                memory[at, MINE] = self.rng.integers(1, 255, memory[at, MINE].shape, np.uint8)

        self.p.scheduler.runs(name, 0, TOKENS, BlockTable.of([MINE]))
        self.p.turn(layer)

    def over(self, name: str) -> None:
        """The load comes, and all of it is right."""
        seen: set[str] = set()

        def loaded() -> bool:
            update = self.d.turn()
            assert not update.failed, update.failed
            seen.update(update.loaded)
            return name in seen

        self.until(loaded)
        assert np.array_equal(self.d.holds(THEIRS), self.p.holds(MINE))
        self.p.scheduler.finished(name, BlockTable.of([MINE]), complete=True)
        self.d.scheduler.finished(name, BlockTable.of([THEIRS]), complete=True)
        for memory in self.d.memory:
            memory[:] = 0

    def until(self, true: Callable[[], object]) -> None:
        end = time.monotonic() + 30
        while not true():
            assert time.monotonic() < end
            time.sleep(0.001)

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture(params=[(1, 1), (2, 1), (1, 2)], ids=["1 to 1", "2 to 1", "1 to 2"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    monkeypatch.setattr(pace, "LEAST", 1)  # what has moved tells, however little it was
    found = Both(*request.param)
    yield found
    found.close()


def test_over_a_slow_link_layers_move_while_others_are_computed(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "PAYS_S", 0.0)
    both.ask("first"), both.compute("first"), both.over("first")  # which shows how fast the link is
    both.ask("second")
    step = LAYERS // BANDS

    def wait(layer: int) -> None:
        """What is computed of the bands so far is at D before the next layer is computed."""
        if layer % step == 0:
            both.until(lambda: np.array_equal(both.d.holds(THEIRS)[:layer], both.p.holds(MINE)[:layer]))
            assert not both.d.holds(THEIRS)[layer:].any()

    for memory in both.p.memory:
        memory[:] = 0
    both.compute("second", wait)
    both.over("second")


def test_over_a_fast_link_or_an_unknown_one_no_bands_are_offered(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "PAYS_S", 1e9)
    offered: list[int] = []
    offer = Agent.offer

    def note(agent: Agent, new: object, after: object = None) -> None:
        offered.append(new.bands)  # type: ignore[attr-defined]
        offer(agent, new, after)  # type: ignore[arg-type]

    monkeypatch.setattr(Agent, "offer", note)
    for name in ("first", "second"):
        both.ask(name), both.compute(name), both.over(name)
    assert set(offered) == {0}
