"""An engine that waits for loads alone learns of their end at once, and looks up as soon as somebody else comes.

vLLM's own engine loop makes the steps, with its sleep after an empty one; agents, side channel and links are the real ones.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator

import pytest
from vllm.v1.engine import EngineCoreRequestType

from kvxfer.engine import step_wait
from kvxfer.testing.engine import until
from kvxfer_bench.vllm.handover import MODES, measure
from kvxfer_bench.vllm.played import DecodeEngine, engines

ROUNDS, LONG = 9, 12288


@pytest.mark.parametrize("budget_ms", (0.0, 5.0), ids=("beside", "within"))
@pytest.mark.parametrize("overlap", MODES.values(), ids=MODES)
def test_no_step_passes_between_the_end_of_a_load_and_its_being_seen(overlap: bool, budget_ms: float) -> None:
    """Another program may have the processor meanwhile, so the median counts, and steps, not milliseconds."""
    found = measure(LONG, ROUNDS, 5.0, budget_ms, "cma", overlap, others=0)
    assert statistics.median(found["unseen_steps"]) == 0, found


@pytest.fixture(params=MODES.values(), ids=MODES)
def engine(request: pytest.FixtureRequest) -> Iterator[DecodeEngine]:
    """One whose request is on its way from a producer that computes it in six seconds."""
    with engines({"backend": "cma"}, 0.005, request.param) as (engine, producer, source):
        slow, prompt = engine.load_from(source, "slow", 1024)
        producer.send("compute", *prompt, 60, 6.0)
        engine.scheduler.add_request(slow)
        yield engine
        producer.get()


def seconds(engine: DecodeEngine) -> float:
    begun = time.monotonic()
    engine.make_step()
    return time.monotonic() - begun


def wait_for_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a step that waits do so until the load ends, some five seconds later: no busy machine makes another one take so long."""
    monkeypatch.setattr(step_wait, "LOOKS", 60_000)


def test_a_step_without_anybody_else_waits_and_whoever_comes_ends_the_wait(
    engine: DecodeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: seconds(engine) >= 0.04)  # the load is on its way
    assert statistics.median(seconds(engine) for _ in range(5)) >= 0.04, "nothing else is to be done"
    engine.input_queue.put((EngineCoreRequestType.WAKEUP, None))
    assert statistics.median(seconds(engine) for _ in range(5)) >= 0.04, (
        "the engine has been woken, and nobody has come"
    )
    engine.input_queue.get()
    wait_for_the_load(monkeypatch)
    arrival = EngineCoreRequestType.ADD, None
    engine.input_queue.put(arrival)
    assert max(seconds(engine) for _ in range(9)) < 3.0, "somebody has come, who is not looked at yet"
    engine.input_queue.get()
    threading.Timer(0.01, engine.input_queue.put, (arrival,)).start()
    assert seconds(engine) < 3.0, "somebody comes during the wait"


def test_a_request_that_is_to_be_computed_is_not_held_up_by_a_load(
    engine: DecodeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        engine.make_step()
    other = engine.request("other", 16, 64)
    engine.scheduler.add_request(other)
    wait_for_the_load(monkeypatch)
    assert max(seconds(engine) for _ in range(20)) < 3.0
    assert other.request_id in engine.computed and other.num_output_tokens > 5
