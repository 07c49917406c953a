"""A producer that is gone costs the first load `peer_timeout` at the most, and later ones nothing, until it answers again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from kvxfer.failures import FailureKind
from kvxfer.identity import Source
from kvxfer.protocol.values import Ended
from tests.control.conftest import until
from tests.control.node import Node, name, nodes
from tests.control.test_processes import deliver, half
from tests.relay import Relay

K = FailureKind
SILENCE, TIMEOUT = 3.0, 30.0
DEAD = {K.PEER_LOST, K.PEER_UNREACHABLE, K.NO_SUCH_ENGINE}
Make = Callable[..., Node]


@pytest.fixture(params=["tcp", pytest.param("zmq", marks=pytest.mark.slow)])
def node(request: pytest.FixtureRequest) -> Iterator[Make]:
    with nodes(request.param, peer_timeout=SILENCE, transfer_timeout=TIMEOUT, lease=30.0) as make:
        yield make


def load(d: Node, source: Source, i: int | str) -> Ended:
    d.fetch(name(i), source, [5], 4)
    return d.settled(name(i), timeout=TIMEOUT + 5)


def found_dead(end: Ended) -> None:
    """Check that a load ended because of its producer's silence or end, and not with its own time."""
    failure = end.outcome.failure
    assert failure is not None and failure.kind in DEAD and "nothing came within" not in failure.detail, end


def known_to_be_dead(d: Node, source: Source) -> None:
    """Check that further loads are told at once what is known, or that nobody listens, and do not wait for the silence again."""
    for i in range(5):
        found_dead(end := load(d, source, f"later {i}"))
        detail = end.outcome.failure.detail
        assert any(words in detail for words in ("has not since", "is gone", "has restarted")), end


@pytest.mark.parametrize("met", [False, True], ids=["a stranger", "a peer"])
def test_killed(node: Make, met: bool) -> None:
    p, d = node(seed=1), node()
    if met:
        deliver(p, d, "met")
    p.kill()
    found_dead(load(d, p.source, "first"))
    known_to_be_dead(d, p.source)


def test_killed_amid_a_load(node: Make) -> None:
    p, d = node(seed=1), node()
    half(p, d, "half")
    p.kill()
    end = d.settled(name("half"), timeout=TIMEOUT + 5)
    assert end.outcome.kind is K.PEER_LOST, "it was there"
    known_to_be_dead(d, p.source)


@pytest.mark.parametrize("met", [False, True], ids=["a stranger", "a peer"])
def test_killed_while_its_link_is_being_made(node: Make, met: bool) -> None:
    """Its system takes the connection, and ends it without a word. As its directory has answered, `peers` is not the cause."""
    p, d = node(seed=1), node(peer_timeout=10.0)
    relay = Relay(p.address())
    p.publish_at(relay.address)
    if met:
        deliver(p, d, "met")
    else:
        relay.freeze()
    d.fetch(name("half"), p.source, [15, 12], 8)
    until(lambda: relay.connections == 1)
    os.kill(p.process.pid, signal.SIGSTOP)
    if met:
        relay.cut()
        until(lambda: relay.connections == 1)
    time.sleep(0.3)
    p.kill()
    relay.thaw()
    failure = d.settled(name("half"), timeout=TIMEOUT + 5).outcome.failure
    relay.close()
    assert failure.kind is (K.PEER_LOST if met else K.PEER_UNREACHABLE)
    assert "'peers'" not in str(failure) and "process ended" in failure.detail and "runs" in failure.advice


@pytest.mark.parametrize("met", [False, True], ids=["a stranger", "a peer"])
def test_stopped_and_there_again(node: Make, met: bool) -> None:
    p, d = node(seed=1), node()
    if met:
        deliver(p, d, "met")
    with p.stopped():
        found_dead(load(d, p.source, "first"))
        known_to_be_dead(d, p.source)
    p.offer(name("back"), [3], 4, 1, True)

    def back() -> bool:
        i = f"try {time.monotonic()}"
        p.offer(name(i), [3], 4, 1, True)
        return load(d, p.source, i).outcome.delivered

    until(back, timeout=30.0)


def test_loads_that_come_meanwhile_do_not_prolong_the_silence(node: Make) -> None:
    p, d = node(seed=1), node()
    with p.stopped():
        for i in range(50):
            d.fetch(name(i), p.source, [5 + i], 4)
            time.sleep(0.2)
            if any(isinstance(e, Ended) for e in d.events()):
                break
        else:
            raise AssertionError("no load ends while others come")
        assert not any(d.settled(name(at)).outcome.delivered for at in range(i + 1))


@pytest.mark.parametrize("met", [False, True], ids=["a stranger", "a peer"])
def test_a_link_that_is_cut_while_it_is_made_is_made_again(node: Make, met: bool) -> None:
    """The peer lives; what cuts is on the way, such as a firewall that restarts, and cuts more than once."""
    p, d = node(seed=1), node(peer_timeout=10.0)
    relay = Relay(p.address())
    p.publish_at(relay.address)
    p.offer(name("half"), [13], 4, 1, False)
    if not met:
        relay.freeze()
    d.fetch(name("half"), p.source, [15, 12], 8)
    if met:
        until(lambda: d.blocks([15]) == p.blocks([13]))
        relay.freeze()
        relay.cut()
    for _ in range(2):
        until(lambda: relay.connections == 1)
        relay.cut()
    relay.thaw()
    p.offer(name("half"), [13, 14], 8, 1, True)
    end = d.settled(name("half"), timeout=TIMEOUT + 5)
    relay.close()
    assert end.outcome.delivered, end
    assert d.blocks([15, 12]) == p.blocks([13, 14])
