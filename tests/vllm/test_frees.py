"""A prefill engine short of blocks waits for those that a decode engine is about to free, and preempts if nobody frees any."""

from __future__ import annotations

import time

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvxfer_vllm import blocks as frees
from kvxfer_vllm.blocks import FIRST_S, MAX_S, PendingFrees
from tests.vllm.cases import OFFER, check, prefill
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import PlayedEngine, prompt
from tests.vllm.wire import Wire

overlap = both_ways
PATIENT_S = 30.0
asks = pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "has_pending_block_frees"), reason="this vLLM preempts without asking"
)


def short(p: PlayedEngine) -> str:
    """Fill an engine with a held prompt and a request that needs more blocks with every 16 tokens."""
    return p.add(prompt(15, seed=3), n=90)


@asks
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "multi"])
def test_it_waits_for_a_fetch_under_way(make: Make, wire: Wire, nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frees, "FIRST_S", PATIENT_S)  # so that it waits for longer than this host may stand still
    monkeypatch.setattr(frees, "MAX_S", PATIENT_S)
    transfer = {}
    if nested:
        from tests.vllm.test_multi import OURS, multi, sibling

        transfer = {"transfer": multi(OURS, sibling())}
    p, d = make(blocks=14, caching=False, **transfer), make()
    running = short(p)
    p.steps(3)
    params = prefill(p, prompt(150))  # ten of its thirteen blocks
    wire.paused = True
    at_d = d.add(prompt(150), params)
    d.steps(2)
    until = time.monotonic() + FIRST_S
    while p.free and time.monotonic() < until:
        p.step()
    assert not p.free or time.monotonic() >= until
    p.steps(2)
    assert not p.preempted, "it preempts what could wait"
    wire.paused = False
    d.run(p, until=at_d)
    p.run(until=running)
    check(p, running, prompt(15, seed=3), 90)
    assert not p.preempted


@asks
def test_it_does_not_wait_for_nobody(make: Make) -> None:
    """What nobody fetches is held for its lease; a running request does not stand still for that."""
    p = make(blocks=14, caching=False)
    others = [short(p), p.add(prompt(15, seed=4), n=60)]
    p.steps(3)
    name = p.add(prompt(110), OFFER, n=1)
    p.run(until=name)
    begun = time.monotonic()
    while not p.preempted:
        p.step()
        assert time.monotonic() - begun < 20, "it waits for the lease"
    p.lease_ends()
    for other in others:
        p.run(until=other)
        assert p.done[other].reason == "length"


def test_what_is_usual_is_measured() -> None:
    now = [0.0]
    frees = PendingFrees(lambda: now[0])
    assert not frees.soon(), "nothing is held"
    for i in range(40):
        frees.held(f"r{i}")
        now[0] += 0.03
        frees.released(f"r{i}")
    assert 0.05 < frees.patience < 0.07
    frees.held("slow")
    assert frees.soon()
    now[0] += 0.05
    assert frees.soon()
    now[0] += 0.05
    assert not frees.soon(), "nobody fetches it"
    frees.held("next")
    assert frees.soon(), "but this one"
    now[0] += 0.2
    assert not frees.soon()
    frees.released("slow")
    frees.released("next")
    assert not frees.soon()


def test_it_does_not_wait_for_ever_though_ever_more_is_held() -> None:
    now = [0.0]
    frees = PendingFrees(lambda: now[0])
    waited = 0
    for i in range(200):
        frees.held(f"r{i}")
        now[0] += 0.01
        waited += frees.soon()
    assert waited * 0.01 <= MAX_S


def test_a_hold_that_ends_gives_patience_again() -> None:
    now = [0.0]
    frees = PendingFrees(lambda: now[0])
    for i in range(100):
        frees.held(f"r{i}")
        now[0] += 0.05
        assert frees.soon()
        frees.released(f"r{i}")
    assert not len([name for name in "x" if frees.soon()])
