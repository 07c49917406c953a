"""An engine that is asked to stop leaves no consumer with a broken load: it is fetched in time, or fails at once with a clear reason."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator

import pytest

from kvxfer.failures import FailureKind
from kvxfer.identity import TransferId
from kvxfer.protocol.values import Ended, Released
from tests.control.conftest import SeededEngine, fetch, offered, until
from tests.control.node import DRAIN_S, Node, name, nodes
from tests.control.test_processes import deliver

NEVER_S = 1e6
"""Longer than a test may take."""
LONG_S = 30.0
"""How long an engine drains that need not: the end of what it offers ends it sooner."""

K = FailureKind
Make = Callable[..., Node]
T = TransferId("own/1/x", 0)


@pytest.fixture
def node() -> Iterator[Make]:
    with nodes(transfer_timeout=20.0, lease=30.0) as make:
        yield make


@pytest.mark.parametrize("backend", ["zmq", "tcp"])
def test_a_load_that_is_under_way_is_completed(node: Make, backend: str) -> None:
    options = {"inner": backend, "delay_s": 1.0}
    p = node(backend="kvxfer.testing.faults:Faulty", backend_options=options, seed=1)
    d = node(backend="kvxfer.testing.faults:Faulty", backend_options={"inner": backend})
    p.drains(LONG_S)
    p.offer(name(1), [3, 4], 8, 1, True)
    expected = p.blocks([3, 4])
    d.fetch(name(1), p.source, [5, 6], 8)
    time.sleep(0.3)
    p.process.terminate()
    assert d.settled(name(1)).outcome.delivered and d.blocks([5, 6]) == expected
    p.process.join(LONG_S / 2)
    assert p.process.exitcode == 0, "it need not wait any longer"


def test_an_offer_that_nobody_has_asked_for_yet_is_still_fetched(node: Make) -> None:
    """The router has answered, and the consumer is about to come."""
    p, d = node(seed=1), node()
    deliver(p, d, "met")
    p.drains(LONG_S)
    for i in range(2):
        p.offer(name(i), [3 + i], 4, 1, True)
    p.process.terminate()
    time.sleep(0.5)
    for i in range(2):
        d.fetch(name(i), p.source, [5 + i], 4)
        assert d.settled(name(i)).outcome.delivered
    p.process.join(LONG_S / 2)
    assert p.process.exitcode == 0


def test_what_is_not_fetched_in_time_fails_at_once_and_says_so(node: Make) -> None:
    p, d = (node(seed=seed, transfer_timeout=60.0, peer_timeout=60.0, lease=60.0) for seed in (1, 0))
    p.offer(name("half"), [3], 4, 1, False)
    p.offer(name("forgotten"), [9], 4, 1, True)
    d.fetch(name("half"), p.source, [5, 6], 8)
    until(lambda: d.blocks([5]) == p.blocks([3]))
    at = time.monotonic()
    p.process.terminate()
    end = d.settled(name("half"))
    assert DRAIN_S - 0.1 < time.monotonic() - at
    assert end.outcome.kind is K.PEER_LOST and "the engine is stopping" in str(end.outcome), end
    d.fetch(name("forgotten"), p.source, [7], 4)
    late = d.settled(name("forgotten"))
    assert late.outcome.kind in {K.PEER_LOST, K.PEER_UNREACHABLE, K.NO_SUCH_ENGINE}
    p.process.join(30)
    assert p.process.exitcode == 0


def test_wants_of_what_is_not_offered_keep_nobody(engine: Callable[..., SeededEngine]) -> None:
    p, d = engine({}, seed=1), engine({})
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=T))
    until(lambda: p.agents[0].stats().offers > 0)
    assert p.agents[0].drain(NEVER_S)
    assert d.wait(Ended)[0].outcome.kind is K.PEER_LOST


def test_an_offer_of_a_moment_ago_counts_and_may_be_completed_meanwhile(engine: Callable[..., SeededEngine]) -> None:
    from threading import Thread

    p, d = engine({}, seed=1), engine({})
    p.agents[0].offer(offered([3], 4, transfer=T, final=False))
    drained: list[bool] = []
    draining = Thread(target=lambda: drained.append(p.agents[0].drain(30.0)))
    draining.start()
    d.agents[0].fetch(fetch(p.source, [5, 6], 8, transfer=T))
    time.sleep(0.3)
    p.agents[0].offer(offered([3, 4], 8, transfer=T))
    assert d.wait(Ended)[0].outcome.delivered
    assert p.wait(Ended)[0].outcome.delivered and p.wait(Released)
    draining.join(20)
    assert drained == [True]


def test_waiting_costs_nothing(engine: Callable[..., SeededEngine]) -> None:
    """Whoever drains sleeps until it is over, and does not look again and again."""
    p = engine({}, seed=1)
    p.agents[0].offer(offered([3], 4, transfer=T))
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    p.agents[0].drain(1.0)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 15
