"""What broke vLLM's former P2pNcclConnector, one test each, as far as connector and schedule are concerned and no other
test of this folder has it (those name it in their docstrings)."""

from __future__ import annotations

import time

import pytest

from kvxfer.schedule import FetchSchedule
from kvxfer.values import BlockTable
from tests.vllm.cases import CACHES, OFFER, both, check, decode, prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import HYBRID, Group, answer, ours, prompt
from tests.vllm.wire import Wire


def test_hang_1_request_ids_that_differ(make: Make) -> None:
    """vLLM gives one request another random id on each side, and n > 1 a prefix: no key is made of them."""
    p, d = make(), make()
    text = prompt(60)
    params = prefill(p, text, name="chatcmpl-abc")
    b = d.add(text, params, name="0_chatcmpl-xyz")
    d.run(p, until=b)
    assert d.computed[b] == 1 + 3


def test_hang_1_params_lost_on_one_side(make: Make) -> None:
    """One side was never told: nobody waits longer than a lease."""
    p, d = make(), make()
    text = prompt(60)
    prefill(p, text)
    b = d.add(text)
    d.run(p, until=b)
    check(d, b, text)
    p.lease_ends()


@CACHES
def test_hang_6_one_stuck_consumer(make: Make, wire: Wire, groups: tuple[Group, ...]) -> None:
    """P serves others meanwhile, and its own steps never wait."""
    p, stuck, d = make(groups), make(groups), make(groups)
    first, second = prompt(60), prompt(61, seed=1)
    params = prefill(p, first)
    wire.paused = True
    b = stuck.add(first, params)
    stuck.steps(3)
    (load,) = wire.loads(stuck)
    wire.begin(load)
    params = prefill(p, second)
    c = d.add(second, params)
    d.steps(2)
    (other,) = wire.loads(d)
    assert wire.read(other) and wire.settle(other)
    d.run(p, until=c)
    check(d, c, second)
    wire.fail(load, "it took too long")
    stuck.run(p, until=b)
    check(stuck, b, first)


def test_hang_10_shutdown_with_work_left(make: Make, wire: Wire) -> None:
    """Threads and sockets end though requests are waiting, and twice is no error."""
    p, d = make(), make()
    wire.paused = True
    text = prompt(60)
    name = d.add(text, prefill(p, text))
    d.steps(2)
    started = time.monotonic()
    d.close()
    d.close()
    assert time.monotonic() - started < 10, "it waited for something"
    d.abort(name)


def test_wrong_tokens_2_a_load_that_comes_too_late(make: Make) -> None:
    """P has freed the blocks: D is told so, and computes what it had counted as loaded."""
    p, d = make(), make()
    text = prompt(60)
    params = prefill(p, text)
    p.lease_ends()
    p.run()
    name = decode(d, text, params)
    assert d.computed[name] == 60 + 3


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_wrong_tokens_3_tokens_and_blocks_that_do_not_match(
    make: Make, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """A contradiction in what vLLM says costs the request, never the engine, and nothing is written to fewer blocks."""
    p, d = make(), make(policy=policy)
    text, other = prompt(90), prompt(30, seed=1)
    params = prefill(p, text)
    allocated = FetchSchedule.allocated

    def short(self: FetchSchedule, request: str, table: BlockTable, computed: int, external: int) -> None:
        allocated(self, request, BlockTable.of(row[:2] for row in table), computed, external)

    monkeypatch.setattr(FetchSchedule, "allocated", short)
    name, beside = d.add(text, params), d.add(other)
    d.run(p, until=beside)
    d.run(p, until=name)
    check(d, beside, other)
    assert d.done[name].tokens == (answer(text, 4) if policy == "recompute" else [])


def test_leak_2_a_late_offer_for_a_request_that_is_gone(make: Make) -> None:
    """D's request was aborted before P's began: nobody wants what P then offers, and P does not keep it."""
    p, d = make(), make()
    text = prompt(60)
    to_p, to_d = both(p, "job")
    b = d.add(text, to_d)
    d.steps(2)
    d.abort(b)
    d.run()
    p.add(text, to_p, n=1)
    p.run()


def test_leak_3_a_hundred_requests(make: Make) -> None:
    """Neither side remembers more of a hundred requests than of none."""
    p, d = make(HYBRID), make(HYBRID)
    for i in range(100):
        text = prompt(40 + i % 30, seed=i)
        decode(d, text, prefill(p, text), p, n=2)
    d.run(p)
    assert len(ours(p.scheduler.connector)._sched) == len(ours(d.scheduler.connector)._sched) == 0


@CACHES
def test_crash_1_a_chunk_that_needs_no_new_block(make: Make, groups: tuple[Group, ...]) -> None:
    """20 tokens, of which the first chunk takes 17: the second finds its block there already."""
    p, d = make(groups, budget=17), make(groups)
    text = prompt(20)
    name = decode(d, text, prefill(p, text), p)
    assert d.computed[name] == 1 + 3


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_crash_2_a_producer_that_goes_on(make: Make, role: str) -> None:
    """A health probe, a direct request, a router that leaves max_tokens as it was."""
    p, d = make(role=role), make(role="kv_consumer")
    probe = p.add(prompt(30, seed=3), n=20)
    text = prompt(60)
    params = prefill(p, text, n=33)
    decode(d, text, params, p)
    p.run(until=probe)
    check(p, probe, prompt(30, seed=3), 20)


def test_crash_3_params_for_the_other_role(make: Make) -> None:
    """An engine that only prefills is asked to load, one that only decodes to offer: both compute."""
    p, d = make(role="kv_producer"), make(role="kv_consumer")
    text = prompt(60)
    params = prefill(p, text)
    a, b = p.add(prompt(50, seed=1), params), d.add(prompt(50, seed=2), OFFER)
    p.run(d, until=a)
    d.run(p, until=b)
    assert d.done[b].params is None
    check(p, a, prompt(50, seed=1))
    check(d, b, prompt(50, seed=2))
    decode(d, text, params, p)


def test_crash_4_many_engines_on_one_host(make: Make) -> None:
    """Each takes a port of its own."""
    engines = [make() for _ in range(4)]
    assert len({engine.address.port for engine in engines}) == 4


def test_frees_that_are_not_ours(make: Make) -> None:
    """Workers that say of a held request that it may be freed are believed; nothing is freed twice."""
    p = make()
    text = prompt(60)
    name = p.add(text, OFFER, n=1)
    p.run(until=name)
    ours(p.scheduler.connector)._sched._next.freed += (name,)
    p.run()
    assert len(ours(p.scheduler.connector)._sched) == 0
