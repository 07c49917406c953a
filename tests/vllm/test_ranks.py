"""Engines of several tensor-parallel ranks: every rank reports every id once, and a request's outcome is the AND."""

from __future__ import annotations

import pytest

from kvxfer.failures import Outcome
from tests.control.conftest import until
from tests.engine.direct import Switchboard
from tests.vllm.cases import CACHES, both, check, decode, prefill
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import DRAFTED, FULL, HYBRID, Group, PlayedEngine, answer, ours, prompt
from tests.vllm.wire import Load, Wire

overlap = both_ways


def begin(d: PlayedEngine, wire: Wire, text: list[int], p: PlayedEngine) -> tuple[str, list[Load]]:
    params = prefill(p, text)
    wire.paused = True
    name = d.add(text, params)
    d.steps(2)
    loads = wire.loads(d)
    assert len(loads) == 2 and all(wire.begin(load) for load in loads)
    return name, loads


@CACHES
def test_two_ranks(make: Make, groups: tuple[Group, ...]) -> None:
    p, d = make(groups, ranks=2), make(groups, ranks=2)
    text = prompt(90)
    name = decode(d, text, prefill(p, text), p)
    assert d.computed[name] == 1 + 3


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_two_stages_that_draft(make: Make, groups: tuple[Group, ...]) -> None:
    """Model runner 1 does not tell the first stage that a step is over: what it has is offered all the same."""
    p, d = make(groups, ranks=2, stages=True), make(groups, ranks=2, stages=True)
    text = prompt(90)
    name = decode(d, text, prefill(p, text), p)
    assert d.computed[name] == 1 + 3


def test_ranks_end_at_different_times(make: Make, wire: Wire) -> None:
    """D goes on when its last rank has delivered, P frees when its last rank is done."""
    p, d = make(ranks=2), make(ranks=2)
    text = prompt(90)
    name, (one, two) = begin(d, wire, text, p)
    free = p.free
    wire.read(one)
    assert wire.settle(one)
    p.steps(4)
    d.steps(4)
    assert p.free == free and d.status(name) == "WAITING_FOR_REMOTE_KVS"
    wire.read(two)
    assert wire.settle(two)
    d.run(p, until=name)
    check(d, name, text)
    assert d.computed[name] == 1 + 3


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("quiet", [True, False], ids=["quiet", "moving"])
@pytest.mark.parametrize("first", ["failed", "delivered"])
def test_one_rank_fails(make: Make, wire: Wire, policy: str, quiet: bool, first: str) -> None:
    """While the other delivers: the request fails, once, and its blocks are kept as long as one rank writes to them."""
    p, d = make(HYBRID, ranks=2), make(HYBRID, ranks=2, policy=policy)
    text = prompt(90)
    name, (bad, good) = begin(d, wire, text, p)
    for which in (bad, good) if first == "failed" else (good, bad):
        if which is bad:
            wire.fail(bad, "the link broke", quiet=quiet)
        else:
            wire.read(good)
            wire.settle(good)
        d.steps(3)
    d.run(p, until=name)
    assert d.done[name].tokens == (answer(text, 4) if policy == "recompute" else [])
    if not quiet:
        written = {int(b) for row in bad.fetch.blocks for b in row if b >= 0}
        taken = d.pool.get_new_blocks(d.free)
        assert written.isdisjoint(b.block_id for b in taken)
        d.pool.free_blocks(taken)
        wire.quiet(bad)


def test_all_ranks_fail_and_get_quiet_one_after_the_other(make: Make, wire: Wire) -> None:
    p, d = make(ranks=2), make(ranks=2)
    text = prompt(90)
    name, loads = begin(d, wire, text, p)
    wire.fail(loads[0], "the link broke", quiet=False)
    d.steps(3)
    wire.quiet(loads[0])  # before the other rank has failed
    d.steps(3)
    wire.fail(loads[1], "the link broke", quiet=False)
    d.run(p, until=name)
    check(d, name, text)
    before = d.free
    wire.quiet(loads[1])
    d.run(p)
    assert d.free > before


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("apart", [0, 3], ids=["in one step", "steps apart"])
@CACHES
def test_ranks_are_delivered_different_generations(
    make: Make, wire: Wire, groups: tuple[Group, ...], policy: str, apart: int
) -> None:
    """P computed the prompt anew between them: each rank is right, the request is not, whatever vLLM hears of its ranks."""
    p, d = make(groups, ranks=2), make(groups, ranks=2, policy=policy)
    text = prompt(90)
    name, loads = begin(d, wire, text, p)
    for generation, load in enumerate(loads, 1):
        assert wire.read(load)
        load.agent.end(load, Outcome(), generation)
        wire.quiet(load)
        d.steps(apart)
    d.run(p, until=name)
    assert d.done[name].tokens == (answer(text, 4) if policy == "recompute" else [])
    assert d.computed.get(name, 0) == (90 + 3 if policy == "recompute" else 0)
    for agent in p.agents:
        agent.lease_ends()
    p.run()


@pytest.mark.parametrize("differ", ["generation", "length"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_ranks_differ_and_a_step_tells_of_one_before_the_other(
    make: Make, wire: Wire, policy: str, first: int, differ: str
) -> None:
    """The side channel has told of the other by then. vLLM counts its ranks by steps: it must not hear of the last one while what
    is wrong with the load is still on its way to the workers, or it takes the load for whole."""
    p, d = make(ranks=2), make(ranks=2, policy=policy, board=Switchboard(), extra={"step_budget": 0})
    text = prompt(90)
    to_p, to_d = both(p, "job")
    a, wire.paused = p.add(text, to_p), True
    p.step()
    name = d.add(text, to_d)
    until(lambda: bool(d.step() and len(wire.loads(d)) == 2))
    p.run(until=a)
    loads = wire.loads(d)
    assert all(wire.begin(load) and wire.read(load) for load in loads)
    for i in (first, 1 - first):
        load = loads[i]
        if differ == "generation":
            load.agent.end(load, Outcome(), 1 + i)
        else:
            load.agent.end(load, Outcome(), 1, 32 if i == first else None)
            if i == first:
                lost = [block for block in load.fetch.blocks[0].tolist()[2:] if block >= 0]
                d.memory[lost] = -7
        wire.quiet(load)
        if i == first:
            d.step()
    d.run(p, until=name)
    assert d.done[name].tokens == (answer(text, 4) if policy == "recompute" else [])
    for agent in p.agents:
        agent.lease_ends()
    p.run()


@pytest.mark.parametrize("steps", range(5))
def test_one_that_leaves_while_its_ranks_are_found_to_differ(make: Make, wire: Wire, steps: int) -> None:
    """vLLM gives its blocks back all the same."""
    p, d = make(ranks=2), make(ranks=2)
    free = d.free
    name, loads = begin(d, wire, prompt(90), p)
    for generation, load in enumerate(loads, 1):
        load.agent.end(load, Outcome(), generation)
        wire.quiet(load)
    d.steps(steps)
    d.abort(name)
    for agent in p.agents:
        agent.lease_ends()
    d.run(p)
    assert d.free == free


def test_ranks_give_a_lease_up_at_different_times(make: Make, wire: Wire) -> None:
    p = make(ranks=2)
    prefill(p, prompt(60))
    free = p.free
    p.agents[0].lease_ends()
    p.steps(4)
    assert p.free == free
    p.agents[1].lease_ends()
    p.run()


@pytest.mark.parametrize("across", [2, 4])
@pytest.mark.parametrize("groups", [FULL, DRAFTED], ids=["full", "drafts"])
def test_ranks_of_prefill_context_parallelism_that_hold_the_same(
    make: Make, groups: tuple[Group, ...], across: int
) -> None:
    """vLLM numbers them alike, so what it says at start of the ranks is said of the last of them alone."""
    p, d = make(groups, ranks=4, across=across, role="kv_producer"), make(groups, ranks=4)
    text = prompt(90)
    for _ in range(2):
        name = decode(d, text, prefill(p, text), p)
        check(d, name, text)
    assert p.free == p.room


def test_replicas_say_where_they_listen_before_there_is_a_request(make: Make) -> None:
    """An engine that is asked for nothing makes steps until all of its ranks are known; nobody finds it before."""
    p = make(ranks=2, across=2, role="kv_producer", introduced=False)
    half = ours(p.scheduler.connector)._sched
    assert not half.side.ready and p.busy
    p.run()
    assert {m.cache.rank.tp for m in half.side.directory._ranks} == {0, 1} and not half.waiting


def test_the_directory_names_all_ranks(make: Make) -> None:
    p = make(ranks=2)
    half = ours(p.scheduler.connector)._sched
    assert {m.cache.rank.tp for m in half.side.directory._ranks} == {0, 1}
