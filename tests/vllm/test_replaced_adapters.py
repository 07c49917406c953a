"""An adapter's weights change while its requests run: nobody gets what was computed with others than he means."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.vllm.cases import both
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import PlayedEngine, prompt
from tests.vllm.test_digest import lora

overlap = both_ways
ADAPTER: dict[str, Any] = {"lora_request": lora("x")["lora_request"]}
TOLD = pytest.mark.parametrize("told", [False, True], ids=["reread", "loaded again"])


@pytest.fixture
def pair(make: Make) -> tuple[PlayedEngine, PlayedEngine]:
    """Two engines that have loaded the adapter with the same weights; the first computes long prompts in several steps."""
    made = make(budget=32), make()
    for engine in made:
        engine.load_adapter(1, "x")
    return made


def replace(engine: PlayedEngine, told: bool) -> None:
    """Load other weights in its place: as the engine is told to, or in the next step because the adapter's files have changed."""
    (engine.load_adapter if told else engine.reread_adapter)(1, "y")


def loads(d: PlayedEngine, p: PlayedEngine, text: list[int]) -> int:
    """How many tokens of a prompt one engine finds at the other."""
    name = d.add(text, {"kvxfer_sources": [str(p.address)]}, n=1, **ADAPTER)
    end = time.monotonic() + 60
    while name not in d.done:
        assert time.monotonic() < end
        d.step()
        time.sleep(0.003)  # so that the other engine makes few steps
        p.step()
    return len(text) - d.computed[name]


@TOLD
@pytest.mark.parametrize("known", [False, True], ids=["new", "asked for before"])
@pytest.mark.parametrize("steps", [1, 60])
def test_no_prefix_of_a_request_that_goes_on_with_other_weights(
    pair: tuple[PlayedEngine, PlayedEngine], told: bool, known: bool, steps: int
) -> None:
    p, d = pair
    text = prompt(600)
    running = p.add(text, None, n=30, **ADAPTER)
    p.step()
    if known:
        loads(d, p, text)
        d.scheduler.reset_prefix_cache()
    before = p.computed[running]
    replace(p, told)
    p.steps(steps)
    assert loads(d, p, text) <= before, "D took what was computed with other weights"
    p.run(until=running)


def test_nothing_that_was_evicted_and_is_computed_anew_with_other_weights(
    pair: tuple[PlayedEngine, PlayedEngine],
) -> None:
    """It is cached under the hashes of before."""
    p, d = pair
    text = prompt(100)
    p.run(until=p.add(text, None, n=1, **ADAPTER))
    p.scheduler.reset_prefix_cache()
    busy = [p.add(prompt(20, seed=seed), None, n=20) for seed in range(8)]
    waits = p.add(text, None, n=4, **ADAPTER)
    p.step()
    replace(p, told=True)
    p.run(until=waits)
    assert loads(d, p, text) == 0, "D took what was computed with other weights"
    p.run(until=busy[-1])


def test_nothing_of_the_step_that_was_planned_before_the_scheduler_knew(
    pair: tuple[PlayedEngine, PlayedEngine],
) -> None:
    p, d = pair
    text = prompt(30)
    running = p.add(prompt(20, seed=4), None, n=30, **ADAPTER)
    p.step()
    to_p, to_d = both(p, "job")
    name = d.add(text, to_d, n=1, **ADAPTER)
    d.steps(3)
    replace(p, told=False)
    if p.overlap:
        p.step()
    p.add(text, to_p, n=1, **ADAPTER)
    for _ in range(3):
        p.step()
        d.steps(4)
    d.run(p, until=name)
    assert d.computed[name] == 30, "D took what was computed with other weights"
    p.run(until=running)
