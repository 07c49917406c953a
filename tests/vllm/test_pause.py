"""vLLM's `/pause` and `/resume` on its own scheduler: what becomes of loads and offers meanwhile, by mode."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tests.engine.direct import Switchboard
from tests.vllm.cases import CACHES, check, decode, prefill
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import PlayedEngine, prompt
from tests.vllm.wire import Wire

overlap = both_ways

KEEP, NEW, ON = PauseState.PAUSED_ALL, PauseState.PAUSED_NEW, PauseState.UNPAUSED
"""What modes `keep`, and `wait` and `abort`, and `/resume` make of the scheduler."""

DRAINS_LOADS = "kv_holding_waiting" in inspect.getsource(Scheduler.get_num_unfinished_requests)
"""Whether mode `wait` waits for loads as it does for what runs: vLLM 0.32 and later. Before, they go on with `/resume`."""


def turn(engine: PlayedEngine, most: int = 200) -> None:
    """Make steps as vLLM's loop does: for as long as there is something to do."""
    for _ in range(most):
        if not engine.busy:
            return
        engine.step()
    raise AssertionError(f"after {most} steps there is still something to do")


def restart(engine: PlayedEngine, *others: PlayedEngine) -> None:
    engine.scheduler.set_pause_state(ON)
    engine.run(*others)


def begin(p: PlayedEngine, d: PlayedEngine, wire: Wire) -> tuple[list[int], str]:
    """Have a load under way whose bytes stand still; return its prompt and its request's name."""
    text = prompt(90)
    params = prefill(p, text)
    wire.paused = True
    name = d.add(text, params)
    d.steps(2)
    return text, name


@CACHES
def test_a_load_under_way_arrives_while_its_engine_keeps_still(make: Make, wire: Wire, groups: Any) -> None:
    p, d = make(groups), make(groups)
    text, name = begin(p, d, wire)
    assert wire.loads(d)
    d.scheduler.set_pause_state(KEEP)
    assert not d.scheduler.has_requests(), "its loop would go on"
    wire.paused = False
    p.run()
    restart(d, p)
    check(d, name, text)
    assert d.computed[name] == 1 + 3


def test_what_waits_is_drained_and_what_is_new_waits(make: Make, wire: Wire) -> None:
    p, d = make(), make()
    texts = [prompt(90, seed=n) for n in range(2)]
    params = [prefill(p, text) for text in texts]
    wire.paused = True
    old = d.add(texts[0], params[0])
    d.steps(2)
    d.scheduler.set_pause_state(NEW)
    new = d.add(texts[1], params[1])
    wire.paused = False
    wire.pump()
    turn(d)
    assert (old in d.done) == DRAINS_LOADS and new not in d.done and not wire.loads(d)
    restart(d, p)
    for name, text in zip((old, new), texts, strict=True):
        check(d, name, text)
        assert d.computed[name] == 4


def test_what_is_aborted_holds_nobody_up(make: Make, wire: Wire) -> None:
    """Mode `abort` ends loads at once, and P has its blocks again; D holds none, so that its cache can be cleared."""
    p, d = make(), make()
    text, name = begin(p, d, wire)
    d.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    d.scheduler.set_pause_state(NEW)
    wire.paused = False
    turn(d)
    assert d.scheduler.reset_prefix_cache(reset_running_requests=True)
    turn(p)
    assert name not in d.done and p.free == p.room
    d.scheduler.set_pause_state(ON)
    decode(d, text, prefill(p, text), p)


def test_a_producer_that_keeps_still_is_fetched_from(make: Make) -> None:
    """vLLM's loop goes on for what others have not fetched yet, and computes nothing."""
    p, d = make(), make()
    text, later = prompt(90), prompt(60, seed=2)
    params = prefill(p, text)
    other = p.add(later, n=1)
    p.scheduler.set_pause_state(KEEP)
    assert p.scheduler.has_requests()
    name = d.add(text, params)
    for _ in range(200):
        d.step()
        assert not p.step().total_num_scheduled_tokens
        if name in d.done and not p.scheduler.has_requests():
            break
    check(d, name, text)
    assert not p.scheduler.has_requests() and d.computed[name] == 1 + 3
    restart(p, d)
    assert other in p.done


def test_clearing_the_cache_under_a_load_is_refused_and_costs_nothing(make: Make, wire: Wire) -> None:
    """By vLLM itself (mode `keep` with `clear_cache`, its default): it does not take blocks away that are being written."""
    p, d = make(), make()
    text, name = begin(p, d, wire)
    d.scheduler.set_pause_state(KEEP)
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        d.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    wire.paused = False
    restart(d, p)
    check(d, name, text)
    assert d.computed[name] == 1 + 3


@pytest.mark.parametrize("mode", [KEEP, NEW], ids=["keep", "wait"])
@pytest.mark.parametrize("when", ["under way", "here"])
def test_what_is_loaded_ahead_of_its_turn_holds_nobody_up(make: Make, wire: Wire, mode: PauseState, when: str) -> None:
    """A request waits for a seat, and its KV for the request: a pause is complete without them, and the cache can be cleared."""
    p, d = make(), make(board=Switchboard(waited=wire.pump), extra={"step_budget": 1}, seqs=1)
    texts = [prompt(90, seed=n) for n in range(2)]
    params = [prefill(p, text) for text in texts]
    old = d.add(texts[0], params[0])
    d.step()
    wire.paused = when == "under way"
    new = d.add(texts[1], params[1])
    wire.pump()
    d.scheduler.set_pause_state(mode)
    wire.paused = False
    wire.pump()
    turn(d)
    assert (old in d.done) == (mode is NEW) and new not in d.done
    assert d.scheduler.reset_prefix_cache(reset_running_requests=True)
    restart(d, p)
    for name, text in zip((old, new), texts, strict=True):
        check(d, name, text)
