"""A router sends a request to P and D at once: D takes blocks as late as it can, and holds nobody up meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.cases import both, check, parties
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import BLOCK, FULL, HYBRID, STATEFUL, PlayedEngine, answer, prompt
from tests.vllm.wire import Wire

overlap = both_ways
N = 6 * BLOCK + 5


def steps_while(engine: PlayedEngine, true: Callable[[], bool], most_s: float = 30.0) -> None:
    until = time.monotonic() + most_s
    while true():
        assert time.monotonic() < until
        engine.step()


@pytest.mark.parametrize("schema", [both, parties])
@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_no_block_is_taken_before_the_producer_has_begun(make: Make, groups: Any, schema: Any) -> None:
    p, d = make(groups, budget=2 * BLOCK, blocks=100), make(groups, budget=256, blocks=100)
    text = prompt(N)
    to_p, to_d = schema(p, "job")
    ahead = p.add(prompt(8 * BLOCK, 7), n=1)  # P has something else to do first
    other = d.add(prompt(20, 5), n=12)
    d.step()
    b, free = d.add(text, to_d), d.free
    at_p = p.add(text, to_p, n=1)
    while not p.computed.get(at_p):
        seen = d.step()
        assert d.free >= free and b not in seen.num_scheduled_tokens
        assert other in seen.num_scheduled_tokens or other in d.done, "it is held up"
        p.step()
    assert ahead in p.done
    steps_while(d, lambda: d.status(b) == "WAITING")
    assert d.status(b) == "WAITING_FOR_REMOTE_KVS" and at_p not in p.done
    d.run(p, until=b)
    check(d, b, text)
    assert d.computed[b] == 1 + 3


def test_a_producer_that_never_begins_costs_a_bounded_wait_and_no_block(make: Make) -> None:
    p, d = make(), make(extra={"start_timeout": 0.5})
    text = prompt(N)
    _, to_d = both(p, "job")
    b, free = d.add(text, to_d), d.free
    assert b not in d.step().num_scheduled_tokens and d.free == free
    d.run(p, until=b)
    check(d, b, text)
    assert d.computed[b] == N + 3 and not d.wire.loads(d)


def test_a_producer_that_is_not_there_is_not_waited_for(make: Make, wire: Wire) -> None:
    p, d = make(), make()
    text = prompt(N)
    _, to_d = both(p, "job")
    p.scheduler.connector.shutdown()  # type: ignore[union-attr]
    b = d.add(text, to_d)
    steps_while(d, lambda: not wire.loads(d))  # it is begun as ever, and fails as ever
    for load in wire.loads(d):
        wire.fail(load, "the link cannot be made")
    d.run(until=b)
    check(d, b, text)


def test_who_asks_again_for_what_has_been_fetched_is_answered(make: Make) -> None:
    """P was still decoding when D had the prompt, and forgot the offer then; it remembers that it has begun with it."""
    p, d = make(budget=256), make(caching=False)
    text = prompt(N)
    to_p, to_d = both(p, "job")
    a = p.add(text, to_p, n=20)
    p.step()
    first = d.add(text, to_d)
    d.run(until=first)
    p.run(until=a)
    again = d.add(text, to_d)
    d.run(p, until=again)
    for name in (first, again):
        check(d, name, text)
    assert d.computed[first] == 1 + 3 and d.computed[again] == N + 3


def test_one_that_gives_it_up_in_its_queue_says_so(make: Make) -> None:
    p, d = make(seqs=1), make()
    text = prompt(N)
    to_p, to_d = both(p, "job")
    ahead = p.add(prompt(20, 7), n=30)
    p.step()
    at_p, b = p.add(text, to_p, n=1), d.add(text, to_d)
    d.steps(2)
    p.step()
    p.abort(at_p)
    d.run(p, until=b)
    check(d, b, text)
    assert d.computed[b] == N + 3
    p.run(until=ahead)


def test_two_full_engines_that_are_each_other_s_producers_go_on(make: Make) -> None:
    """Each has room for two of these prompts, and is sent four: two to compute for the other, two to load from it."""
    a, b = (make(blocks=2 * 7 + 3, budget=64, extra={"start_timeout": 5.0}) for _ in "ab")
    wanted = []
    for i in range(2):
        for p, d in ((a, b), (b, a)):
            text = prompt(N, seed=10 * i + (p is a))
            to_p, to_d = both(p, f"job {i} {p is a}")
            wanted.append((d, d.add(text, to_d), text))
            p.add(text, to_p, n=1)
    for d, name, text in wanted:
        d.run(a if d is b else b, until=name)
        assert d.done[name].tokens == answer(text, 4)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("schema", [both, parties])
def test_what_has_come_before_the_producer_gave_up_is_not_computed_again(make: Make, schema: Any, ranks: int) -> None:
    p, d = make(budget=2 * BLOCK, ranks=ranks), make(budget=256, ranks=ranks)
    text = prompt(N)
    to_p, to_d = schema(p, "job")
    at_p = p.add(text, to_p, n=1)
    b = d.add(text, to_d)
    p.steps(2)  # four blocks of six
    steps_while(d, lambda: not d.wire.loads(d))
    p.abort(at_p)
    d.run(p, until=b)
    check(d, b, text)
    assert d.computed[b] == N - 4 * BLOCK + 3
    d.run(p)


def test_what_nobody_reads_when_its_request_is_aborted_is_given_up_at_once(make: Make) -> None:
    p, d = make(budget=2 * BLOCK), make(budget=256)
    text = prompt(N)
    to_p, to_d = both(p, "job")
    at_p = p.add(text, to_p, n=1)
    p.steps(2)
    p.abort(at_p)
    p.run()
    assert p.free == p.blocks - 1
    b = d.add(text, to_d)
    d.run(p, until=b)
    check(d, b, text)
    assert d.computed[b] == N + 3


@pytest.mark.parametrize("groups", [HYBRID, STATEFUL], ids=["hybrid", "stateful"])
def test_with_windows_or_states_all_of_it_is_computed(make: Make, groups: Any) -> None:
    """They are of no use without their end."""
    p, d = make(groups, budget=2 * BLOCK), make(groups, budget=256)
    text = prompt(N)
    to_p, to_d = both(p, "job")
    at_p, b = p.add(text, to_p, n=1), d.add(text, to_d)
    p.steps(2)
    steps_while(d, lambda: not d.wire.loads(d))
    p.abort(at_p)
    d.run(p, until=b)
    check(d, b, text)
    assert d.computed[b] == N + 3


def test_a_load_that_has_come_in_part_as_its_request_is_aborted(make: Make) -> None:
    p, d = make(budget=2 * BLOCK), make(budget=256)
    text = prompt(N)
    to_p, to_d = both(p, "job")
    at_p, b = p.add(text, to_p, n=1), d.add(text, to_d)
    p.steps(2)
    steps_while(d, lambda: not d.wire.loads(d))
    p.abort(at_p)
    p.step()  # with which its workers hear of it
    for i in range(4):
        if i == 2:
            d.abort(b)
        d.step()
    d.run(p)


@pytest.mark.parametrize("why", ["one token", "all is cached"])
def test_who_has_nothing_to_load_waits_for_nobody(make: Make, why: str) -> None:
    """And P, of whose prompt there is nothing to offer, never says that it has begun."""
    groups, text = (STATEFUL, prompt(1)) if why == "one token" else (FULL, prompt(2 * BLOCK + 1))
    p, d = make(groups), make(groups, budget=256)
    if why != "one token":
        d.run(until=d.add(text))
    _, to_d = both(p, "job")
    name = d.add(text, to_d)
    assert name in d.step().num_scheduled_tokens
    d.run(p, until=name)
    check(d, name, text)
