"""An engine that is shut down (SIGTERM, a rolling update) stays for a while: requests that it has cut off go on elsewhere with its KV."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCoreProc

from kvxfer.testing.clock import SetForward
from kvxfer_vllm import steps as stopping
from tests.vllm.cases import check
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import BLOCK, FULL, HYBRID, Group, PlayedEngine, answer, prompt

overlap = both_ways
DRAIN_S = 100.0
"""So long does an engine stay after the last question."""


class Core(EngineCoreProc):  # type: ignore[misc]
    """vLLM's engine with its loop, of which the connector knows only that it is being built while the connector is."""

    def __init__(self, make: Make, shutdown: int, groups: Sequence[Group] = FULL, **extra: Any) -> None:
        self.shutdown_state, self.input_queue = 0, queue.Queue()
        self.engine: PlayedEngine = make(groups, blocks=120, shutdown=shutdown, extra=extra)

    def stop(self) -> None:
        """What vLLM does when it is asked to stop, and has been given time for that."""
        self.shutdown_state = 1

    def loop(self, *others: PlayedEngine, until: float = 60.0) -> float:
        """Make steps as vLLM does after that; return how many seconds it went on."""
        began = time.monotonic()
        while self.engine.scheduler.has_requests():
            assert time.monotonic() < began + until, "it goes on"
            for engine in (self.engine, *others):
                engine.step()
            time.sleep(0.001)
        return time.monotonic() - began


def go_on(d2: PlayedEngine, d1: Core, text: list[int], n: int = 1) -> int:
    """Have a request go on at another engine, as a router does that retries it there; how many tokens that one computed."""
    name = d2.add(text, {"kvxfer_sources": [str(d1.engine.address)]}, n=n)
    while name not in d2.done:
        assert d1.engine.scheduler.has_requests(), "it has ended"
        d1.engine.step()
        d2.step()
    check(d2, name, text, n)
    return d2.computed[name]


@pytest.fixture
def clock() -> Iterator[SetForward]:
    made = SetForward()
    with made.installed():
        yield made


@pytest.fixture
def home(make: Make) -> Core:
    return Core(make, 600, drain=DRAIN_S)


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "window"])
def test_a_request_that_is_cut_off_goes_on_with_its_kv(
    clock: SetForward, make: Make, groups: Sequence[Group], caplog: pytest.LogCaptureFixture
) -> None:
    """A window is found at the place where the answer was cut off, which is not one that vLLM keeps by default."""
    home, d2, text = Core(make, 600, groups, drain=DRAIN_S), make(groups, blocks=120), prompt(50)
    name = home.engine.add(text, {"kvxfer_sources": []}, n=100)
    while len(home.engine.said.get(name, ())) < 40:
        home.engine.step()
    home.stop()
    with caplog.at_level(logging.INFO, "kvxfer.vllm"):
        home.engine.steps(2)
        so_far = text + home.engine.said[name]
        assert so_far == text + answer(text, len(so_far) - len(text)), "what runs goes on"
        home.engine.abort(name)
        home.engine.step()
        assert home.engine.scheduler.has_requests(), "it stays, though no request runs"
        clock.forward(0.6 * DRAIN_S)
        assert go_on(d2, home, so_far) <= 2 * BLOCK
    assert "others can ask for what it holds" in caplog.text
    clock.forward(0.6 * DRAIN_S)
    home.engine.step()
    assert home.engine.scheduler.has_requests(), "from the last question on"
    clock.forward(0.6 * DRAIN_S)
    home.loop(d2)


def test_a_question_makes_it_stay_longer(clock: SetForward, make: Make, home: Core) -> None:
    others, texts = [make(blocks=120) for _ in range(3)], [prompt(60, seed) for seed in range(3)]
    for text in texts:
        home.engine.run(until=home.engine.add(text))
    home.stop()
    for other, text in zip(others, texts, strict=True):
        clock.forward(0.6 * DRAIN_S)
        home.engine.step()
        assert go_on(other, home, [*text, 7, 7]) <= BLOCK
    clock.forward(DRAIN_S)
    home.loop(*others)


@pytest.mark.parametrize(
    ("shutdown", "drain", "stays"), [(0, 60.0, (0.0, 10.0)), (60, 0.0, (0.0, 10.0)), (13, 60.0, (0.5, 10.0))]
)
def test_it_ends_in_time(
    make: Make, shutdown: int, drain: float, stays: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM kills what has not ended by then; and without ``--shutdown-timeout`` it waits for nothing."""
    monkeypatch.setattr(stopping, "CLOSE_S", 12.0)  # so that it stays for one second of the thirteen
    core = Core(make, shutdown, drain=drain)
    core.engine.run(until=core.engine.add(prompt(60)))
    core.loop()
    core.stop()
    assert stays[0] <= core.loop() <= stays[1]


def test_an_engine_that_is_not_asked_to_stop_comes_to_rest(make: Make) -> None:
    core = Core(make, 60, drain=60.0)
    core.engine.run(until=core.engine.add(prompt(60)))
    assert core.loop() < 10
