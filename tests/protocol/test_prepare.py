"""Links that are made before anything is fetched over them."""

from __future__ import annotations

from kvxfer.failures import Failure, FailureKind
from kvxfer.identity import Source
from kvxfer.protocol.consumer import ConsumerMachine
from kvxfer.protocol.values import Close, Dial, LinkInfo, RankRoute, Resolve, Resolved, Send
from kvxfer.values import BlockTable, Fetch
from tests.protocol.test_doors import PLANNER, RIGHT, T

SOURCE = Source("p", 1, 1)
ROUTE = Resolved((RankRoute("a", 1), RankRoute("b", 1)))
FETCH = Fetch("req", T, RIGHT, SOURCE, BlockTable.of([[5, 6, 7]]), 0, 12)
WHY = Failure(FailureKind.PEER_UNREACHABLE, "nobody answers")


def test_a_fetch_finds_the_links_made() -> None:
    machine = ConsumerMachine(50.0, 8.0)
    assert machine.prepare(SOURCE, None) == [Resolve(SOURCE, None)]
    assert machine.resolved(SOURCE, ROUTE, 0.0) == [Dial("a"), Dial("b")]
    assert machine.prepare(SOURCE, None) == [], "they are being made"
    for link in "ab":
        assert machine.link_up(link, LinkInfo("read", PLANNER), 1.0) == []
    assert [type(action) for action in machine.fetch(FETCH, 2.0)] == [Send, Send]


def test_a_fetch_that_comes_meanwhile_does_not_dial_twice() -> None:
    machine = ConsumerMachine(50.0, 8.0)
    machine.prepare(SOURCE, None)
    machine.fetch(FETCH, 0.0)
    assert machine.resolved(SOURCE, ROUTE, 0.0) == [Dial("a"), Dial("b")]
    assert [type(action) for action in machine.link_up("a", LinkInfo("read", PLANNER), 1.0)] == [Send]


def test_what_cannot_be_made_is_no_matter_until_it_is_needed() -> None:
    machine = ConsumerMachine(50.0, 8.0)
    machine.prepare(SOURCE, None)
    assert machine.resolved(SOURCE, WHY, 0.0) == []
    machine.prepare(SOURCE, None)
    machine.resolved(SOURCE, ROUTE, 0.0)
    machine.link_down("a", WHY, 1.0)
    assert machine.fetch(FETCH, 2.0) == [Resolve(SOURCE, None)], "the way is looked up anew"
    machine.close(WHY, 3.0)
    assert machine.prepare(SOURCE, None) == []


def test_a_way_that_nobody_needs_by_the_time_it_is_found_is_not_kept() -> None:
    """That of each engine of which the first load was cancelled was, however often it restarted."""
    machine = ConsumerMachine(50.0, 8.0)
    machine.fetch(FETCH, 0.0)
    machine.cancel(FETCH.handle, "its client left", 1.0)
    assert [(type(action), action.link) for action in machine.resolved(SOURCE, ROUTE, 2.0)] == [
        (Close, "a"),
        (Close, "b"),
    ]
    assert machine.fetch(FETCH, 3.0) == [Resolve(SOURCE, None)]
    assert machine.resolved(SOURCE, ROUTE, 4.0) == [Dial("a"), Dial("b")]
