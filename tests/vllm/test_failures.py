"""Loads that fail, requests that are aborted, and consumers that cannot or will not take what is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvxfer.failures import FailureKind
from kvxfer.protocol.messages import Decline, Named, Renew
from kvxfer_vllm.said import read_params
from tests.schedule.ends import held
from tests.vllm.cases import CACHES, OFFER, both, check, decode, let_go, offers_nothing, prefill
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import ours, prompt
from tests.vllm.wire import Wire

overlap = both_ways


@CACHES
@pytest.mark.parametrize("quiet", [True, False], ids=["quiet", "moving"])
def test_a_failed_load_fails_its_request(make: Make, wire: Wire, groups: Any, quiet: bool) -> None:
    """... and that one only."""
    p, d = make(groups), make(groups, policy="fail")
    text, other = prompt(90), prompt(50, seed=8)
    params = prefill(p, text)
    wire.paused = True
    name, beside = d.add(text, params), d.add(other)
    d.steps(2)
    (load,) = wire.loads(d)
    wire.begin(load)
    wire.fail(load, "the link broke", quiet=quiet)
    d.run(p, until=name)
    assert d.done[name].reason == "error" and d.done[name].tokens == []
    d.reject(text, params, name)  # vLLM's front end makes one up for a request that has failed
    d.run(p, until=beside)
    d.step()
    assert [outcome for stats in d.stats for outcome, _ in stats["requests"]] == ["peer_lost"]
    check(d, beside, other)
    if not quiet:
        let_go(wire, load)


def test_a_restarted_producer(make: Make, wire: Wire) -> None:
    """predecessor 2.1.3: params of an engine that was there before name its epoch, which the new one does not have."""
    p, d = make(), make()
    text = prompt(60)
    params = prefill(p, text)
    stale = params | {"kvxfer_epoch": f"{int(params['kvxfer_epoch'], 16) ^ 1:x}"}
    name = decode(d, text, stale, p)
    assert d.computed[name] == 60 + 3
    decode(d, text, params, p)


def test_an_engine_that_is_closed_with_work_left(make: Make, wire: Wire) -> None:
    """Threads and sockets end though requests are waiting, and twice is no error."""
    p, d = make(), make()
    wire.paused = True
    text = prompt(60)
    name = d.add(text, prefill(p, text))
    d.steps(2)
    d.close()
    d.close()
    d.abort(name)


def test_a_load_that_comes_after_the_lease(make: Make) -> None:
    """P has freed the blocks: D is told so, and computes what it had counted as loaded."""
    p, d = make(), make()
    text = prompt(60)
    params = prefill(p, text)
    p.lease_ends()
    p.run()
    name = decode(d, text, params)
    assert d.computed[name] == 60 + 3


@CACHES
@pytest.mark.parametrize("when", ["queued", "allocated", "loading", "failed", "delivered", "running"])
def test_abort_at_the_consumer(make: Make, wire: Wire, groups: Any, when: str) -> None:
    p, d = make(groups), make(groups)
    text = prompt(90)
    params = prefill(p, text)
    wire.paused = True
    name = d.add(text, params, n=50)
    if when == "allocated":
        output = d.scheduler.schedule()
        d.abort(name)
        d.flight.append((output, d._execute(output)))
        d._update()
    elif when != "queued":
        d.step()
        (load,) = wire.loads(d)
        if when == "failed":
            wire.fail(load, "the link broke")
            d.step()
        elif when in ("delivered", "running"):
            wire.read(load)
            wire.settle(load)
            d.steps(1 if when == "delivered" else 5)
            assert d.status(name) == ("WAITING_FOR_REMOTE_KVS" if when == "delivered" else "RUNNING")
    d.abort(name)
    d.run(p)
    if when == "queued":
        assert not wire.loads(d)
    wire.paused = False
    again = d.add(text, params)  # a client that tries again with what it has
    d.run(p, until=again)
    check(d, again, text)


@CACHES
@pytest.mark.parametrize("when", ["queued", "prefilling", "decoding", "held"])
def test_abort_at_the_producer(make: Make, wire: Wire, groups: Any, when: str) -> None:
    """Its consumer, which came at the same time, computes itself."""
    p, d = make(groups, budget=32), make(groups)
    text = prompt(90)
    to_p, to_d = both(p, "job")
    a, b = p.add(text, to_p, n=1 if when == "held" else 30), d.add(text, to_d)
    wire.paused = True
    d.steps(2)
    steps = {"queued": 0, "prefilling": 2, "decoding": 5, "held": 6}[when]
    held = when == "held" or (
        when == "decoding" and any(group.state for group in groups)
    )  # it does not go on after its first token
    p.steps(steps)
    p.abort(a)
    p.steps(3) if held else p.run(until=None)
    wire.paused = False
    d.run(p, until=b)
    check(d, b, text)
    assert d.computed[b] == (1 + 3 if held else 90 + 3)


def test_a_retry_under_the_same_id(make: Make, wire: Wire) -> None:
    """predecessor 2.2.9: nothing of the first try is used for the second, which has another prompt."""
    p, d = make(), make()
    old, new = prompt(60), prompt(60, seed=1)
    to_p, to_d = both(p, "job")
    a = p.add(old, to_p, n=1)
    p.run(until=a)
    b = d.add(old, to_d)
    wire.paused = True
    d.steps(2)
    d.abort(b)
    d.run(p)
    wire.paused = False
    a2, b2 = p.add(new, to_p, n=1), d.add(new, to_d)
    d.run(p, until=b2)
    check(d, b2, new)
    p.run(until=a2)
    p.step()
    p.lease_ends()  # D's want came before the offer, and was told what became of the first


@pytest.mark.parametrize("suffix", ["", "-12345678"])
def test_rejection_at_the_consumer(make: Make, suffix: str) -> None:
    """The front end refuses the request; P is told, and frees its blocks long before the lease is over."""
    p, d = make(), make()
    text = prompt(60)
    name = p.add(text, OFFER, n=1, name="cmpl-abc-0")
    p.run(until=name)
    params = p.done[name].params
    assert params is not None and p.free < p.blocks - 1
    d.reject(text, params, "cmpl-abc-0" + suffix)
    d.run(p)


def test_who_may_say_that_a_transfer_is_not_wanted(make: Make, wire: Wire) -> None:
    """A name can be guessed, and costs nobody anything; a digest cannot."""
    p, d = make(), make()
    text = prompt(60)
    params = prefill(p, text)
    tracker, told = (
        ours(p.scheduler.connector)._sched.side._schedule.producer,
        ours(d.scheduler.connector)._sched.side.directory,
    )
    [transfer] = held(tracker)
    before, epoch = p.free, p.address.epoch
    guessed, known = Named(transfer, b"guessed"), Named(transfer, read_params(params).digest)

    def step_until(true: Callable[[], bool]) -> None:
        end = time.monotonic() + 30.0
        while not true():
            assert time.monotonic() < end, "it was not told"
            time.sleep(0.005)  # notices go over a socket
            p.step()

    told.tell(p.address, Renew(epoch, (guessed,)))
    told.tell(p.address, Decline(epoch, (guessed,), "not wanted"))
    told.tell(p.address, Renew(epoch, (known,)))  # comes after them
    step_until(lambda: bool(p.agents[0].renewed))
    p.steps(4)
    assert p.agents[0].renewed == [transfer] and p.free == before
    decode(d, text, params, p)
    again = prefill(p, prompt(61))
    [transfer] = held(tracker)
    before = p.free
    told.tell(p.address, Decline(epoch, (Named(transfer, read_params(again).digest),), "not wanted"))
    step_until(lambda: p.free > before)


def test_a_consumer_that_does_not_fit_frees_the_producer_s_blocks(make: Make, wire: Wire) -> None:
    """Not only when the lease ends: a producer on its way to sleep waits for them, and so may other requests."""
    p, d = make(), make()
    text = prompt(90)
    params = prefill(p, text)
    wire.paused = True
    name = d.add(text, params)
    d.steps(2)
    (load,) = wire.loads(d)
    wire.fail(load, "the models differ: updates", kind=FailureKind.INCOMPATIBLE)
    d.run(p, until=name)
    check(d, name, text)
    offers_nothing(p)


def test_a_consumer_that_cannot_allocate_for_a_while(make: Make, wire: Wire) -> None:
    """Its request waits in vLLM's queue; P's lease is renewed meanwhile."""
    p, d = make(), make(blocks=12, caching=False, extra={"lease": 0.01})
    text = prompt(90)
    params = prefill(p, text)
    before = d.add(prompt(100, seed=5), n=60)
    d.step()
    name = d.add(text, params)
    while not p.agents[0].renewed:
        assert before not in d.done, "D has not renewed the lease"
        d.step()
        time.sleep(0.005)  # the notice goes over a socket
        p.step()
    d.run(p, until=name)
    check(d, name, text)
    assert d.computed[name] == 1 + 3


# --- what vLLM 0.33 may do besides ---------------------------------------------------------------------------------


@CACHES
def test_blocks_that_are_told_in_a_later_step(make: Make, wire: Wire, groups: Any) -> None:
    """`defer_async_loads`: the connector hears of a load's blocks once the step has ended in which the request was given them."""
    p, d = make(groups), make(groups)
    connector, text = d.scheduler.connector, prompt(90)
    told, later = connector.update_state_after_alloc, []
    connector.update_state_after_alloc = lambda request, blocks, n: (later.append if n else lambda a: told(*a))(
        (request, blocks, n)
    )
    name = d.add(text, prefill(p, text))
    d.steps(2)
    assert len(later) == 1 and not wire.loads(d), "nothing is fetched into blocks that are not known"
    told(*later.pop())
    d.run(p, until=name)
    check(d, name, text)
    assert d.computed[name] == 1 + 3


@CACHES
def test_a_promise_that_vllm_cuts_to_nothing(make: Make, groups: Any) -> None:
    """`cap_external_hit`: the request computes, and its producer has its blocks back."""
    p, d = make(groups), make(groups)
    connector, text = d.scheduler.connector, prompt(90)
    promised = connector.get_num_new_matched_tokens
    connector.get_num_new_matched_tokens = lambda request, computed: (promised(request, computed)[0] and 0, False)
    name = d.add(text, prefill(p, text))
    d.run(p, until=name)
    check(d, name, text)
    assert d.computed[name] == 90 + 3
    offers_nothing(p, d)
