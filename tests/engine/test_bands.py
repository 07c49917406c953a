"""Over a link that is slow, the first layers of a prompt move while the others are computed; over others, all move together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvxfer import BlockTable
from kvxfer.protocol import pace
from kvxfer.testing.engine import PagedEngine, PagedMemory, until

LAYERS, BANDS, BLOCK = 16, 8, 4
MINE, THEIRS = [3, 1], [5, 6]
TOKENS = BLOCK * len(MINE)


class Both:
    def __init__(self, producers: int, consumers: int) -> None:
        self.p, self.d = (
            PagedEngine({"transfer_timeout": 60.0}, PagedMemory(layers=LAYERS, blocks=8, ranks=ranks))
            for ranks in (producers, consumers)
        )

    def ask(self, name: str) -> None:
        """Both engines have the request, and D waits for what P computes."""
        until(lambda: not any(worker.agent.stats().offers for worker in self.p.workers), 30.0)  # the one before is over
        self.d.load(name, self.p.ask(name, TOKENS), TOKENS, THEIRS)
        self.d.step()
        until(lambda: all(worker.agent.stats().offers for worker in self.p.workers), 30.0)  # which have heard of it

    def compute(self, name: str, wait: Callable[[int], object] = lambda layer: None) -> None:
        """P computes the prompt in one step, layer by layer."""

        def layer(at: int) -> None:
            wait(at)
            self.p.memory.compute(name.encode(), MINE, 0, TOKENS, at)

        self.p.scheduler.runs(name, 0, TOKENS, BlockTable.of([MINE]))
        self.p.step(layer)

    def over(self, name: str) -> None:
        """The load comes, and all of it is right."""
        assert name in self.d.until(name).loaded, self.d.failed
        self.d.verify()
        self.p.scheduler.finished(name, BlockTable.of([MINE]), complete=True)
        self.d.finish(name)
        self.d.memory.write(THEIRS, 0)

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture(params=[(1, 1), (2, 1), (1, 2)], ids=["1 to 1", "2 to 1", "1 to 2"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    monkeypatch.setattr(pace, "MIN_BYTES", 1)  # what has moved tells, however little it was
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
            computed = both.p.memory.read(MINE)[:layer]
            until(lambda: np.array_equal(both.d.memory.read(THEIRS)[:layer], computed), 30.0)
            assert not both.d.memory.read(THEIRS)[layer:].any()

    both.p.memory.write(MINE, 0)
    both.compute("second", wait)
    both.over("second")
