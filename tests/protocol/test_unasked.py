"""A fetch that ends before any producer rank was asked says so: only then may its engine decline it, which a producer counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvxfer.failures import Failure, FailureKind
from kvxfer.protocol import messages as m
from kvxfer.protocol.consumer import ConsumerMachine
from kvxfer.protocol.values import Action, Emit, Ended, LinkInfo, RankRoute, Resolved, Send, Stages
from tests.protocol.test_doors import PLANNER
from tests.protocol.test_prepare import FETCH, ROUTE, SOURCE

START = 50.0
WHY = Failure(FailureKind.INCOMPATIBLE, "the models differ: weights")
NO_LINK = {
    "cancelled": lambda machine: machine.cancel("req", "the client left", 2.0),
    "overdue": lambda machine: machine.tick(1.0 + START),
    "a link refused": lambda machine: machine.link_down("b", WHY, 2.0),
    "closed": lambda machine: machine.close(WHY, 2.0),
}
"""How a fetch may end that waits for links to two producer ranks."""

ends = pytest.mark.parametrize("end", NO_LINK.values(), ids=NO_LINK.keys())
End = Callable[[ConsumerMachine], list[Action]]


def fetching(route: Resolved | None = ROUTE) -> ConsumerMachine:
    machine = ConsumerMachine(START, 8.0)
    machine.fetch(FETCH, 1.0)
    if route is not None:
        machine.resolved(SOURCE, route, 1.0)
    return machine


def unasked(actions: list[Action]) -> bool:
    (ended,) = (a.event for a in actions if isinstance(a, Emit) and isinstance(a.event, Ended))
    assert not ended.outcome.delivered
    return ended.stages.unasked


def told(actions: list[Action]) -> list[m.Message]:
    return [action.message for action in actions if isinstance(action, Send)]


@ends
def test_while_no_link_was_up(end: End) -> None:
    actions = end(fetching())
    assert unasked(actions) and not told(actions)


@ends
def test_not_once_one_rank_of_two_was_asked_which_hears_of_the_end_by_itself(end: End) -> None:
    machine = fetching()
    machine.link_up("a", LinkInfo("read", PLANNER), 1.5)
    actions = end(machine)
    assert not unasked(actions) and [type(message) for message in told(actions)] == [m.CloseAttempt]


def test_not_when_the_link_over_which_it_was_asked_was_lost() -> None:
    """The producer may have taken it in, and may count it."""
    machine = fetching(Resolved((RankRoute("a", 1),)))
    machine.link_up("a", LinkInfo("read", PLANNER), 1.5)
    machine.link_reset("a", Failure(FailureKind.PEER_LOST, "the cable was cut"), 2.0)
    assert not unasked(machine.link_down("a", WHY, 3.0))


def test_without_a_way() -> None:
    assert unasked(fetching(None).resolved(SOURCE, WHY, 2.0))
    machine = ConsumerMachine(START, 8.0)
    machine.close(WHY, 1.0)
    assert unasked(machine.fetch(FETCH, 2.0))


def test_who_has_said_nothing_has_not_said_that() -> None:
    assert not Stages().unasked and Stages(1.0).unasked and not Stages(1.0, 2.0).unasked
