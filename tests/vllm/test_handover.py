"""In how many steps of vLLM's own scheduler a request runs whose KV is ready elsewhere, and what happens when that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvxfer import clock
from kvxfer.failures import FailureKind, Outcome
from kvxfer_vllm.metadata import StepMetadata
from tests.engine.direct import Switchboard
from tests.vllm.cases import offers_nothing
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import ALIGNED, BLOCK, FULL, HYBRID, STATEFUL, PlayedEngine, answer, prompt
from tests.vllm.wire import Wire

overlap = both_ways
N = 3 * BLOCK + 5


@pytest.fixture
def board(wire: Wire) -> Switchboard:
    return Switchboard(waited=wire.pump)


def offered(p: PlayedEngine, seed: int = 0, n: int = N) -> dict[str, Any]:
    name = p.add(prompt(n, seed), {"do_remote_decode": True}, n=1)
    p.run(until=name)  # and no further: what it offers it has offered with the step that completed it
    params = p.done[name].params
    assert params is not None
    return params


def decoder(make: Make, board: Switchboard, groups: Any = FULL, **more: Any) -> PlayedEngine:
    """An engine that may wait for what its played link takes."""
    return make(groups, board=board, **{"extra": {"step_budget": 1}} | more)


def measured(p: PlayedEngine, d: PlayedEngine) -> None:
    """Have D load once, so that it knows the link."""
    measured_as(p, d, 99)


def measured_as(p: PlayedEngine, d: PlayedEngine, seed: int) -> None:
    name = d.add(prompt(N, seed), offered(p, seed))
    d.run(p, until=name)


def steps_until(d: PlayedEngine, p: PlayedEngine, name: str, *, before: int = 12, idle: bool = False) -> int:
    """How many steps come before the one that computes the request; in which P makes none if it is `idle`."""
    for step in range(before):
        if name in d.step().num_scheduled_tokens:
            return step
        if not idle:
            p.step()
    raise AssertionError("it is not computed")


def right(d: PlayedEngine, p: PlayedEngine, name: str, tokens: list[int]) -> None:
    d.run(p, until=name)
    assert d.done[name].tokens == answer(tokens, 4)


@pytest.mark.parametrize("groups", [HYBRID, STATEFUL, ALIGNED], ids=["window", "state", "aligned"])
def test_a_producer_that_makes_no_further_step_has_offered_all(make: Make, board: Switchboard, groups: Any) -> None:
    """Its answer goes out with the step that computes a prompt, and the next one may be a whole forward pass."""
    p, d = make(groups), decoder(make, board, groups)
    name = d.add(prompt(N), offered(p))
    steps_until(d, p, name, idle=True)
    right(d, p, name, prompt(N))


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_short_load_costs_no_further_step(
    make: Make, board: Switchboard, groups: Any, policy: str, ranks: int
) -> None:
    p, d = make(groups, ranks=ranks), decoder(make, board, groups, ranks=ranks, policy=policy)
    measured(p, d)
    before = d.computed.copy()
    params = offered(p)
    name = d.add(prompt(N), params)
    assert steps_until(d, p, name) == 0
    right(d, p, name, prompt(N))
    assert d.computed[name] - before.get(name, 0) == 1 + 3, "only the last token of its prompt was computed here"


def test_a_short_load_behind_a_cached_prefix_costs_no_further_step(make: Make, board: Switchboard) -> None:
    p, d = make(), decoder(make, board)
    measured(p, d)
    text = prompt(N, 5)
    d.run(until=d.add(text[: BLOCK + 1], n=1))
    name = d.add(text, offered(p, 5))
    assert steps_until(d, p, name) == 0
    right(d, p, name, text)
    assert d.computed[name] == 1 + 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_links_are_made_as_soon_as_a_request_names_its_producer(make: Make, board: Switchboard, ranks: int) -> None:
    """It waits, since others have all seats; what it will need of its producer need not wait with it."""
    p, d = make(ranks=ranks), decoder(make, board, ranks=ranks, seqs=1, extra={"step_budget": 0})
    d.add(prompt(20, 5), n=4)
    d.step()
    names = [d.add(prompt(N, i), offered(p, i)) for i in range(2)]
    source, own = p.address, d.address if ranks > 1 else None
    assert not d.wire.loads(d) and all(agent.prepared == [(source, own)] for agent in d.agents)
    for i, name in enumerate(names):
        right(d, p, name, prompt(N, i))


def test_sixteen_at_once_share_a_step_and_its_budget(make: Make, board: Switchboard) -> None:
    p, d = make(seqs=20, blocks=400), decoder(make, board, seqs=20, blocks=400, budget=512)
    measured(p, d)
    params = [offered(p, i) for i in range(16)]
    names = [d.add(prompt(N, i), params[i]) for i in range(16)]
    output = d.step()
    assert set(names) <= output.num_scheduled_tokens.keys()
    for i, name in enumerate(names):
        right(d, p, name, prompt(N, i))


def test_what_does_not_come_within_the_budget_costs_one_step(make: Make, board: Switchboard, wire: Wire) -> None:
    p, d = make(), decoder(make, board)
    measured(p, d)
    params = offered(p)
    board.waited = lambda: None
    other = d.add(prompt(20, 5), n=30)  # whom nobody holds up
    d.step()
    name = d.add(prompt(N), params)
    output = d.step()
    assert name not in output.num_scheduled_tokens and other in output.num_scheduled_tokens
    assert name in d.step().num_scheduled_tokens  # the wire has pumped between the two
    right(d, p, name, prompt(N))


def test_the_first_load_over_a_link_runs_in_its_step_too(make: Make, board: Switchboard) -> None:
    p, d = make(), decoder(make, board)
    params = offered(p)
    name = d.add(prompt(N), params)
    assert steps_until(d, p, name) == 0
    right(d, p, name, prompt(N))


def test_a_producer_that_is_stuck_holds_up_one_step_and_no_more(make: Make, board: Switchboard, wire: Wire) -> None:
    p, d = make(), decoder(make, board)
    measured(p, d)
    params = [offered(p, i) for i in range(3)]
    wire.paused = True
    board.waits.clear()
    names = [d.add(prompt(N, i), params[i]) for i in range(2)]
    d.steps(10)
    assert sum(wait > 0 for wait in board.waits) <= 2, "each of those that came before it was known is waited for once"
    board.waits.clear()
    names.append(d.add(prompt(N, 2), params[2]))
    d.steps(10)
    assert not any(board.waits), "a producer that was waited for in vain is waited for again"
    wire.paused = False
    for i, name in enumerate(names):
        right(d, p, name, prompt(N, i))
    again = d.add(prompt(N, 7), offered(p, 7))
    assert steps_until(d, p, again) == 0, "once something has come from it, there is no more doubt"
    right(d, p, again, prompt(N, 7))


def test_who_stands_behind_a_load_that_does_not_come_is_not_held_up(make: Make, board: Switchboard, wire: Wire) -> None:
    """The queue's first is waited for, and what comes for others meanwhile counts for them."""
    p, d = make(), decoder(make, board)
    measured(p, d)
    params = [offered(p, i) for i in range(3)]
    wire.paused = True
    names = [d.add(prompt(N, i), params[i]) for i in range(3)]

    def others_come() -> None:
        for load in wire.loads(d):
            if load.fetch.handle != names[0] and not load.ended:
                assert wire.read(load) and wire.settle(load)

    board.waited = others_come
    output = d.step()
    assert names[0] not in output.num_scheduled_tokens and set(names[1:]) <= output.num_scheduled_tokens.keys()
    wire.paused, board.waited = False, wire.pump
    for i, name in enumerate(names):
        right(d, p, name, prompt(N, i))


def test_what_comes_while_another_is_waited_for_is_there_in_the_next_step(
    make: Make, board: Switchboard, wire: Wire
) -> None:
    """Though nothing can run in this one, blocks are not what the engine lacks."""
    p, d = make(), decoder(make, board)
    measured(p, d)
    params = [offered(p, i) for i in range(2)]
    wire.paused = True
    names = [d.add(prompt(N, i), params[i]) for i in range(2)]
    first, _ = wire.loads(d)
    waits = iter(range(9))
    board.waited = lambda: next(waits) == 1 and wire.read(first) and wire.settle(first)
    assert not d.step().num_scheduled_tokens
    assert names[0] in d.step().num_scheduled_tokens
    wire.paused, board.waited = False, wire.pump
    for i, name in enumerate(names):
        right(d, p, name, prompt(N, i))
    assert d.computed[names[0]] == 1 + 3


def test_copies_share_the_budget_of_their_step(make: Make, board: Switchboard, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = make(blocks=100), decoder(make, board, blocks=100)
    now = 0.0
    monkeypatch.setattr(clock, "now", lambda: now)
    copies = d.workers[0]._work._side._copy

    def copy(*tables: Any) -> None:
        nonlocal now
        copies(*tables)
        now += takes

    d.workers[0]._work._side._copy = copy
    takes = 0.6  # of a budget of 1
    measured(p, d)
    params = [offered(p, i) for i in range(2)]
    names = [d.add(prompt(N, i), params[i]) for i in range(2)]
    first = d.step().num_scheduled_tokens
    assert names[0] in first and names[1] not in first
    assert names[1] in d.step().num_scheduled_tokens
    for i, name in enumerate(names):
        right(d, p, name, prompt(N, i))
    takes = 2.0
    for seed in range(8, 12):
        measured_as(p, d, seed)
    slow = d.add(prompt(N, 7), offered(p, 7))
    assert steps_until(d, p, slow) > 0, "a copy that takes longer than the budget is not for a step"
    right(d, p, slow, prompt(N, 7))


def test_one_slow_copy_does_not_decide_for_good(
    make: Make, board: Switchboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is slow, since memory is cold; all others would fit, but for what was known of it."""
    p, d = make(blocks=100), decoder(make, board, blocks=100)
    now = 0.0
    monkeypatch.setattr(clock, "now", lambda: now)
    copies = d.workers[0]._work._side._copy
    takes = [0.1] * 9 + [2.0]  # of a budget of 1

    def copy(*tables: Any) -> None:
        nonlocal now
        copies(*tables)
        now += takes.pop()

    d.workers[0]._work._side._copy = copy
    steps = []
    for seed in range(7):
        name = d.add(prompt(N, seed), offered(p, seed))
        steps.append(steps_until(d, p, name))
        right(d, p, name, prompt(N, seed))
    assert steps[0] == 0 and steps[1] > 0 and steps[3:] == [0] * 4


def test_beside_the_steps_it_costs_one(make: Make, board: Switchboard) -> None:
    """A load of which nothing is known: what it waits for is the step in which it came, and no other."""
    p, d = make(), decoder(make, board, extra={"step_budget": 0})
    params = offered(p)
    other = d.add(prompt(20, 5), n=40)
    d.step()
    name = d.add(prompt(N), params)
    seen = d.scheduler.schedule
    d.scheduler.schedule = lambda *a, **k: _then(seen(*a, **k), d.wire.pump)  # type: ignore[method-assign]
    assert steps_until(d, p, name) == 1
    right(d, p, name, prompt(N))
    assert other


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_abort_after_vllm_has_heard_of_the_end_and_before_a_step_says_so_too(
    make: Make, board: Switchboard, ranks: int
) -> None:
    p, d = make(ranks=ranks), decoder(make, board, ranks=ranks, extra={"step_budget": 0})
    name = d.add(prompt(N), offered(p))
    d.step()
    d.steps(1 + d.overlap)
    d.abort(name)
    d.run(p)
    again = d.add(prompt(N, 3), offered(p, 3))
    right(d, p, again, prompt(N, 3))
    assert d.computed[again] == 1 + 3


@pytest.mark.parametrize(("budget", "way"), [(1, "sync"), (0, "async")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trace_has_a_line_for_each_load(
    make: Make, board: Switchboard, wire: Wire, tmp_path: Path, budget: int, way: str, ranks: int
) -> None:
    path = tmp_path / "trace.jsonl"
    p = make(ranks=ranks)
    d = decoder(make, board, ranks=ranks, extra={"step_budget": budget, "trace": str(path)})
    names = [d.add(prompt(N, i), offered(p, i)) for i in range(2)]
    d.step()
    right(d, p, names[0], prompt(N))
    right(d, p, names[1], prompt(N, 1))
    params = offered(p, 2)
    wire.paused = True
    names.append(d.add(prompt(N, 2), params))
    d.step()
    for load in wire.loads(d):
        wire.fail(load, "the link broke")
    wire.paused = False
    right(d, p, names[2], prompt(N, 2))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["request"] for line in lines] == names
    assert {line["way"] for line in lines} == {way} and {line["tokens"] for line in lines} == {N - 1}
    assert [line["failure"] and "the link broke" in line["failure"] for line in lines] == [None, None, True]
    at = p.address
    for line in lines:
        assert line["source"] == f"{at.host}:{at.port}" and line["transfer"].startswith("own/")
        assert 0 <= line["us"]["fetched"] <= line["us"]["seen"]


def test_a_prefetch_that_is_refused_frees_the_producer_s_blocks(make: Make, board: Switchboard, wire: Wire) -> None:
    """As any load does: the producer, which has not heard of it, need not hold them for its lease."""
    p = make()
    d, params = decoder(make, board), offered(p)
    wire.paused = True
    name = d.add(prompt(N), params)
    d.step()
    for load in wire.loads(d):
        wire.fail(load, "the models differ: updates", kind=FailureKind.INCOMPATIBLE)
    right(d, p, name, prompt(N))
    offers_nothing(p)


def test_a_trace_that_cannot_be_written_for_a_while_is_no_matter_and_goes_on(
    make: Make, board: Switchboard, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder" / "trace"
    path.parent.mkdir()
    p, d = make(), decoder(make, board, extra={"step_budget": 1, "trace": str(path)})
    path.unlink()
    path.parent.rmdir()
    for i in range(2):
        right(d, p, d.add(prompt(N, i), offered(p, i)), prompt(N, i))
    assert len([r for r in caplog.records if "no more lines are written" in r.message]) == 1
    path.parent.mkdir()
    right(d, p, d.add(prompt(N, 2), offered(p, 2)), prompt(N, 2))
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["failure"] is None


def _then(result: Any, call: Any) -> Any:
    """The transfer is done while the step runs."""
    call()
    return result


@pytest.mark.parametrize("quiet", [True, False], ids=["quiet", "still written"])
def test_a_failure_within_the_step_is_computed_in_that_step(
    make: Make, board: Switchboard, wire: Wire, quiet: bool
) -> None:
    p, d = make(), decoder(make, board, policy="fail", budget=256)
    measured(p, d)
    params = offered(p)
    wire.paused = True
    name = d.add(prompt(N), params)
    (load,) = wire.loads(d)
    wire.fail(load, "the link broke", quiet=quiet)
    assert steps_until(d, p, name) == 0
    if not quiet:
        wire.scribble(load)
        d.steps(2)
        wire.scribble(load)
        wire.quiet(load)
    wire.paused = False
    right(d, p, name, prompt(N))
    assert d.computed[name] == N + 3
    params = offered(p, 7)
    again = d.add(prompt(N, 7), params)
    assert steps_until(d, p, again) > 0, "not within a step over a link that has just failed"
    right(d, p, again, prompt(N, 7))


def test_another_generation_on_one_rank_is_no_load(make: Make, board: Switchboard, wire: Wire) -> None:
    p, d = make(ranks=2), decoder(make, board, ranks=2, budget=256)
    measured(p, d)
    params = offered(p)
    wire.paused = True
    name = d.add(prompt(N), params)
    for load in wire.loads(d):
        assert wire.read(load) and load.offer is not None
        load.agent.end(load, Outcome(), load.offer.generation + load.agent.rank.tp)
        load.agent.quiet(load)
    assert steps_until(d, p, name) == 0
    wire.paused = False
    right(d, p, name, prompt(N))
    assert d.computed[name] == N + 3
    p.lease_ends()


@pytest.mark.parametrize("deaf", [True, False])
def test_a_channel_that_loses_everything_costs_steps_and_nothing_else(
    make: Make, board: Switchboard, deaf: bool
) -> None:
    p, d = make(), decoder(make, board)
    measured(p, d)
    board.deaf, board.mute = deaf, not deaf
    name = d.add(prompt(N), offered(p))
    assert steps_until(d, p, name) > 0
    right(d, p, name, prompt(N))
    assert d.computed[name] == 1 + 3


@pytest.mark.parametrize("when", ["under way", "here"])
def test_an_abort_gives_the_borrowed_blocks_back(make: Make, board: Switchboard, wire: Wire, when: str) -> None:
    p, d = make(), decoder(make, board)
    measured(p, d)
    params = offered(p)
    wire.paused = when == "under way"
    name = d.add(prompt(N), params)
    wire.pump()
    free = d.free
    d.abort(name)
    d.step()
    wire.paused = False
    d.run(p)
    assert free < d.blocks - 1 == d.free


def test_a_pool_that_is_short_lends_nothing(make: Make, board: Switchboard) -> None:
    p, d = make(), decoder(make, board, blocks=14)
    measured(p, d)
    name = d.add(prompt(N), offered(p))
    assert steps_until(d, p, name) > 0
    right(d, p, name, prompt(N))


def test_blocks_that_wait_for_a_request_go_to_others_who_need_them(make: Make, board: Switchboard, wire: Wire) -> None:
    """D has room for the load when it comes, and no longer when it is here."""
    p, d = make(blocks=100), decoder(make, board, blocks=40, budget=512)
    measured(p, d)
    params = offered(p)
    wire.paused = True
    name = d.add(prompt(N), params)
    hog = d.add(prompt(30 * BLOCK, 3), n=60)
    d.step()
    wire.paused = False
    right_hog = answer(prompt(30 * BLOCK, 3), 60)
    d.run(p, until=name)
    d.run(p, until=hog)
    assert d.done[hog].tokens == right_hog
    assert d.done[name].tokens == answer(prompt(N), 4)


def test_a_transfer_that_its_router_named_is_not_waited_for(make: Make, board: Switchboard) -> None:
    """P may not have begun with it."""
    p, d = make(), decoder(make, board)
    measured(p, d)
    at = p.address
    name = d.add(
        prompt(N), {"do_remote_prefill": True, "transfer_id": "t1", "remote_host": at.host, "remote_port": at.port}
    )
    board.waits.clear()
    d.steps(3)
    assert not any(board.waits)
    p.add(prompt(N), {"do_remote_decode": True, "transfer_id": "t1"}, n=1)
    d.run(p, until=name)
    assert d.done[name].tokens == answer(prompt(N), 4) and d.computed[name] == 1 + 3


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_what_has_come_into_the_prefix_cache_meanwhile_is_not_copied_over(
    make: Make, board: Switchboard, groups: Any
) -> None:
    """Others may be reading those blocks, in this engine or from afar."""
    p, d = make(groups), decoder(make, board, groups, seqs=1)
    measured(p, d)
    params = offered(p)
    other = d.add(prompt(N), n=3)
    name = d.add(prompt(N), params)
    d.run(p, until=other)
    while name not in (output := d.step()).num_scheduled_tokens:
        p.step()
    meta = output.kv_connector_metadata
    assert isinstance(meta, StepMetadata)
    (copy,) = meta.step.copies
    assert all((row >= 0).tolist() == [False, False, False, True] for row in copy.dst)
    right(d, p, name, prompt(N))


def test_blocks_of_the_prefix_cache_are_not_lent_to_their_own_request(make: Make, board: Switchboard) -> None:
    """vLLM looks them up, asks us, and only then takes them: in a cache that is full they may be the next to be given away."""
    p, d = make(), decoder(make, board)
    measured(p, d)
    text, pool = prompt(N, 5), d.pool
    first = d.add(text[:20], n=2)
    d.run(until=first)
    d.run(until=d.add(prompt(20 * BLOCK, 6), n=1))
    free = pool.free_block_queue.get_all_free_blocks()
    held = pool.get_new_blocks(next(i for i, block in enumerate(free) if block.block_id == first_block(d, text)))
    name = d.add(text, offered(p, 5))
    right(d, p, name, text)
    pool.free_blocks(held)


def first_block(d: PlayedEngine, text: list[int]) -> int:
    """Of a prompt, in D's prefix cache."""
    probe = Request("probe", text, SamplingParams(max_tokens=1), None, block_hasher=d.hasher)
    return int(d.scheduler.kv_cache_manager.get_computed_blocks(probe)[0].get_block_ids()[0][0])


def test_siblings_find_in_the_prefix_cache_what_one_has_prefetched(make: Make, board: Switchboard) -> None:
    p, d = make(), decoder(make, board)
    measured(p, d)
    params = offered(p)
    both = [d.add(prompt(N), params) for _ in range(2)]
    assert {steps_until(d, p, name) for name in both} == {0}
    for name in both:
        right(d, p, name, prompt(N))
