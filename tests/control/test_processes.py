"""Agents in processes of their own that die, stop, restart and are lied to. Every transfer must end in time with one
truthful outcome on the side that lives, its memory must come back, and the next transfer must succeed."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from kvxfer.errors import ConfigError
from kvxfer.failures import FailureKind
from kvxfer.identity import Source
from kvxfer.protocol.values import Ended, Released
from kvxfer.transport import load
from tests.control.conftest import until
from tests.control.node import ALONE, Node, name, nodes
from tests.relay import Relay


def usable(backend: str) -> bool:
    try:
        return load(backend).probe().usable
    except ConfigError:
        return False


CMA = [pytest.mark.slow, pytest.mark.skipif(not usable("cma"), reason="cma cannot be used here")]
"""Deaths and stops of a peer are told for each back end by the clauses of the conformance suite."""
Make = Callable[..., Node]


@pytest.fixture(params=["zmq", pytest.param("cma", marks=CMA)])
def node(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes nodes on each back end; ends them all."""
    with nodes(request.param) as make:
        yield make


def deliver(p: Node, d: Node, i: int | str) -> None:
    """A transfer from one end to the other."""
    p.offer(name(i), [3, 1, 7], 12, 1, True)
    d.fetch(name(i), p.source, [5, 2, 9], 12)
    end = d.settled(name(i))
    assert end.outcome.delivered, end
    assert d.blocks([5, 2, 9]) == p.blocks([3, 1, 7])
    assert p.settled(name(i)).outcome.delivered


def deliver_in_time(p: Node, d: Node) -> None:
    """A transfer from an end that was silent: it is asked every second whether it is back, and loads fail at once until then."""
    for attempt in range(20):
        again = name(f"again-{attempt}")
        p.offer(again, [3, 1, 7], 12, 1, True)
        d.fetch(again, p.source, [5, 2, 9], 12)
        end = d.settled(again)
        if end.outcome.delivered:
            assert d.blocks([5, 2, 9]) == p.blocks([3, 1, 7])
            assert p.settled(again).outcome.delivered
            return
        assert end.outcome.kind is FailureKind.PEER_LOST, end
        time.sleep(0.25)
    raise AssertionError(end)


def half(p: Node, d: Node, i: int | str) -> None:
    """A transfer of which the first part has arrived and the second is still to come."""
    p.offer(name(i), [13], 4, 1, False)
    d.fetch(name(i), p.source, [15, 12], 8)
    until(lambda: d.blocks([15]) == p.blocks([13]))


def rest(p: Node, i: int | str) -> None:
    """The second part."""
    p.offer(name(i), [13, 11], 8, 1, True)


# --- death ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_consumer_is_killed(node: Make, when: str) -> None:
    p, d = node(seed=1, lease=5.0), node()
    if when == "before":
        p.offer(name(0), [3], 4, 1, True)
    elif when == "during":
        half(p, d, 0)
    else:
        deliver(p, d, 0)
    d.kill()
    end = p.settled(name(0), timeout=60.0)
    assert end.outcome.kind is (None if when == "after" else FailureKind.UNFETCHED), end
    deliver(p, node(), "next")


# --- silence -------------------------------------------------------------------------------------------------------


def test_producer_is_stopped_and_goes_on_later(node: Make) -> None:
    p, d = node(seed=1, lease=5.0), node(peer_timeout=3.0)
    half(p, d, 0)
    with p.stopped():
        end = d.settled(name(0))
        assert end.outcome.kind is FailureKind.PEER_LOST, end
        d.scribble([15, 12])  # the engine uses its blocks for something else
        mine = d.blocks([15, 12])
    rest(p, 0)
    deliver_in_time(p, d)
    assert p.settled(name(0), timeout=60.0).outcome.kind is not None
    assert d.blocks([15, 12]) == mine, "bytes came after the release"


def test_consumer_is_stopped_and_goes_on_later(node: Make) -> None:
    p, d = node(seed=1, lease=5.0, peer_timeout=3.0), node()
    half(p, d, 0)
    with d.stopped():
        end = p.settled(name(0), timeout=60.0)
        assert end.outcome.kind is FailureKind.UNFETCHED, end
        p.scribble([13])
    assert d.settled(name(0)).outcome.kind is not None
    deliver(p, d, "next")


def test_a_host_that_froze_blames_no_peer(node: Make) -> None:
    """Both sides stand still for longer than the silence that they bear: neither could hear the other."""
    p, d = node(seed=1, peer_timeout=2.5, transfer_timeout=60.0), node(peer_timeout=2.5, transfer_timeout=60.0)
    half(p, d, 0)
    with p.stopped(), d.stopped():
        time.sleep(5.0)
    rest(p, 0)
    assert d.settled(name(0)).outcome.delivered


def test_directory_whose_connection_leads_nowhere_is_dialled_anew(node: Make) -> None:
    p, d = node(seed=1, lease=30.0), node(transfer_timeout=30.0, peer_timeout=3.0)
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # takes connections and never says a word
        relay = Relay(f"tcp://127.0.0.1:{nobody.getsockname()[1]}")
        at_relay = Source("127.0.0.1", int(relay.address.rpartition(":")[2]), p.source.epoch)
        p.offer(name(0), [13], 4, 1, True)
        d.fetch(name(0), at_relay, [15], 4)
        until(lambda: relay.connections == 1)
        relay.lead(f"tcp://127.0.0.1:{p.source.port}")
        end = d.settled(name(0), timeout=60.0)
        relay.close()
    assert end.outcome.delivered and d.blocks([15]) == p.blocks([13])


# --- epochs --------------------------------------------------------------------------------------------------------


def test_another_agent_answers_where_the_producer_was(node: Make) -> None:
    """The link's messages, and the hello that follows, reach an agent that started later at the same address, and that
    offers other bytes under the same name."""
    p, d = node(seed=1), node()
    relay = Relay(p.address())
    p.publish_at(relay.address)
    other = node(seed=2)  # before the transfer begins, whose time runs: a process may take as long to start
    half(p, d, 0)
    mine = d.blocks([12])
    other.offer(name(0), [13, 11], 8, 1, True)
    relay.lead(other.address())
    p.kill()
    relay.cut()
    end = d.settled(name(0))
    assert end.outcome.kind is FailureKind.PEER_LOST, end
    assert d.blocks([12]) == mine, "a stranger's bytes came"
    relay.close()
    d.fetch(name(0), other.source, [15, 12], 8)  # by its right epoch it can be had
    ends = d.wait(Ended, count=2, transfer=name(0))
    assert ends[1].outcome.delivered and d.blocks([15, 12]) == other.blocks([13, 11])


def test_news_for_an_earlier_engine_is_not_heard(node: Make) -> None:
    p, d = node(seed=1, **ALONE), node()
    old = p.source
    p.kill()
    p = node(seed=2, port=old.port, **ALONE)
    d.settle(old, name(0))
    d.settle(p.source, name(1))  # the same way, later
    heard: list[object] = []
    until(lambda: bool(heard.extend(p.notices()) or heard))
    assert heard == [name(1)]


# --- leaks ---------------------------------------------------------------------------------------------------------


def test_peers_that_die_leave_no_threads_and_no_descriptors(node: Make) -> None:
    d = node(peer_timeout=3.0)
    first = node(seed=1)
    deliver(first, d, "warm")
    first.kill()
    d.fetch(name("dead"), first.source, [5], 4)
    d.settled(name("dead"))
    before = d.vitals()
    for i in range(4):
        p = node(seed=2 + i)
        deliver(p, d, i)
        p.kill()
        d.fetch(name(f"dead {i}"), p.source, [5], 4)
        assert d.settled(name(f"dead {i}")).outcome.kind is not None
    until(lambda: d.vitals() <= before)
    assert d.vitals()[0] <= before[0] and d.vitals()[1] <= before[1]
    assert len(d.wait(Ended)) == len(d.wait(Released))
